"""Whose chunk the engine computes, and what becomes of one whose job is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.engine.contract import ChunkResult
from baton.engine.fake import FakeEngine
from baton.request import SamplingParams
from baton.worker.progress import Progress
from prefill_svc.chunks import ChunkRunner
from prefill_svc.job import PrefillJob, PrefillTask
from prefill_svc.scheduler import PrefillScheduler, Prompt


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

    def __init__(self, chunk_size: int) -> None:
        engine = FakeEngine()
        self.thread, self.progress = Thread(), Progress()
        self._scheduler = PrefillScheduler(engine.spec, chunk_size, 8)
        self._jobs: dict[Prompt, PrefillJob] = {}
        self._chunks = ChunkRunner(engine, self.thread, self._scheduler, self.progress, self._jobs)  # type: ignore[arg-type]
        self.order: list[str] = []

    def start(self, name: str, tokens: int) -> asyncio.Task[None]:
        task = PrefillTask(name, 0, "", range(tokens), (), (0,), SamplingParams(max_tokens=1, temperature=0.0))
        entry = self._scheduler.admit(tokens)
        job = self._jobs[entry] = PrefillJob.create(task, entry, 0.0)
        return asyncio.create_task(self._compute(job))

    async def _compute(self, job: PrefillJob) -> None:
        while job.computed < len(job.ids):
            async with self._chunks.acquire_engine(job) as end:
                self.order.append(job.task.request_id)
                self.progress.record()
                await self._chunks.run(job, end)
        self._scheduler.remove(job.prompt)


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


async def test_a_chunk_keeps_the_engine_until_it_has_ended_however_often_its_job_is_cancelled() -> None:
    """A hung engine must not look idle, and no other job may be sent to it."""
    worker = Worker(chunk_size=40)
    thread, progress = worker.thread, worker.progress
    first, second = worker.start("first", 40), worker.start("second", 40)
    call = await thread.calls.get()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not first.done()
    assert thread.calls.empty()
    assert progress.stalled_s() > 0
    call.set_result(ChunkResult())
    await asyncio.wait({first})
    assert first.cancelled()
    (await thread.calls.get()).set_result(ChunkResult())
    await second
