"""One engine for all prompts: whose chunk is next, and the chunk itself on the engine thread.

A job asks for a `turn`; when the engine is free it goes to the job that the scheduler chooses, until the turn's block
ends. After every layer, and after each part of a prompt's scores, a running chunk looks whether its job was aborted or
is late, and tells the export what is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from baton.engine.contract import ChunkResult, Engine
from baton.telemetry import metrics
from baton.worker.progress import Progress
from baton.worker.thread import EngineThread
from prefill_svc.job import Job
from prefill_svc.scheduler import Prompt, Scheduler


class Chunks:
    """The chunks of one worker's `jobs`; lives on the asyncio loop."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        scheduler: Scheduler,
        progress: Progress,
        jobs: Mapping[Prompt, Job],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._scheduler = scheduler
        self._progress = progress
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._computing: Job | None = None

    @contextlib.asynccontextmanager
    async def turn(self, job: Job) -> AsyncIterator[int]:
        """Wait for the engine; yields the end of the chunk that the job is to compute now."""
        self._scheduler.make_ready(job.entry, job.computed)
        job.turn = self._loop.create_future()
        self._give_engine()
        try:
            yield await job.turn
        finally:
            if self._computing is job:
                self._computing = None
                # Not at once: the job itself may ask for its next turn, and have fewer tokens left than others.
                self._loop.call_soon(self._give_engine)

    async def run(self, job: Job, end: int) -> ChunkResult:
        """Compute the job's next tokens up to `end`; within a turn.

        Returns or raises only once the engine has let go of the job's pages. A cancel is raised after the chunk, whose
        tokens count; a job whose `error` is set, or whose deadline has passed, ends after the layer with that error.
        """
        began, start = time.monotonic(), job.computed
        job.computing = end
        call = self._thread.run(self._compute, job, start, end)
        cancelled = False
        while not call.done():
            # A job may be cancelled more than once, by its caller and by its deadline.
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError:
                cancelled = True
        seconds = time.monotonic() - began
        self._scheduler.charge(job.entry, seconds)
        result = call.result()
        self._scheduler.finish_chunk(job.entry, end, seconds)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - start)
        job.computed = end
        job.prompt_tokens += result.prompt_logprobs
        if cancelled:
            raise asyncio.CancelledError
        return result

    def _give_engine(self) -> None:
        """Give the engine, if it is free, to the prompt that the scheduler chooses."""
        while self._computing is None and (choice := self._scheduler.next_chunk()) is not None:
            entry, end = choice
            job = self._jobs[entry]
            if job.turn is None or job.turn.done():
                # It was cancelled, and has yet to wake up.
                self._scheduler.remove(entry)
                continue
            self._computing = job
            self._scheduler.start_chunk(entry)
            job.turn.set_result(end)
        if self._computing is None:
            self._progress.idle()

    def _compute(self, job: Job, start: int, end: int) -> ChunkResult:
        """One chunk, on the engine thread."""

        def on_layer(layer: int) -> None:
            self._progress.moved()
            job.check()
            if job.export is not None:
                job.export.advance(layer, end)

        self._progress.moved()
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
