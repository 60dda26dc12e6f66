"""Reasons for a worker to stop, and their detection: no progress, wrong values, or pages without owner.

    progress ──(limit_s without any)──▶ stalled: NOT_SERVING ──(HANG_CHECKS - 1 more without any)──▶ hung: replaced

A hang is counted in looks, not in seconds: a process that was stopped for an hour is not hung when it goes on.

If the logits of a request are not finite, its input may be the cause, or the worker: bad weights, bad memory. When
MAX_NO_TOKEN_REQUESTS different requests got no token, and no request between them got one, the worker computes
tokens for a prompt of its own. If it gets them, the requests were the cause. If not, the worker is.

The audit runs whenever the worker is idle. The pool's own audit checks that each page is free, cached, or counted by
its owners. The ledger compares these owners with the entries of the service. If no entry names an owner, the service
has lost it, and its pages would never be freed. An owner's name begins with "request/attempt". An owner counts as lost
if two audits in a row list it, and the service does not name it between them or after them. The second audit is needed
because a caller may use the same name for its next request, which must not end the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.engine import contract
from baton.engine.contract import Engine, PromptChunk, compute_chunk
from baton.errors import EngineError, NoToken, OutOfPages
from baton.kv.pool import DRAINING
from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import State
from baton.process import executors
from baton.process.executors import WORK
from baton.request import SamplingParams, SequenceState
from baton.rpc.admin import LedgerSource
from baton.telemetry.logs import about
from baton.worker.status import WorkerIdentity

_log = logging.getLogger(__name__)

_CHECKS_PER_LIMIT = 4
HANG_CHECKS = 2 * _CHECKS_PER_LIMIT
"""Looks in a row that find a stall, after which the engine counts as hung."""


class Watchdog:
    """Knows the time of the engine's last progress; the engine thread records it after each layer and each step.

    A change of `work_counter` (`Engine.work_counter`) since the last look counts as progress too.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, work_counter: Callable[[], int] = lambda: 0
    ) -> None:
        self._clock = clock
        self._work_counter = work_counter
        self._recorded_at: float | None = None
        self._seen, self._seen_at = 0, -math.inf

    def record(self) -> None:
        """Record that there is work, and that it has just made progress."""
        self._recorded_at = self._clock()

    def set_idle(self) -> None:
        """Record that there is no work."""
        self._recorded_at = None

    def stalled_s(self) -> float:
        """Seconds since the last progress was recorded or seen; 0 without work. Call it from one thread."""
        recorded_at = self._recorded_at
        if recorded_at is None:
            return 0.0
        now, number = self._clock(), self._work_counter()
        if number != self._seen:
            self._seen, self._seen_at = number, now
        return now - max(recorded_at, self._seen_at)


async def watch_engine(watchdog: Watchdog, limit_s: float, report: Callable[[bool], object]) -> None:
    """Call `report(False)` after `limit_s` seconds without progress, and `report(True)` when there is progress again.

    Runs until cancelled, or until the engine hangs: after about 3 times `limit_s`. Looks four times in each `limit_s`,
    so a stall is reported after at most 1.5 times that.
    """
    looks = 0
    while looks < HANG_CHECKS:
        await asyncio.sleep(limit_s / _CHECKS_PER_LIMIT)
        stalled = watchdog.stalled_s() >= limit_s
        if stalled != bool(looks):
            report(not stalled)
        looks = looks + 1 if stalled else 0


MAX_NO_TOKEN_REQUESTS = 3
"""Number of different requests without a token after which the worker tests itself."""
SELF_TEST = "self-test"
"""The owner of the pages that the worker's own prompt uses."""

_PROMPT_TOKENS = 16


class NoTokenCounter:
    """Counts requests that got no token since the last token. If there are several, the worker tests its engine."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    @property
    def suspected(self) -> bool:
        """Whether there are too many of them; then `run_self_test` finds the cause."""
        return len(self._requests) >= MAX_NO_TOKEN_REQUESTS

    def record_success(self) -> None:
        """Record that a token was computed."""
        self._requests.clear()

    def record_failure(self, request_id: str) -> None:
        """Record that no token could be computed for this request."""
        self._requests.add(request_id)

    def run_self_test(self, engine: Engine, watchdog: Watchdog, *, step: bool) -> None:
        """Compute a token for a prompt of the worker's own, and with `step` one more by a decode step.

        Then resets the count. Call it on the engine thread; with `step`, only while the batch is empty. Raises
        EngineError if there is no token. If no page is free, it tests nothing.
        """
        requests = sorted(self._requests)
        names, extra = ", ".join(requests), about(*requests)
        self._requests.clear()
        try:
            _compute_own(engine, watchdog, step=step)
        except OutOfPages as error:
            _log.warning("%s got no token, and the worker can't be tested: %s", names, error, extra=extra)
        except Exception as error:
            raise EngineError(
                f"{len(requests)} different requests got no token, with no good token between them, and neither did "
                f"the worker's own prompt ({error}): {requests}"
            ) from error
        else:
            _log.warning("%s got no token; the worker's own prompt did, so they are the cause", names, extra=extra)


def _compute_own(engine: Engine, watchdog: Watchdog, *, step: bool) -> None:
    spec, greedy = engine.spec, SamplingParams(temperature=0.0)
    ids = tuple(range(min(_PROMPT_TOKENS, spec.vocab_size, max(1, spec.max_model_len - 2))))
    handle = engine.reserve(SELF_TEST, len(ids) + 1)
    try:
        prompt = SequenceState(greedy, ids)
        chunk = PromptChunk(handle, ids, 0, len(ids), lambda _: watchdog.record(), (prompt,))
        result = compute_chunk(engine, chunk)
        if step:
            engine.insert(contract.EngineSequence(handle, SequenceState(greedy, ids, (result.tokens[0].token_id,))))
            for _, found in engine.launch().result().sequences:
                if isinstance(found, NoToken):
                    raise found
    finally:
        engine.free(handle)


MIN_INTERVAL_S = 1.0


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
        identity.tensor_parallel,
        identity.pipeline_parallel,
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


class AuditedService(Protocol):
    """A service of a worker, for the ledger."""

    @property
    def idle(self) -> bool:
        """Whether it holds no page."""

    def ledger_entries(self) -> Sequence[LedgerEntry]:
        """One entry for each owner of pages."""

    def fail_engine(self, error: BaseException) -> object:
        """End all its requests because the engine can't go on; idempotent."""


class WorkerAudit:
    """The ledger of a worker: the entries of all its services. It is audited when all of them are idle.

    A fault that one service finds ends the others too, because they share the engine. Used on the asyncio loop only.
    """

    def __init__(self, identity: WorkerIdentity, engine: Engine) -> None:
        self._identity = identity
        self._engine = engine
        self._services: list[AuditedService] = []
        self._audit = IdleAudit(self.ledger, lambda: all(each.idle for each in self._services), self.fail)
        self._running: asyncio.Task[None] | None = None

    def add(self, service: AuditedService) -> None:
        """Add a service."""
        self._services.append(service)

    def start(self) -> None:
        """Audit whenever the worker becomes idle; idempotent."""
        if self._running is None:
            self._running = asyncio.create_task(self._audit.run(), name="idle-audit")
            self._running.add_done_callback(self._on_stopped)

    def notify(self) -> None:
        """Tell the audit that the worker may have become idle."""
        self._audit.notify()

    async def ledger(self) -> Ledger:
        """The ledger: all owners of pages, and whether the sums are right."""

        def entries() -> list[LedgerEntry]:
            return [entry for service in self._services for entry in service.ledger_entries()]

        return await build_ledger(self._identity, self._engine, entries)

    def fail(self, error: BaseException) -> None:
        """End all requests of all services."""
        for service in self._services:
            service.fail_engine(error)

    async def close(self) -> None:
        """End the audit; idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _on_stopped(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self.fail(error)


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
