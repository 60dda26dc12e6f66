"""A prefill worker watched: its heartbeats, the limits of its states, its stall, its ledger and its audits."""

import asyncio
import itertools
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient
from baton.engine.fake import FakeEngine
from baton.errors import EngineError
from baton.rpc.errors import from_rpc_error
from tests.prefill import PROMPT, WAIT_S, Gate, read, serving, status_of


async def heartbeats(call: Any, count: int) -> None:
    """Read so many messages, which say no more than that the job is alive."""
    for _ in range(count):
        assert not (await asyncio.wait_for(call.read(), WAIT_S)).HasField("done")


async def test_a_living_job_is_heard_while_it_waits_and_in_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job.HEARTBEAT_S", 0.02)
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate), chunk_size=60) as client:
        first = client.call()
        await gate.reached()
        await heartbeats(first, 4)
        second = client.call(PROMPT[:99])
        await heartbeats(second, 4)
        gate.open()
        for call in (first, second):
            while not (await call.read()).HasField("done"):
                pass


async def test_a_prompt_that_gets_no_chunk_in_time_is_refused_with_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job.PREPARING_S", 0.05)
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        first = asyncio.create_task(read(client.call()))
        await gate.reached()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read(client.call()), WAIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).retry_after == 1.0
        assert not first.done(), "the state that it is in by now has another limit"
        gate.open()
        assert (await first)[-1].done.first_tokens


async def test_a_prefill_that_crawls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job._PREFILLING_S", 0.0)
    monkeypatch.setattr("prefill_svc.job.PREFILL_TOKEN_S", 0.0)
    async with serving() as client:
        assert await status_of(client.call(transfer_id="t")) == (
            grpc.StatusCode.UNAVAILABLE,
            "the prefill was given up with 0 of 100 tokens prefilled",
        )
        await client.pages_back()


async def test_a_wedged_engine_is_told_to_watchers_and_so_is_its_recovery() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate), stall_s=0.2) as client:
        running = asyncio.create_task(read(client.call()))
        await gate.reached()
        await client.status(lambda status: status.stalled)
        gate.open()
        await running
        await client.status(lambda status: not status.stalled)


async def test_an_engine_that_counts_work_is_wedged_when_its_count_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, looks = Gate(), itertools.count(1)
    engine, stuck, looked = FakeEngine(chunk_time=1.0, delay=gate), asyncio.Event(), asyncio.Event()

    def work_counter() -> int:
        if stuck.is_set():
            return -1
        number = next(looks)
        if number == 3 * 4:
            # Three times `stall_s`, in one layer.
            looked.set()
        return number

    monkeypatch.setattr(engine, "work_counter", work_counter)
    async with serving(engine, stall_s=0.2) as client:
        running = asyncio.create_task(read(client.call()))
        await gate.reached()
        await asyncio.wait_for(looked.wait(), WAIT_S)
        await client.status(lambda status: status.load.pages_used > 0 and not status.stalled)
        stuck.set()
        await client.status(lambda status: status.stalled)
        gate.open()
        await running


async def test_an_idle_worker_audits_itself_and_ends_for_a_forgotten_owner(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        forgotten = engine.reserve("gone/3", 40)
        await client.done()
        with pytest.raises(EngineError, match="gone/3"):
            await asyncio.wait_for(asyncio.shield(client.app.failed), WAIT_S)
        assert "503 of 512 pages are free, 6 are cached" in caplog.text
        assert (await status_of(client.call()))[0] is grpc.StatusCode.UNAVAILABLE
        engine.free(forgotten)


async def test_the_ledger_lists_a_job_with_its_deadline() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        call = client.call(timeout=50)
        reading = asyncio.create_task(read(call))
        await gate.reached()
        async with AsyncClient(client.app.addresses.control) as admin:
            (entry,) = (await admin.ledger()).entries
        assert (entry.kind, entry.state, entry.pages, entry.bytes) == ("kv", "prefilling", 7, 7 * 16 * 64)
        assert entry.deadline_s is not None
        # gRPC may round a timeout up on the wire, this one to 50.1 s.
        assert 40 < entry.deadline_s < 51
        gate.open()
        await reading
