"""Memory of a prefill worker's jobs, as entries of its ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.contract import EngineSpec
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from prefill_svc.job import PrefillJob


def entries(jobs: Iterable[PrefillJob], spec: EngineSpec, now: float) -> list[LedgerEntry]:
    """One entry for each job that runs or holds pages; `now` is on the jobs' clock."""
    return [_entry(job, spec, now) for job in dict.fromkeys(jobs)]


def _entry(job: PrefillJob, spec: EngineSpec, now: float) -> LedgerEntry:
    pages = spec.pages_for(len(job.ids)) if job.handle is not None else 0
    kind, state, deadline_s, detail = "kv", job.life.state, job.life.deadline - now, ""
    if job.finished:
        kind, state, deadline_s, detail = _describe_finished(job)
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


def _describe_finished(job: PrefillJob) -> tuple[str, State, float, str]:
    """Kind, state, seconds until the deadline, and detail of a job that is finished but whose pages are still in
    use.
    """
    if job.export is None or job.export.closed:
        return "kv", State.ENDED, math.inf, "cached blocks on their way"
    detail = f"transfer {job.task.transfer_id}"
    if job.export.ended:
        return "draining", State.ENDED, math.inf, detail
    return "export", job.life.state, job.export.lease_left, detail
