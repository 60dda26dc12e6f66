"""The prefill service: one prompt in, its first token out, its KV held for decode to pull."""
