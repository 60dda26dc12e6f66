"""The prefill service: one prompt in, its first token out, its KV held for decode to pull.

job        one attempt at a prompt: what was asked, what it holds, what happens to it
scheduler  pure: which prompt is computed next, and how much of it
plan       pure: from where which blocks of a prefix are loaded
preparing  from admission to READY: look-up, pages, loads
peers      prefixes fetched from decode workers
beside     tasks beside the engine
chunks     the loop that computes
worker     accepts jobs, ends them, and writes their blocks back
ledger     pure: what jobs hold, for the ledger
servicer   translates
app        starts and stops everything
"""
