"""Decode's entries in the ledger: every handle that an attempt holds, by the name that the engine knows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.contract import Engine, KvHandle
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from decode_svc.attempt import Attempt


def entries(attempts: Iterable[Attempt], engine: Engine, now: float) -> list[LedgerEntry]:
    """One entry for each handle; a paused one holds host memory instead of pages. `now` is on the attempts' clock."""
    spec, host = engine.spec, engine.host_kv()
    page_bytes = spec.page_size * spec.kv_format.token_bytes

    def entry(attempt: Attempt, handle: KvHandle, state: State, since: float) -> LedgerEntry:
        paused = host.get(handle.owner) if state is State.PAUSED else None
        pages = spec.pages_for(handle.capacity)
        deadline = attempt.life.deadline
        return LedgerEntry(
            owner=handle.owner,
            kind="kv" if paused is None else "host_kv",
            state=state.value,
            pages=pages,
            bytes=pages * page_bytes if paused is None else paused,
            age_s=now - since,
            deadline_s=None if math.isinf(deadline) else deadline - now,
        )

    found = []
    for attempt in attempts:
        life = attempt.life
        if attempt.committed:
            found += [entry(attempt, each.handle, each.state, each.since) for each in attempt.choices.values()]
            if attempt.pending is not None:
                found.append(entry(attempt, attempt.pending.context, State.SLOT_WAIT, attempt.pending.since))
        else:
            found += [entry(attempt, each, life.state, life.since) for each in attempt.handles]
    return found
