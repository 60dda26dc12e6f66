"""Choice of the job whose chunk the engine computes next, and chunks of cancelled jobs."""

import asyncio
import threading
import time
from typing import Any

import pytest

from baton.engine.contract import ChunkResult
from baton.engine.fake import FakeEngine
from baton.process.executors import EngineThread
from baton.request import SamplingParams
from baton.worker.health import Watchdog
from prefill_svc import worker as worker_module
from prefill_svc.job import PrefillJob, PrefillRequest
from prefill_svc.scheduler import PrefillScheduler, ScheduledJob
from prefill_svc.worker import ChunkRunner


class Thread:
    """An engine thread whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.Future[ChunkResult]] = asyncio.Queue()

    def run(self, *_: Any) -> asyncio.Future[ChunkResult]:
        call = asyncio.get_running_loop().create_future()
        self.calls.put_nowait(call)
        return call


class Worker:
    """Jobs that compute all their chunks, one after the other, on an engine that the test drives."""

    def __init__(self, chunk_size: int, engine: FakeEngine | None = None, thread: EngineThread | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.thread, self.watchdog = Thread(), Watchdog()
        self._scheduler = PrefillScheduler(self.engine.spec, chunk_size, 8)
        self._jobs: dict[ScheduledJob, PrefillJob] = {}
        self._chunks = ChunkRunner(
            self.engine,
            thread or self.thread,  # type: ignore[arg-type]
            self.watchdog,
            self._scheduler,
            self._jobs,
        )
        self.order: list[str] = []
        self.rates: list[tuple[str, float]] = []

    def start(self, name: str, tokens: int) -> asyncio.Task[None]:
        request = PrefillRequest(name, 0, "", range(tokens), (), (0,), SamplingParams(max_tokens=1, temperature=0.0))
        entry = self._scheduler.admit(tokens)
        job = self._jobs[entry] = PrefillJob.create(request, entry, time.monotonic())
        job.handle = self.engine.reserve(name, tokens)
        return asyncio.create_task(self._compute(job))

    async def _compute(self, job: PrefillJob) -> None:
        def begin() -> None:
            self.order.append(job.request.request_id)
            self.watchdog.record()

        while job.computed_tokens < len(job.token_ids):
            await self._chunks.compute(job, begin)
            self.rates.append((job.request.request_id, job.scheduled.rate))
        self._scheduler.remove(job.scheduled)


async def test_the_shortest_prompt_keeps_the_engine_from_chunk_to_chunk() -> None:
    worker = Worker(chunk_size=10)
    long = worker.start("long", 100)
    call = await worker.thread.calls.get()
    short = worker.start("short", 50)
    while not short.done():
        call.set_result(ChunkResult())
        call = await worker.thread.calls.get()
        await asyncio.sleep(0)
    assert worker.order == ["long", *["short"] * 5, "long"]
    long.cancel()
    call.set_result(ChunkResult())
    await asyncio.wait({long})


class Clock:
    """The time that chunks take: `delay` passes it, and at calls that the test names waits for a go-ahead."""

    def __init__(self, *held: int) -> None:
        self.now, self.calls = 0.0, 0
        self.held = {call: threading.Event() for call in held}
        self.reached = {call: asyncio.Event() for call in held}
        self._loop = asyncio.get_running_loop()

    def monotonic(self) -> float:
        return self.now

    def delay(self, seconds: float) -> None:
        self.calls += 1
        if self.calls in self.held:
            self._loop.call_soon_threadsafe(self.reached[self.calls].set)
            assert self.held[self.calls].wait(60)
        self.now += seconds


async def test_a_short_prompt_goes_between_two_layers_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, thread = Clock(1, 6), EngineThread()
    monkeypatch.setattr(worker_module, "time", clock)
    engine = FakeEngine(layers=2, chunk_time=2.0, delay=clock.delay)
    worker = Worker(100, engine, thread)
    long = worker.start("long", 400)
    await asyncio.wait_for(clock.reached[1].wait(), 60)
    first, second = worker.start("short", 90), worker.start("shorter", 80)
    not_in_one_chunk = worker.start("later", 101)
    for _ in range(10):
        await asyncio.sleep(0)
    clock.held[1].set()
    # The first layer of the long one, then both layers of two short ones.
    await asyncio.wait_for(clock.reached[6].wait(), 60)
    await asyncio.wait_for(asyncio.gather(first, second), 60)
    assert worker.order == ["long", "short", "shorter"]
    clock.held[6].set()
    await asyncio.wait_for(asyncio.gather(long, not_in_one_chunk), 60)
    assert worker.order[3:] == ["later", "later", "long", "long", "long"]
    assert worker.rates[:3] == [("short", 45), ("shorter", 40), ("long", 50)], "a chunk takes 2 s without others"
    await thread.close()


async def test_a_chunk_keeps_the_engine_until_it_has_ended_however_often_its_job_is_cancelled() -> None:
    """A hung engine must not look idle, and no other job may be sent to it."""
    worker = Worker(chunk_size=40)
    thread, watchdog = worker.thread, worker.watchdog
    first, second = worker.start("first", 40), worker.start("second", 40)
    call = await thread.calls.get()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not first.done()
    assert thread.calls.empty()
    assert watchdog.stalled_s() > 0
    call.set_result(ChunkResult())
    await asyncio.wait({first})
    assert first.cancelled()
    (await thread.calls.get()).set_result(ChunkResult())
    await second
