"""One engine for all prompts: which job gets it next, and the chunk itself on the engine thread.

A job waits in `acquire_engine`. When the engine is free, the job that the scheduler chooses gets it, until its block
ends. After every layer, and after each part of the prompt's logprobs, a running chunk checks whether its job was
aborted or is late, and tells the export how many tokens are final.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from baton.engine.contract import ChunkResult, Engine
from baton.tasks import wait_to_end
from baton.telemetry import metrics
from baton.worker.progress import Progress
from baton.worker.thread import EngineThread
from prefill_svc.job import PrefillJob
from prefill_svc.scheduler import PrefillScheduler, Prompt


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
        self._current: PrefillJob | None = None

    @contextlib.asynccontextmanager
    async def acquire_engine(self, job: PrefillJob) -> AsyncIterator[int]:
        """Wait for the engine; yields the end of the chunk that the job must compute now."""
        self._scheduler.make_ready(job.prompt, job.computed)
        job.wakeup = self._loop.create_future()
        self._assign_engine()
        try:
            yield await job.wakeup
        finally:
            if self._current is job:
                self._current = None
                # Not at once: this job may ask for the engine again, and may have fewer remaining tokens than others.
                self._loop.call_soon(self._assign_engine)

    async def run(self, job: PrefillJob, end: int) -> ChunkResult:
        """Compute the job's next tokens up to `end`; call it while the job has the engine.

        Returns or raises only when the engine no longer uses the job's pages. If the caller is cancelled,
        CancelledError is raised after the chunk, whose tokens count. If the job's `error` is set or its deadline has
        passed, the chunk ends after the current layer with that error.
        """
        began, start = time.monotonic(), job.computed
        job.computing_end = end
        call = self._thread.run(self._compute, job, start, end)
        cancelled = False
        try:
            await wait_to_end(call)
        except asyncio.CancelledError:
            cancelled = True
        seconds = time.monotonic() - began
        self._scheduler.charge(job.prompt, seconds)
        result = call.result()
        self._scheduler.finish_chunk(job.prompt, end, seconds)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - start)
        job.computed = end
        job.prompt_tokens += result.prompt_logprobs
        if cancelled:
            raise asyncio.CancelledError
        return result

    def _assign_engine(self) -> None:
        """Give the engine, if it is free, to the prompt that the scheduler chooses."""
        while self._current is None and (choice := self._scheduler.next_chunk()) is not None:
            prompt, end = choice
            job = self._jobs[prompt]
            if job.wakeup is None or job.wakeup.done():
                # It was cancelled, but its coroutine has not run since.
                self._scheduler.remove(prompt)
                continue
            self._current = job
            self._scheduler.start_chunk(prompt)
            job.wakeup.set_result(end)
        if self._current is None:
            self._progress.set_idle()

    def _compute(self, job: PrefillJob, start: int, end: int) -> ChunkResult:
        """Compute one chunk; runs on the engine thread."""

        def on_layer(layer: int) -> None:
            self._progress.record()
            job.check()
            if job.export is not None:
                job.export.advance(layer, end)

        self._progress.record()
        job.check()
        return self._engine.prefill_chunk(
            job.pages,
            job.ids,
            start,
            end,
            on_layer=on_layer,
            sample=job.task.states() if end == len(job.ids) else (),
            prompt_logprobs=job.task.params.prompt_logprobs,
        )
