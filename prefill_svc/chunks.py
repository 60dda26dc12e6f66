"""One engine for all prompts: which job gets it next, and the chunk itself on the engine thread.

A job waits in `acquire_engine`. When the engine is free, the job that the scheduler chooses gets it, until its block
ends. After every layer, and after each part of the prompt's logprobs, a running chunk checks whether its job was
aborted or is late, and tells the export how many tokens are final. Then it lets the chunks of jobs pass that have
preempted it: those that the scheduler chose while it was running.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from baton.engine.contract import ChunkResult, Engine, PromptChunk, compute_chunk
from baton.tasks import wait_to_end
from baton.telemetry import metrics
from baton.worker.progress import Progress
from baton.worker.thread import EngineThread
from prefill_svc.job import PrefillJob
from prefill_svc.scheduler import PrefillScheduler, Prompt


@dataclass(slots=True)
class _Chunk:
    """One call to the engine; `seconds` are its own, without those of the chunks that preempted it."""

    job: PrefillJob
    start: int
    end: int
    preempts: bool
    seconds: float = 0.0


class ChunkRunner:
    """Computes the chunks of one worker's `jobs`; used on the asyncio loop only."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        scheduler: PrefillScheduler,
        progress: Progress,
        jobs: Mapping[Prompt, PrefillJob],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._scheduler = scheduler
        self._progress = progress
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._running: list[PrefillJob] = []
        """The job that was given the free engine, then those that preempt it; they end in any order."""

    @contextlib.asynccontextmanager
    async def acquire_engine(self, job: PrefillJob) -> AsyncIterator[int]:
        """Wait for the engine; yields the end of the chunk that the job must compute now."""
        self._scheduler.make_ready(job.prompt, job.computed)
        job.wakeup = self._loop.create_future()
        self._assign_engine()
        try:
            yield await job.wakeup
        finally:
            if job in self._running:
                self._running.remove(job)
                # Not at once: this job may ask for the engine again, and may have fewer remaining tokens than others.
                self._loop.call_soon(self._assign_engine)

    async def run(self, job: PrefillJob, end: int) -> ChunkResult:
        """Compute the job's next tokens up to `end`; call it while the job has the engine.

        Returns or raises only when the engine no longer uses the job's pages. If the caller is cancelled,
        CancelledError is raised after the chunk, whose tokens count. If the job's `error` is set or its deadline has
        passed, the chunk ends after the current layer with that error.
        """
        job.computing_end = end
        chunk = _Chunk(job, job.computed, end, preempts=job is not self._running[0])
        run = self._thread.run_preempting if chunk.preempts else self._thread.run
        call = run(self._compute, chunk)
        cancelled = False
        try:
            await wait_to_end(call)
        except asyncio.CancelledError:
            cancelled = True
        self._scheduler.charge(job.prompt, chunk.seconds)
        result = call.result()
        self._scheduler.finish_chunk(job.prompt, end, chunk.seconds)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - chunk.start)
        job.computed = end
        job.report(result.prompt_logprobs)
        if cancelled:
            raise asyncio.CancelledError
        return result

    def _assign_engine(self) -> None:
        """Give the engine to the prompt that the scheduler chooses if it is free, and to those that may preempt it."""
        while True:
            choice = self._scheduler.next_chunk(self._running[0].prompt if self._running else None)
            if choice is None:
                break
            prompt, end = choice
            job = self._jobs[prompt]
            if job.wakeup is None or job.wakeup.done():
                # It was cancelled, but its coroutine has not run since.
                self._scheduler.remove(prompt)
                continue
            self._running.append(job)
            self._scheduler.start_chunk(prompt)
            job.wakeup.set_result(end)
        if not self._running:
            self._progress.set_idle()

    def _compute(self, chunk: _Chunk) -> ChunkResult:
        """Compute one chunk; runs on the engine thread."""
        job, began, others_s = chunk.job, time.monotonic(), 0.0

        def on_layer(layer: int) -> None:
            nonlocal others_s
            self._progress.record()
            job.check()
            if job.export is not None:
                job.export.advance(layer, chunk.end)
            if not chunk.preempts:
                paused = time.monotonic()
                self._thread.preemption_point()
                others_s += time.monotonic() - paused

        self._progress.record()
        job.check()
        states = job.task.states() if chunk.end == len(job.ids) else ()
        report = job.task.params.prompt_logprobs
        try:
            return compute_chunk(
                self._engine, PromptChunk(job.pages, job.ids, chunk.start, chunk.end, on_layer, states, report)
            )
        finally:
            chunk.seconds = time.monotonic() - began - others_s
