"""The common part of prefill and decode workers; imports no torch.

Read `start` first: it builds the parts of a worker.

start         the start of every worker: checkpoint, engine on its thread, identity, and the three listeners
status        reports to routers: identity, load, changes of its cached blocks, the Worker service
health        finds a worker that makes no progress, computes wrong values, or has lost pages
prefix_cache  tiers of the cache in their order, copies between them and pages, digests, statistics
"""
