"""The prefill service: a prompt comes in; its first token goes out, and its KV is held for decode to pull.

Read `worker` first: one coroutine there is a prompt's whole life.

worker     look up, allocate, load, compute, commit, write back, hold, free
scheduler  pure: whose pages are allocated next, whose chunk is computed next
job        one attempt at a prompt: what was asked, what it holds, the stream of what happens to it
prefix     cached blocks of a job: look-up, plan, load, publication, write-back
plan       pure: from where which blocks of a prefix are loaded
peers      prefixes fetched from decode workers
chunks     one engine for all jobs: turns, and chunks on the engine thread
ledger     pure: what jobs hold, for the ledger
servicer   translates
app        starts and stops everything
"""
