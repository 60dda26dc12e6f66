"""The least number of floating-point operations and bytes of a forward pass, from which MFU and MBU follow.

A multiplication and an addition are two operations. Attention counts only the scores that the causal mask and a sliding
window leave. The output projection counts only the requested rows. For all other tokens the last layer counts only
their K and V. Norms, rotary embeddings, activations and sampling are left out: they are
below one percent, and leaving them out makes both ratios smaller. A decode step reads each weight once (the embedding
table only where it is the output projection too) and each sequence's KV once, and writes the KV of its new token;
activations are assumed to stay in caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.planner.shape import ModelShape


def prefill_flops(shape: ModelShape, tokens: int, past: int = 0, logits: int = 1) -> int:
    """Operations of `tokens` new tokens of one sequence after `past` others, and `logits` rows of the projection."""
    *others, last = shape.windows
    weights = len(others) * shape.layer_weights * tokens
    weights += shape.kv_weights * tokens + (shape.layer_weights - shape.kv_weights + shape.head_weights) * logits
    pairs = sum(_pairs(tokens, past, window) for window in others) + _pairs(logits, past + tokens - logits, last)
    return 2 * weights + _pair_flops(shape) * pairs


def decode_flops(shape: ModelShape, batch: int, contexts: int | Sequence[int]) -> int:
    """Operations of one step over `batch` sequences; `contexts` count the new token, one for all or one for each."""
    seen = sum(_pairs(1, context - 1, window) for context in _each(batch, contexts) for window in shape.windows)
    return 2 * shape.step_weights * batch + _pair_flops(shape) * seen


def decode_bytes(
    shape: ModelShape, batch: int, contexts: int | Sequence[int], weight_bytes: int, kv_token_bytes: int
) -> int:
    """Bytes that one step over `batch` sequences moves.

    `contexts` as in `decode_flops`. `weight_bytes`: bytes of all weights that a step reads (`step_weights` times the
    bytes of an element). `kv_token_bytes`: bytes of one token's KV over all layers.
    """
    seen = sum(_pairs(1, context - 1, window) for context in _each(batch, contexts) for window in shape.windows)
    return weight_bytes + kv_token_bytes * seen // shape.num_layers + kv_token_bytes * batch


def _pair_flops(shape: ModelShape) -> int:
    """Operations of one query and one key token in one layer: the score and its share of the weighted sum."""
    return 4 * shape.num_heads * shape.head_dim


def _pairs(tokens: int, past: int, window: int | None) -> int:
    """Number of (query, key) pairs that the causal mask and the window leave, for `tokens` queries after `past`."""
    if window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    # Queries that see fewer keys than the window holds come first.
    growing = min(tokens, max(0, window - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def _each(batch: int, contexts: int | Sequence[int]) -> Sequence[int]:
    if isinstance(contexts, int):
        return [contexts] * batch
    if len(contexts) != batch:
        raise ValueError(f"{len(contexts)} contexts for a batch of {batch}")
    return contexts
