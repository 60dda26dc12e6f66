"""The loop that computes: the scheduler's choice on the engine thread, one chunk after the other.

It is woken by events. After every layer, and after each part of a prompt's scores, the chunk looks whether its job
was aborted or is late, and tells the export what is final. What a chunk yields or raises goes to the worker, which
ends jobs; a job whose chunk runs is `current`, and nobody ends it meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from baton.engine.contract import ChunkResult, Engine
from baton.errors import EngineError
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.worker.progress import Progress
from baton.worker.thread import EngineThread
from prefill_svc.job import Job
from prefill_svc.scheduler import Scheduler, Work


class Chunks:
    """One worker's chunks; lives on the asyncio loop.

    `begins` is called before a job's first chunk; `computed` gets the job and its chunk's result, `failed` the job
    and what its chunk raised.
    """

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        scheduler: Scheduler,
        progress: Progress,
        jobs: Mapping[Work, Job],
        *,
        begins: Callable[[Job], object],
        computed: Callable[[Job, ChunkResult], object],
        failed: Callable[[Job, Exception], Awaitable[object]],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._scheduler = scheduler
        self._progress = progress
        self._jobs = jobs
        self._begins = begins
        self._computed = computed
        self._failed = failed
        self._wake = asyncio.Event()
        self._stopping = False
        self.current: Job | None = None
        """The job that is on the engine thread."""

    def wake(self) -> None:
        """A job may have become ready."""
        self._wake.set()

    def stop(self) -> None:
        """Make `run` return after the chunk in progress."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Compute what is ready until told to stop."""
        while not self._stopping:
            self._wake.clear()
            choice = self._scheduler.next_chunk(time.monotonic())
            if choice is None:
                self._progress.idle()
                await self._wake.wait()
                continue
            await self._compute(self._jobs[choice[0]], choice[1])
        self._progress.idle()

    async def _compute(self, job: Job, end: int) -> None:
        began, start = time.monotonic(), job.computed
        if job.life.state is State.QUEUED:
            self._begins(job)
        self.current, job.computing = job, end
        try:
            result = await self._thread.run(self._chunk, job, start, end)
        except Exception as error:
            self.current = None
            await self._failed(job, error)
            return
        self.current = None
        self._scheduler.computed(job.work, end, time.monotonic() - began)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - start)
        job.computed = end
        job.prompt_tokens += result.prompt_logprobs
        self._computed(job, result)

    def _chunk(self, job: Job, start: int, end: int) -> ChunkResult:
        """One chunk, on the engine thread."""
        if job.pages is None:
            raise EngineError(f"{job.task.name} has no pages")

        def on_layer(layer: int) -> None:
            self._progress.moved()
            job.check()
            if job.export is not None:
                job.export.advance(layer, end)

        self._progress.moved()
        job.check()
        return self._engine.prefill_chunk(
            job.pages.handle,
            job.ids,
            start,
            end,
            on_layer=on_layer,
            sample=job.task.states() if end == len(job.ids) else (),
            prompt_logprobs=job.task.params.prompt_logprobs,
        )
