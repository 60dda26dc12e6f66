"""The engine: prompts and batches in, KV and tokens out; services use it through its contract alone.

    Engine ──▶ KvManager                      pages, handles, cached blocks, slots of each EngineSequence
       └─ ForwardPlan ──▶ Executor ──▶ ModelRunner

Read `contract` first, then `core`. `factory` builds an engine over a model; `fake` is one whose tokens
can be computed by hand. One contract suite runs over both.
"""
