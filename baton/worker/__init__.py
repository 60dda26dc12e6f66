"""What prefill and decode workers have in common; loads no torch.

config     WorkerConfig: the shared settings; `engine_config()` for the engine's share
status     WorkerIdentity, WorkerLoad, StatusHub: who a worker is and how it fares
servicer   the Worker service over a StatusHub, and status <-> message
thread     EngineThread: where forward passes run
progress   Progress: health means that work moves
listeners  the three listeners: control, kv, ops
audit      the ledger, and the audit when idle
start      what every worker starts with
"""
