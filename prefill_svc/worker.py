"""The prefill worker: accepts jobs, prepares them, computes one chunk at a time, and frees what they hold.

    submit ── look-up (task) ── pages, export opened ── cached blocks loaded (task) ── chunk × n ── commit ──
    done
       └───────────────┴──────────────────┴──────────────────────┴──────────────────────┴── abort, deadline,
       fault

`_prepare` runs whenever a job may have become able to take pages; it never waits. `_run` is the loop: woken
by events, it computes the scheduler's choice on the engine thread, one chunk after the other. After every
layer the chunk looks whether its job was aborted or is late, and tells the export what is final. However a
job ends, it ends in `_end`, once. Finished KV belongs to the export's lease and, for a moment, to the
write-back of new blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from baton.engine.contract import ChunkResult, Engine, KvHandle
from baton.errors import BatonError, DeadlineExceeded, EngineError, OutOfPages, Unavailable
from baton.kv.prefix import PrefixCache
from baton.request import TokenInfo
from baton.telemetry import metrics
from baton.transfer.exports import Exports
from baton.worker.progress import Progress
from baton.worker.status import WorkerLoad
from baton.worker.thread import EngineThread
from prefill_svc.config import PrefillConfig
from prefill_svc.job import (
    Job,
    PrefillDone,
    PrefillProgress,
    PrefillTask,
    SharedPages,
    deadline_exceeded,
    finished,
)
from prefill_svc.prefix import PrefixBlocks
from prefill_svc.scheduler import Scheduler, Work

MOST_WRITE_BACKS = 4

_log = logging.getLogger(__name__)


class PrefillWorker:
    """All prompts of one worker; lives on the asyncio loop. `changed` is called when its load is another."""

    def __init__(
        self,
        config: PrefillConfig,
        engine: Engine,
        thread: EngineThread,
        exports: Exports,
        cache: PrefixCache,
        progress: Progress,
        changed: Callable[[], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._exports = exports
        self._cache = cache
        self._blocks = PrefixBlocks(engine, cache)
        self._progress = progress
        self._changed = changed
        self._thread = thread
        self._scheduler = Scheduler(engine.spec, config.chunk_size, config.max_waiting)
        self._jobs: dict[Work, Job] = {}
        self._current: Job | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._write_backs = 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._refusal = ""
        self._closing = False
        self._loop_task = asyncio.create_task(self._run(), name="prefill-loop")
        self._loop_task.add_done_callback(self._loop_ended)

    def submit(self, task: PrefillTask) -> Job:
        """Accept a task; raises InvalidRequest, Overloaded or Unavailable, or what refuses the transfer id."""
        if self._refusal:
            raise Unavailable(self._refusal)
        now, ids = time.monotonic(), [*task.prompt_ids, *task.output_ids]
        stats = self._engine.stats()
        work = self._scheduler.admit(len(ids), stats.free + stats.cached, now)
        job = self._jobs[work] = Job(task, work, ids, now)
        try:
            if task.transfer_id:
                self._exports.announce(task.transfer_id)
        except BatonError:
            self._forget(job)
            raise
        self._idle.clear()
        if task.deadline is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(max(0.0, task.deadline - now), lambda: self.abort(job, deadline_exceeded(job)))
        if self._blocks.stores and task.params.prompt_logprobs is None:
            self._spawn(job, self._look_up(job))
        else:
            self._scheduler.looked_up(work, 0)
            self._prepare()
        self._changed()
        return job

    def abort(self, job: Job, error: BatonError) -> None:
        """End a job early; one in the middle of a chunk stops after the layer. Does nothing to one that is over."""
        if job.over:
            return
        job.error = job.error or error
        if job is not self._current:
            self._end(job, job.error)

    def load(self) -> WorkerLoad:
        """How the worker fares."""
        stats, scheduler = self._engine.stats(), self._scheduler
        for state, pages in (("used", stats.used), ("free", stats.free), ("cached", stats.cached)):
            metrics.PAGES.labels("prefill", state).set(pages)
        return WorkerLoad(
            waiting=scheduler.waiting,
            running=scheduler.running,
            pending_tokens=scheduler.pending_tokens,
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=self._engine.spec.page_size,
            tokens_per_second=scheduler.rate.value,
        )

    def refuse(self) -> None:
        """Take no new work."""
        self._refusal = self._refusal or "the worker is draining"

    async def finished(self) -> None:
        """Return once no job, no export and no write-back is left; at a drain, after `refuse`."""
        await self._idle.wait()
        await self._exports.drained()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._cache.flush()

    async def close(self) -> None:
        """End all jobs and exports, wait for every thread and task, and leave no page behind."""
        self._closing = True
        self.refuse()
        self._blocks.stop()
        for job in list(self._jobs.values()):
            self.abort(job, Unavailable("the worker stops"))
        self._wake.set()
        await asyncio.gather(self._loop_task, *self._tasks, return_exceptions=True)
        self._exports.close()
        await self._exports.drained()
        if not self.failed.cancel():
            self.failed.exception()

    # Preparing.

    def _spawn(self, job: Job, steps: Coroutine[Any, Any, None]) -> None:
        """Run `steps` for a job; a fault in them ends the job."""
        task = asyncio.create_task(self._guard(job, steps), name=f"prefix of {job.task.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, job: Job, steps: Awaitable[None]) -> None:
        try:
            await steps
        except Exception as error:
            _log.exception("%s: work beside the engine failed", job.task.name)
            self.abort(job, EngineError(f"{type(error).__name__}: {error}"))

    async def _look_up(self, job: Job) -> None:
        job.hits = await self._blocks.look_up(job)
        if not job.over:
            self._scheduler.looked_up(job.work, self._tokens_of(job.hits, job))
            self._prepare()

    def _prepare(self) -> None:
        """Give pages to the jobs whose turn it is, and load or ready them."""
        if self._closing:
            return
        for work in self._scheduler.grant(time.monotonic(), self._take_pages):
            job = self._jobs[work]
            if job.error is not None:
                self._end(job, job.error)
            elif job.hits and job.pages is not None:
                job.pages.share()
                self._spawn(job, self._load(job, job.pages))
            else:
                self._ready(job)

    def _take_pages(self, work: Work) -> bool:
        """Reserve all pages of a job and open its export; what refuses the export is left in `job.error`."""
        job = self._jobs[work]
        try:
            handle = self._engine.reserve(job.task.name, len(job.ids))
        except OutOfPages:
            return False
        job.pages = SharedPages(handle, self._free)
        if job.task.transfer_id:
            try:
                job.export = self._exports.open(job.task.transfer_id, handle, len(job.ids), on_closed=job.pages.release)
                job.pages.share()
            except BatonError as error:
                job.error = error
        return True

    async def _load(self, job: Job, pages: SharedPages) -> None:
        try:
            await self._blocks.load(job, pages.handle)
        finally:
            pages.release()
        if not job.over:
            self._ready(job)

    def _ready(self, job: Job) -> None:
        """The job's cached blocks are in its pages; it may be computed."""
        done = self._tokens_of(job.loaded_blocks, job)
        self._scheduler.ready(job.work, done)
        job.computed, job.cached = done, min(done, len(job.task.prompt_ids))
        if done:
            metrics.PREFILL_TOKENS.labels("cache").inc(done)
            for layer in range(self._engine.spec.kv_format.layers):
                if job.export is not None:
                    job.export.advance(layer, done)
        job.tell(PrefillProgress(done, len(job.ids), job.cached))
        self._wake.set()

    def _tokens_of(self, blocks: int, job: Job) -> int:
        """Tokens that cached blocks spare; the last token is always computed, to sample from."""
        return min(blocks * self._engine.spec.kv_format.block_size, len(job.ids) - 1)

    # Computing.

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            choice = self._scheduler.next_chunk(time.monotonic())
            if choice is None:
                self._progress.idle()
                await self._wake.wait()
                continue
            await self._compute(self._jobs[choice[0]], choice[1])
        self._progress.idle()

    async def _compute(self, job: Job, end: int) -> None:
        began = time.monotonic()
        start, job.started_at = job.computed, job.started_at or began
        self._current = job
        try:
            result = await self._thread.run(self._chunk, job, start, end)
        except Exception as error:
            self._current = None
            await self._chunk_failed(job, error)
            return
        self._current = None
        self._scheduler.computed(job.work, end, time.monotonic() - began)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - start)
        job.computed = end
        job.prompt_tokens += result.prompt_logprobs
        if job.error is not None:
            self._end(job, job.error)
        elif end == len(job.ids):
            self._finish(job, result.tokens)
        else:
            job.tell(PrefillProgress(end, len(job.ids), job.cached))
            self._prepare()
            self._changed()

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

    async def _chunk_failed(self, job: Job, error: Exception) -> None:
        """End a job whose chunk raised: because it was to stop, or because the engine failed."""
        if error is job.error or isinstance(error, DeadlineExceeded):
            self._end(job, error)
            return
        _log.error("%s: a chunk failed", job.task.name, exc_info=error)
        self._end(job, EngineError(f"{type(error).__name__}: {error}"))
        try:
            await self._thread.run(self._engine.audit)
        except Exception as broken:
            self._break(broken)

    def _break(self, error: BaseException) -> None:
        """The engine can't be trusted any more: end all jobs, and tell whoever runs this worker."""
        self._refusal, self._current = f"the engine failed: {error}", None
        for job in list(self._jobs.values()):
            self.abort(job, Unavailable(self._refusal))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    # Ending.

    def _finish(self, job: Job, tokens: Sequence[TokenInfo]) -> None:
        """Commit the KV with the first token of each choice, and end the job."""
        handoff, done = finished(job, tokens, self._engine.spec.eos_token_ids, time.monotonic())
        if job.export is not None:
            job.export.commit(handoff)
        self._write_back(job)
        self._end(job, done)

    def _write_back(self, job: Job) -> None:
        """Put the job's new blocks into the cache in the background, if there is room for one more doing so."""
        blocks = len(job.ids) // self._engine.spec.kv_format.block_size
        if job.pages is None or not self._blocks.stores or blocks <= job.loaded_blocks:
            return
        if self._write_backs >= MOST_WRITE_BACKS:
            metrics.PREFIX_BLOCKS.labels("dropped").inc(blocks - job.loaded_blocks)
            return
        self._write_backs += 1
        job.pages.share()
        self._spawn(job, self._write_blocks(job, job.pages))

    async def _write_blocks(self, job: Job, pages: SharedPages) -> None:
        try:
            await self._blocks.write_back(job, pages.handle)
        finally:
            self._write_backs -= 1
            pages.release()

    def _end(self, job: Job, outcome: PrefillDone | BatonError) -> None:
        """The one way out for every job."""
        if job.over:
            return
        job.over = True
        if isinstance(outcome, BatonError):
            metrics.WASTED_PREFILL_TOKENS.inc(max(0, job.computed - self._tokens_of(job.loaded_blocks, job)))
            if job.export is not None:
                job.export.fail(outcome)
            elif job.task.transfer_id:
                self._exports.withdraw(job.task.transfer_id, f"was given up: {outcome}")
        if job.timer is not None:
            job.timer.cancel()
        job.tell(outcome)
        self._forget(job)
        if job.pages is not None:
            job.pages.release()
        self._changed()
        self._prepare()

    def _forget(self, job: Job) -> None:
        self._scheduler.remove(job.work)
        del self._jobs[job.work]
        if not self._jobs:
            self._idle.set()

    def _free(self, handle: KvHandle) -> None:
        """All owners are gone; what waits for pages may get them now."""
        self._engine.free(handle)
        self._prepare()
        self._changed()
