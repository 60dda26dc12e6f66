"""What prefill and decode workers have in common; loads no torch.

status     WorkerIdentity, WorkerLoad, StatusHub: who a worker is and how it fares
prefix_news  which prefix blocks it holds, as news in its status
servicer   the Worker service over a StatusHub, and status <-> message
thread     EngineThread: where forward passes run
progress   Progress: health means that work moves
listeners  the three listeners: control, kv, ops
blocks     Blocks: names of a sequence's blocks, and their way between cache and pages
caches     the prefix cache as an operator sees it
audit      the ledger, and the audit when idle
start      what every worker starts with
"""
