"""The common part of prefill and decode workers; imports no torch.

Read `start` first: it builds the parts of a worker.

start           the start of every worker: checkpoint, engine on its thread, identity
status          WorkerIdentity, WorkerLoad, StatusHub: what a worker tells its routers
prefix_changes  changes of its cached prefix blocks, sent in its status
servicer        the Worker service over a StatusHub, and status <-> message
messages        answers and outputs of decode workers, as plain types
listeners       the three listeners: control, kv, ops
thread          EngineThread: the thread on which forward passes run
progress        a worker is healthy only while its work makes progress
faults          detects a worker that computes wrong values
block_copier    digests of a sequence's blocks, and copies between cache and pages
cache_tiers     the cache tiers of a worker, with their statistics
audit           the ledger, and the audit of an idle worker
"""
