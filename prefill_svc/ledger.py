"""What a prefill worker's jobs hold, as entries of its ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.contract import EngineSpec
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from prefill_svc.job import Job


def entries(jobs: Iterable[Job], spec: EngineSpec, now: float) -> list[LedgerEntry]:
    """An entry for each job that goes on or holds pages; `now` is on the jobs' clock."""
    return [_entry(job, spec, now) for job in dict.fromkeys(jobs)]


def _entry(job: Job, spec: EngineSpec, now: float) -> LedgerEntry:
    pages = spec.pages_for(len(job.ids)) if job.handle is not None else 0
    kind, state, deadline_s, detail = "kv", job.life.state, job.life.deadline - now, ""
    if job.over:
        kind, state, deadline_s, detail = _after_its_end(job)
    elif job.task.transfer_id:
        detail = f"transfer {job.task.transfer_id}"
    return LedgerEntry(
        job.task.name,
        kind,
        state.value,
        pages,
        pages * spec.page_size * spec.kv_format.token_bytes,
        now - job.life.since,
        None if math.isinf(deadline_s) else deadline_s,
        detail=detail,
    )


def _after_its_end(job: Job) -> tuple[str, State, float, str]:
    """Kind, state, seconds until the deadline, and detail for a job that only others hold pages of."""
    if job.export is None or job.export.closed:
        return "kv", State.ENDED, math.inf, "cached blocks on their way"
    detail = f"transfer {job.task.transfer_id}"
    if job.export.ended:
        return "draining", State.ENDED, math.inf, detail
    return "export", job.life.state, job.export.lease_left, detail
