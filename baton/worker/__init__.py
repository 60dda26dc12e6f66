"""What prefill and decode workers have in common; loads no torch.

status     WorkerIdentity, WorkerLoad, StatusHub: the identity and the load of a worker
prefix_changes  changes of its cached prefix blocks, sent in its status
servicer   the Worker service over a StatusHub, and status <-> message
thread     EngineThread: where forward passes run
progress   Progress: a worker is healthy only while its work makes progress
listeners  the three listeners: control, kv, ops
block_copier  digests of a sequence's blocks, and copies between cache and pages
cache_tiers  the prefix cache as an operator sees it
audit      the ledger, and the audit when idle
start      the common start of both workers
"""
