"""The prefill service: a prompt comes in; its first token goes out, and its KV is kept for decode to pull.

Read `worker` first: one coroutine there is the whole life of a prompt.

worker     look up, allocate, load, compute, commit, write back, hold, free
scheduler  pure: which prompt gets pages next, and which chunk is computed next
job        one attempt at a prompt: the request, what it holds, the stream of its events
prefix     cached blocks of a job: look-up, plan, load, publication, write-back
saver      blocks of long prompts go to the shared cache after each chunk
load_plan  pure: which blocks of a prefix are loaded, and from which tier
peers      prefixes fetched from decode workers
estimate   pure: rate and time left of a prompt, from its chunks
chunks     one engine for all jobs: waiting for it, and chunks on the engine thread
ledger     pure: what jobs hold, for the ledger
servicer   translates
app        starts and stops everything
"""
