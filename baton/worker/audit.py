"""A worker's ledger, and the audit that the worker runs whenever it is idle.

The pool's own audit checks that each page is free, cached, or counted by its owners. The ledger compares these owners
with the entries of the service. If no entry names an owner, the service has lost it, and its pages would never be
freed. An owner's name is "request/attempt", followed by "/choice" if choices have pages of their own. An owner is lost
in this sense if two audits list it, and the service names it neither between them nor after them. The second audit is
needed because a caller may use the same name for its next request, which must not end the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton import executors
from baton.admin import LedgerSource
from baton.engine.contract import Engine
from baton.errors import EngineError
from baton.executors import WORK
from baton.kv.pool import DRAINING
from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import State
from baton.worker.faults import SELF_TEST
from baton.worker.status import WorkerIdentity

MIN_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


async def build_ledger(
    identity: WorkerIdentity, engine: Engine, entries: Callable[[], Sequence[LedgerEntry]]
) -> Ledger:
    """The ledger now: the entries, freed pages that copies still use, and whether the sums are right.

    `entries` is called on the loop. An entry has the owner's name that was given to `Engine.reserve`.
    """
    violation, draining, listed = "", list[LedgerEntry](), entries()
    page_bytes = engine.spec.page_size * engine.spec.kv_format.token_bytes
    try:
        pages = await executors.run(WORK, engine.audit)
        listed = entries()
        for name, count in pages.items():
            if name.endswith(DRAINING):
                owner = name.removesuffix(DRAINING)
                draining.append(LedgerEntry(owner, "draining", State.ENDED.value, count, count * page_bytes))
        orphans = _owners(pages) - {entry.owner for entry in listed} - {SELF_TEST}
        if orphans:
            orphans &= _owners(await executors.run(WORK, engine.audit))
            orphans -= {entry.owner for entry in entries()}
        if orphans:
            violation = f"no running request owns the pages of {', '.join(sorted(orphans))}"
    except EngineError as error:
        violation = str(error)
    stats = engine.stats()
    return Ledger(
        identity.worker_id,
        identity.role.value,
        identity.incarnation,
        (*listed, *draining),
        stats.total,
        stats.free,
        stats.cached,
        violation,
    )


def _owners(pages: dict[str, int]) -> set[str]:
    return {name for name in pages if not name.endswith(DRAINING)}


class IdleAudit:
    """Builds the ledger when the worker has become idle, at most every MIN_INTERVAL_S; no request waits for it.

    Calls `on_violation` on the loop, once, if the ledger shows a violation.
    """

    def __init__(
        self, ledger: LedgerSource, idle: Callable[[], bool], on_violation: Callable[[EngineError], object]
    ) -> None:
        self._ledger = ledger
        self._idle = idle
        self._on_violation = on_violation
        self._wanted = asyncio.Event()

    def notify(self) -> None:
        """Tell the audit that the worker may have become idle."""
        if self._idle():
            self._wanted.set()

    async def run(self) -> None:
        """Audit whenever the worker becomes idle, until cancelled, or until a violation is found."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not self._idle():
                continue
            ledger = await self._ledger()
            if ledger.violation:
                _log.error("%s", describe(ledger))
                self._on_violation(EngineError(f"the ledger does not add up: {ledger.violation}"))
                return
            await asyncio.sleep(MIN_INTERVAL_S)


def describe(ledger: Ledger) -> str:
    """A ledger as lines of text, the violation first."""
    where = f"{ledger.role} {ledger.process} {ledger.incarnation}".rstrip()
    sums = f"{ledger.pages_free} of {ledger.pages_total} pages are free, {ledger.pages_cached} are cached"
    lines = [f"{where}: {ledger.violation or 'the sums are right'}; {sums}"]
    lines += (
        f"  {entry.owner} {entry.kind} {entry.state}: {entry.pages} pages, {entry.bytes} bytes, {entry.age_s:.1f} s"
        for entry in ledger.entries
    )
    return "\n".join(lines)
