"""A prefill scheduler without an engine."""

from baton.engine.contract import EngineSpec
from baton.kv.format import KvFormat, KvPart
from prefill_svc.scheduler import PrefillScheduler, ScheduledJob

FORMAT = KvFormat((KvPart("k", "float32", (1, 2)),), layers=1, block_size=16)


def scheduler(
    pages: int = 1000, chunk: int = 100, max_waiting: int = 64, max_model_len: int = 100_000, **spec: int
) -> PrefillScheduler:
    made = EngineSpec("m", FORMAT, 1000, max_model_len, frozenset(), 16, pages, 0, **spec)
    return PrefillScheduler(made, chunk, max_waiting)


def admit_ready(s: PrefillScheduler, tokens: int, done: int = 0, tenant: bytes = b"") -> ScheduledJob:
    prompt = s.admit(tokens, tenant)
    s.finish_lookup(prompt, done)
    s.make_ready(prompt, done)
    return prompt
