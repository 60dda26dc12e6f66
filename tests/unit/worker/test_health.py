"""The ledger of a worker, and the audit when it is idle."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from baton.config.worker import WorkerConfig
from baton.engine.fake import FakeEngine
from baton.errors import EngineError
from baton.ledger import Ledger, LedgerEntry
from baton.worker import health
from baton.worker.health import IdleAudit, build_ledger, describe
from baton.worker.status import WorkerRole, new_identity
from tests.engine_calls import prefill_chunk

ENGINE = FakeEngine(pages=8)
IDENTITY = new_identity(WorkerConfig(worker_id="w"), WorkerRole.DECODE, ENGINE.spec, "")


def entry(owner: str, pages: int) -> LedgerEntry:
    return LedgerEntry(owner, "kv", "decoding", pages)


async def test_the_ledger_holds_owners_of_pages_against_those_whom_the_service_knows() -> None:
    engine = FakeEngine(pages=8)
    known, forgotten = engine.reserve("a/0", 20), engine.reserve("b/0", 20)
    ledger = await build_ledger(IDENTITY, engine, lambda: [entry("a/0", 2), entry("b/0", 2)])
    assert (ledger.process, ledger.role, ledger.incarnation) == ("w", "decode", IDENTITY.incarnation)
    assert (ledger.pages_total, ledger.pages_free, ledger.violation) == (8, 4, "")
    ledger = await build_ledger(IDENTITY, engine, lambda: [entry("a/0", 2)])
    assert ledger.violation == "no running request owns the pages of b/0"
    engine.free(forgotten)
    assert (await build_ledger(IDENTITY, engine, lambda: [entry("a/0", 2)])).violation == ""
    engine.free(known)


async def test_an_owner_that_ends_while_the_ledger_is_taken_is_no_violation() -> None:
    engine = FakeEngine(pages=8)
    handle = engine.reserve("a/0", 20)
    calls = []

    def entries() -> Sequence[LedgerEntry]:
        calls.append(len(calls))
        if len(calls) < 2:
            return [entry("a/0", 2)]
        engine.free(handle)
        return []

    assert (await build_ledger(IDENTITY, engine, entries)).violation == ""


async def test_a_name_that_is_used_again_while_the_ledger_is_taken_is_no_violation() -> None:
    """The first request ends between the two audits, and the second of its name begins."""
    engine = FakeEngine(pages=8)
    first, listed = engine.reserve("a/0", 20), [[], [], [entry("a/0", 2)]]

    def entries() -> Sequence[LedgerEntry]:
        return listed.pop(0)

    assert (await build_ledger(IDENTITY, engine, entries)).violation == ""
    assert not listed
    engine.free(first)


async def test_pages_given_up_in_a_copy_are_listed_as_draining() -> None:
    come, go = threading.Event(), threading.Event()

    def delay(_seconds: float) -> None:
        come.set()
        go.wait(60)

    engine = FakeEngine(pages=8, chunk_time=1.0, delay=delay)
    handle = engine.reserve("a/0", 20)
    chunk = asyncio.create_task(
        asyncio.to_thread(prefill_chunk, engine, handle, range(20), 0, 20, on_layer=lambda layer: None)
    )
    await asyncio.to_thread(come.wait, 60)
    engine.free(handle)
    ledger = await build_ledger(IDENTITY, engine, list)
    assert ledger.entries == (LedgerEntry("a/0", "draining", "ended", 2, 2 * 16 * 64),)
    assert ledger.violation == ""
    go.set()
    await chunk
    assert (await build_ledger(IDENTITY, engine, list)).entries == ()


async def test_findings_of_the_pool_are_in_the_ledger() -> None:
    engine = FakeEngine(pages=8)
    engine._kv.pool._allocator._free[0] -= 1
    ledger = await build_ledger(IDENTITY, engine, lambda: [entry("a/0", 2)])
    assert "page 0: count 0, owners 0, not free" in ledger.violation
    assert describe(ledger).splitlines()[1] == "  a/0 kv decoding: 2 pages, 0 bytes, 0.0 s"


async def test_an_idle_audit_tells_only_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(health, "MIN_INTERVAL_S", 0.05)
    idle, violation, taken = False, "", asyncio.Queue[float]()
    loop, broken = asyncio.get_running_loop(), asyncio.Queue[EngineError]()

    async def ledger() -> Ledger:
        taken.put_nowait(loop.time())
        return Ledger("w", "decode", violation=violation)

    auditing = IdleAudit(ledger, lambda: idle, broken.put_nowait)
    running = asyncio.create_task(auditing.run())
    auditing.notify()
    for _ in range(3):
        await asyncio.sleep(0)
    assert taken.empty()
    idle = True
    auditing.notify()
    first = await asyncio.wait_for(taken.get(), 60)
    auditing.notify()
    auditing.notify()
    second = await asyncio.wait_for(taken.get(), 60)
    assert second - first >= 0.05
    violation = "a page is lost"
    auditing.notify()
    error = await asyncio.wait_for(broken.get(), 60)
    assert "a page is lost" in str(error)
    assert "a page is lost" in caplog.text
    await asyncio.wait_for(running, 60)
