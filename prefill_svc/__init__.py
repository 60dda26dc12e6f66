"""The prefill service: a prompt comes in; its first token goes out, and its KV is kept for decode to pull.

Read `worker` first: one coroutine there is the whole life of a prompt. Pure modules use no torch, gRPC or asyncio.

worker     look up, allocate, load, compute chunk by chunk on the one engine, commit, write back, hold, free
scheduler  pure: the choice of the next prompt for pages, and of the next chunk
job        one attempt at a prompt: the request, its pages, its state, the stream of its events
progress   pure: the rate and the time left of a prompt, estimated from its latest chunks
prefix     cached blocks of a job: look-up, plan, load from a tier or a decode worker, publication, write-back
servicer   translation of requests and events
app        starts and stops everything
"""
