"""Settings, identity, status, engine thread and progress of a worker."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config.worker import WorkerConfig
from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest
from baton.kv.format import KvFormat, KvPart, Shard
from baton.model.checkpoint import tokenizer_digest
from baton.process.executors import EngineThread
from baton.worker.health import HANG_CHECKS, Watchdog, watch_engine
from baton.worker.status import (
    StatusHub,
    WorkerLoad,
    WorkerRole,
    WorkerStatus,
    new_identity,
    status_from_proto,
    status_to_proto,
)

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=3, block_size=16)
SPEC = EngineSpec("print", FORMAT, 100, 64, frozenset({1}), 16, 8, 4)


def test_each_start_is_another_incarnation() -> None:
    first, second = (new_identity(WorkerConfig(), WorkerRole.DECODE, SPEC, "d") for _ in range(2))
    assert first.incarnation != second.incarnation
    assert first.shards == (Shard("", range(3), range(2)),)


def test_a_status_survives_its_message() -> None:
    identity = new_identity(WorkerConfig(model="/x/m"), WorkerRole.PREFILL, SPEC, "digest", converts_kv=True)
    (shard,) = identity.shards
    shards = (replace(shard, kv_address=":7001"), replace(shard, kv_address="[::1]:7002"))
    identity = replace(identity, ticket_key_ids=(b"12345678", b"87654321"), shards=shards)
    status = WorkerStatus(identity, WorkerLoad(1, 2, 3, 4, 5, 6, 7.5, 8), draining=True)
    assert status_from_proto(status_to_proto(status)) == status


@pytest.mark.parametrize(
    ("address", "block_size", "words"),
    [(address, 16, rf"shards\.kv_address: .* got '{address}'") for address in ("", "host", ":x", "host:70000")]
    + [(":1", 0, r"kv_format\.block_size: must be at least 1, got 0")],
)
def test_a_status_with_a_wrong_address_or_size_is_refused(address: str, block_size: int, words: str) -> None:
    identity = new_identity(WorkerConfig(), WorkerRole.PREFILL, SPEC, "digest")
    shards = (replace(identity.shards[0], kv_address=address),)
    identity = replace(identity, shards=shards, kv_format=replace(identity.kv_format, block_size=block_size))
    message = status_to_proto(WorkerStatus(identity, WorkerLoad(), draining=False))
    with pytest.raises(InvalidRequest, match=rf"identity\.{words}"):
        status_from_proto(message)


async def test_a_watch_tells_at_once_then_on_change_and_ends_with_the_hub() -> None:
    hub = StatusHub(
        new_identity(WorkerConfig(), WorkerRole.DECODE, SPEC, ""), lambda: WorkerLoad(requests_without_token=3)
    )
    watch = hub.watch()
    first = await anext(watch)
    assert first.load.requests_without_token == 3
    assert not first.draining
    hub.advertise(":7001")
    hub.drain()
    second = await anext(watch)
    assert second.draining
    assert second.identity.shards[0].kv_address == ":7001"
    hub.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_drain_waits_until_no_watch_is_open() -> None:
    hub = StatusHub(new_identity(WorkerConfig(), WorkerRole.DECODE, SPEC, ""), WorkerLoad)
    await hub.wait_unwatched()
    watches = [hub.watch() for _ in range(2)]
    for watch in watches:
        await anext(watch)
    waiting = asyncio.create_task(hub.wait_unwatched())
    for watch in watches:
        assert not waiting.done()
        await watch.aclose()
        await asyncio.sleep(0)
    await waiting


async def test_every_status_says_anew_whose_tickets_are_taken() -> None:
    hub, taken = StatusHub(new_identity(WorkerConfig(), WorkerRole.PREFILL, SPEC, ""), WorkerLoad), (b"old",)
    assert hub.status().identity.ticket_key_ids == ()
    hub.set_ticket_keys(lambda: taken)
    assert hub.status().identity.ticket_key_ids == (b"old",)
    taken = (b"old", b"new")
    assert hub.status().identity.ticket_key_ids == (b"old", b"new")


async def test_calls_run_in_order_on_one_other_thread() -> None:
    thread = EngineThread("engine-test")
    seen = [await thread.run(threading.current_thread) for _ in range(3)]
    assert len(set(seen)) == 1
    assert seen[0].name.startswith("engine-test")
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    await thread.close()
    assert not seen[0].is_alive()


async def test_closing_the_engine_thread_withdraws_what_has_not_begun() -> None:
    thread, began, go_on = EngineThread(), threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        return "done" if go_on.wait(60) else "late"

    first, second = thread.run(work), thread.run(work)
    await asyncio.to_thread(began.wait, 60)
    third = thread.run_preempting(work)
    closing = asyncio.create_task(thread.close())
    await asyncio.wait([second, third], timeout=60)
    assert second.cancelled()
    assert third.cancelled()
    go_on.set()
    await closing
    assert await first == "done"


async def test_closing_the_engine_thread_does_not_mind_what_it_takes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, taken = threading.Event(), threading.Event()

    class Slow(Future[Any]):
        def cancel(self) -> bool:
            closing.set()
            return taken.wait(60) and super().cancel()

    monkeypatch.setattr("baton.process.executors.Future", Slow)
    thread = EngineThread()

    def work() -> None:
        assert closing.wait(60)
        thread.preemption_point()
        taken.set()

    outer = thread.run(work)
    inner = [thread.run_preempting(int) for _ in range(2)]
    await thread.close()
    assert await asyncio.wait_for(asyncio.gather(outer, *inner), 60) == [None, 0, 0]


async def test_a_call_that_preempts_runs_within_another_or_after_it() -> None:
    thread, began, go_on = EngineThread(), threading.Event(), threading.Event()
    order: list[str] = []

    def work(name: str) -> None:
        began.set()
        assert go_on.wait(60)
        thread.preemption_point()
        order.append(name)

    def fail() -> None:
        order.append("fails")
        raise ZeroDivisionError

    outer, queued = thread.run(work, "outer"), thread.run(work, "queued")
    await asyncio.to_thread(began.wait, 60)
    failing, inner = thread.run_preempting(fail), thread.run_preempting(order.append, "inner")
    go_on.set()
    await asyncio.wait_for(asyncio.gather(outer, inner, queued), 60)
    with pytest.raises(ZeroDivisionError):
        await failing
    assert order == ["fails", "inner", "outer", "queued"]
    await asyncio.wait_for(thread.run_preempting(order.append, "alone"), 60)
    assert order[-1] == "alone"
    await thread.close()


def test_progress_stalls_only_while_there_is_work() -> None:
    now = 100.0
    watchdog = Watchdog(lambda: now)
    assert watchdog.stalled_s() == 0
    watchdog.record()
    now = 105.0
    assert watchdog.stalled_s() == 5
    watchdog.set_idle()
    assert watchdog.stalled_s() == 0


def test_work_counted_within_a_layer_is_progress_and_its_end_is_a_stall() -> None:
    now, number = 0.0, 7
    watchdog = Watchdog(lambda: now, lambda: number)
    watchdog.record()
    for _ in range(3):
        now, number = now + 9, number + 1
        assert watchdog.stalled_s() == 0
    now += 9
    assert watchdog.stalled_s() == 9
    now = 40.0
    watchdog.record()
    now = 42.0
    assert watchdog.stalled_s() == 2


async def test_a_stall_is_reported_once_and_so_is_its_end() -> None:
    now, reports = 0.0, asyncio.Queue[bool]()
    watchdog = Watchdog(lambda: now)
    watchdog.record()
    watching = asyncio.create_task(watch_engine(watchdog, 0.02, reports.put_nowait))
    now = 1.0
    assert await asyncio.wait_for(reports.get(), 60) is False
    watchdog.record()
    assert await asyncio.wait_for(reports.get(), 60) is True
    watching.cancel()
    assert reports.empty()


async def test_an_engine_hangs_when_look_after_look_finds_no_progress_however_long_the_process_was_stopped() -> None:
    now, looks = 0.0, 0
    watchdog = Watchdog(lambda: now)

    class Watched(Watchdog):
        def stalled_s(self) -> float:
            nonlocal looks
            looks += 1
            return watchdog.stalled_s()

    watchdog.record()
    reports: asyncio.Queue[bool] = asyncio.Queue()

    def report(healthy: bool) -> None:
        nonlocal looks
        reports.put_nowait(healthy)
        looks = 1
        if not healthy and reports.qsize() < 3:
            # As after an hour of SIGSTOP: one look finds a stall, and the next one finds progress.
            watchdog.set_idle()

    watching = asyncio.create_task(watch_engine(Watched(), 0.02, report))
    now = 3600.0
    async with asyncio.timeout(60):
        assert not await reports.get()
        assert await reports.get()
        assert not watching.done()
        # Now it hangs: `report` says so only once.
        reports.put_nowait(False)
        reports.put_nowait(False)
        watchdog.record()
        now += 1
        await watching
    assert looks == HANG_CHECKS


def test_the_tokenizer_digest_depends_on_the_files_that_matter(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_digest(tmp_path) == first
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    assert tokenizer_digest(tmp_path) not in (first, "")
