"""Whose chunk the engine computes, and what becomes of one whose job is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.engine.contract import ChunkResult
from baton.engine.fake import FakeEngine
from baton.request import SamplingParams
from baton.worker.progress import Progress
from prefill_svc.chunks import Chunks
from prefill_svc.job import Job, PrefillTask
from prefill_svc.scheduler import Prompt, Scheduler

PROMPT = list(range(40))


class Thread:
    """An engine thread whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.Future[ChunkResult]] = asyncio.Queue()

    def run(self, *_: Any) -> asyncio.Future[ChunkResult]:
        call = asyncio.get_running_loop().create_future()
        self.calls.put_nowait(call)
        return call


async def test_a_chunk_keeps_the_engine_until_it_has_ended_however_often_its_job_is_cancelled() -> None:
    """A hung engine must not look idle, and no other job may be sent to it."""
    engine, thread, progress = FakeEngine(), Thread(), Progress()
    scheduler = Scheduler(engine.spec, 20, 8)
    jobs: dict[Prompt, Job] = {}
    chunks = Chunks(engine, thread, scheduler, progress, jobs)  # type: ignore[arg-type]

    def job() -> Job:
        task = PrefillTask("r", 0, "", PROMPT, (), (0,), SamplingParams(max_tokens=1, temperature=0.0))
        entry = scheduler.admit(len(PROMPT), 100, 0.0)
        jobs[entry] = Job.of(task, entry, 0.0)
        return jobs[entry]

    async def compute(of: Job) -> None:
        async with chunks.turn(of) as end:
            progress.moved()
            await chunks.run(of, end)

    first = asyncio.create_task(compute(job()))
    second = asyncio.create_task(compute(job()))
    call = await thread.calls.get()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not first.done()
    assert thread.calls.empty()
    assert progress.stalled() > 0
    call.set_result(ChunkResult())
    await asyncio.wait({first})
    assert first.cancelled()
    (await thread.calls.get()).set_result(ChunkResult())
    await second
