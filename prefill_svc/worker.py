"""The prefill worker: accepts jobs, has them prepared and computed, and frees what they hold.

    submit ── look-up (task) ── pages, export opened ── cached blocks loaded (task) ── chunk × n ── commit ── HELD
       └───────────────┴──────────────────┴──────────────────────┴──────────────────────┴── abort, deadline, fault

`prefill_svc.preparing` prepares, `prefill_svc.chunks` computes. Full blocks are published after each chunk, so what
an aborted job has computed is not lost; after a fault of the engine nothing that was cached is trusted any more.
However a job ends, it ends in `_end`, once. Finished KV belongs to the export's lease (job HELD) and, for a moment,
to the write-back of new blocks. Whenever nothing is left, the worker audits itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from baton.engine.contract import ChunkResult, Engine
from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineError, Overloaded, Unavailable
from baton.ledger import Ledger
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.transfer.exports import Exports
from baton.worker.audit import IdleAudit, take_ledger
from baton.worker.progress import Progress
from baton.worker.status import WorkerIdentity, WorkerLoad
from baton.worker.thread import EngineThread
from prefill_svc.beside import Beside
from prefill_svc.chunks import Chunks
from prefill_svc.config import PrefillConfig
from prefill_svc.job import Job, PrefillDone, PrefillTask, SharedPages, finished, overdue
from prefill_svc.ledger import entries
from prefill_svc.preparing import Outcomes, Preparing, Tiers
from prefill_svc.scheduler import Scheduler, Work

_log = logging.getLogger(__name__)


class PrefillWorker:
    """All prompts of one worker; lives on the asyncio loop. `changed` is called when its load is another."""

    def __init__(
        self,
        config: PrefillConfig,
        engine: Engine,
        thread: EngineThread,
        identity: WorkerIdentity,
        exports: Exports,
        tiers: Tiers,
        progress: Progress,
        changed: Callable[[], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._thread = thread
        self._identity = identity
        self._exports = exports
        self._tiers = tiers
        self._changed = changed
        self._scheduler = Scheduler(engine.spec, config.chunk_size, config.max_waiting)
        self._jobs: dict[Work, Job] = {}
        self._beside = Beside(self.abort)
        outcomes = Outcomes(self._ready, self._end, self._freed, self._export_closed)
        self._preparing = Preparing(engine, tiers, exports, self._scheduler, self._beside, self._jobs, outcomes)
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal = ""
        self._chunks = Chunks(
            engine,
            thread,
            self._scheduler,
            progress,
            self._jobs,
            begins=self._begins,
            computed=self._chunk_computed,
            failed=self._chunk_failed,
        )
        self._loop_task = asyncio.create_task(self._chunks.run(), name="prefill-loop")
        self._loop_task.add_done_callback(self._loop_ended)
        self._audit = IdleAudit(self.ledger, lambda: not (self._jobs or self._preparing.holders), self._break)
        self._audit_task = asyncio.create_task(self._audit.run(), name="idle-audit")
        self._audit_task.add_done_callback(self._loop_ended)

    def submit(self, task: PrefillTask) -> Job:
        """Accept a task; raises InvalidRequest, Overloaded or Unavailable, or what refuses the transfer id."""
        if self._refusal:
            raise Unavailable(self._refusal)
        now, stats = time.monotonic(), self._engine.stats()
        work = self._scheduler.admit(len(task.prompt_ids) + len(task.output_ids), stats.free + stats.cached, now)
        job = self._jobs[work] = Job.of(task, work, now)
        try:
            if task.transfer_id:
                self._exports.announce(task.transfer_id)
        except BatonError:
            self._forget(job)
            raise
        self._idle.clear()
        self._watch(job)
        self._preparing.begin(job)
        self._changed()
        return job

    def abort(self, job: Job, error: BatonError) -> None:
        """End a job early; one in the middle of a chunk stops after the layer. Does nothing to one that is over."""
        if job.over:
            return
        job.error = job.error or error
        if job is not self._chunks.current:
            self._end(job, job.error)

    def abandon(self, transfer_id: str, incarnation: str) -> None:
        """End the export that nobody will fetch, and a job that still computes for it; idempotent."""
        if incarnation != self._identity.incarnation:
            return
        for job in [job for job in self._jobs.values() if job.task.transfer_id == transfer_id]:
            self.abort(job, Cancelled("the attempt was abandoned"))
        self._exports.release(transfer_id, incarnation, "was abandoned")

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
            pages_cached=stats.cached,
        )

    async def ledger(self) -> Ledger:
        """Who holds what, and whether the sums are right."""
        spec = self._engine.spec
        return await take_ledger(
            self._identity,
            self._engine,
            lambda: entries([*self._jobs.values(), *self._preparing.holders], spec, time.monotonic()),
        )

    def refuse(self) -> None:
        """Take no new work."""
        self._refusal = self._refusal or "the worker is draining"

    async def finished(self) -> None:
        """Return once no job, no export and no write-back is left; at a drain, after `refuse`."""
        await self._idle.wait()
        await self._exports.drained()
        await self._beside.finished()
        await self._tiers.cache.flush()

    async def close(self) -> None:
        """End all jobs and exports, wait for every thread and task, and leave no page behind."""
        self.refuse()
        self._preparing.close()
        self._audit_task.cancel()
        for job in list(self._jobs.values()):
            self.abort(job, Unavailable("the worker stops"))
        self._chunks.stop()
        await asyncio.gather(self._loop_task, self._audit_task, self._beside.finished(), return_exceptions=True)
        self._exports.close()
        await self._exports.drained()
        await self._tiers.peers.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _watch(self, job: Job) -> None:
        """End the job when the deadline of its state passes, instead of the one before."""
        if job.timer is not None:
            job.timer.cancel()
        if job.over or math.isinf(job.life.deadline):
            return
        left = max(0.0, job.life.deadline - time.monotonic())
        job.timer = asyncio.get_running_loop().call_later(left, self._deadline, job)

    def _deadline(self, job: Job) -> None:
        if job.life.overdue(time.monotonic()):
            self.abort(job, overdue(job))
        else:
            self._watch(job)

    # What becomes of chunks.

    def _ready(self, job: Job) -> None:
        self._chunks.wake()

    def _begins(self, job: Job) -> None:
        job.start(time.monotonic())
        self._watch(job)

    def _chunk_computed(self, job: Job, result: ChunkResult) -> None:
        if job.error is None and job.computed == len(job.ids):
            self._finish(job, result)
            return
        self._preparing.publish(job)
        if job.error is not None:
            self._end(job, job.error)
            return
        job.tell(job.progress())
        self._preparing.grant()
        self._changed()

    async def _chunk_failed(self, job: Job, error: Exception) -> None:
        """End a job whose chunk raised: because it was to stop, or because the engine failed."""
        if error is job.error or isinstance(error, DeadlineExceeded | Overloaded | Unavailable):
            self._end(job, error)
            return
        _log.error("%s: a chunk failed", job.task.name, exc_info=error)
        # Whatever spoiled the chunk may have spoiled what was cached, too. The job's end gives its pages to others, who
        # must not find anything of that.
        self._engine.drop_cached()
        self._end(job, EngineError(f"{type(error).__name__}: {error}"))
        try:
            await self._thread.run(self._engine.audit)
        except Exception as broken:
            self._break(broken)

    def _break(self, error: BaseException) -> None:
        """The engine can't be trusted any more: end all jobs, and tell whoever runs this worker."""
        self._refusal, self._chunks.current = f"the engine failed: {error}", None
        for job in list(self._jobs.values()):
            self.abort(job, Unavailable(self._refusal))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    # Ending.

    def _finish(self, job: Job, result: ChunkResult) -> None:
        """Commit the KV with the first token of each choice, and end the job."""
        now = time.monotonic()
        handoff, done = finished(job, result.tokens, self._engine.spec.eos_token_ids, now)
        if job.export is not None:
            job.export.commit(handoff)
            if not job.export.ended:
                job.life.enter(State.HELD, now)
        self._preparing.publish(job)
        pages = job.pages
        if pages is None or not self._tiers.cache.stores or not job.task.cache.writes:
            self._end(job, done)
            return
        # The caller is told first, and nobody gets the pages in between.
        pages.share()
        self._end(job, done)
        self._write_back(job, pages)
        pages.release()

    def _write_back(self, job: Job, pages: SharedPages) -> None:
        """Put the job's new blocks into the cache in the background."""
        found = job.found // self._engine.spec.kv_format.block_size

        async def steps(job: Job) -> None:
            await self._preparing.blocks.write_back(pages.handle, job.digests, found, lambda: True)

        self._beside.spawn(job, steps, pages)

    def _end(self, job: Job, outcome: PrefillDone | BatonError) -> None:
        """The one way out for every job."""
        if job.over:
            return
        job.over = True
        if isinstance(outcome, BatonError):
            metrics.WASTED_PREFILL_TOKENS.inc(max(0, job.computed - job.found))
            if job.export is not None:
                job.export.fail(outcome)
            elif job.task.transfer_id:
                self._exports.withdraw(job.task.transfer_id, f"was given up: {outcome}")
        if job.life.state is not State.HELD:
            job.life.end(time.monotonic())
        if job.timer is not None:
            job.timer.cancel()
        if job.preparing is not None:
            job.preparing.cancel()
        job.tell(outcome)
        self._forget(job)
        if job.pages is not None:
            job.pages.release()
        self._changed()
        self._preparing.grant()

    def _forget(self, job: Job) -> None:
        self._scheduler.remove(job.work)
        del self._jobs[job.work]
        if not self._jobs:
            self._idle.set()
        self._audit.changed()

    def _export_closed(self, job: Job) -> None:
        """The export has ended, and nobody reads from it any more."""
        if job.over:
            job.life.end(time.monotonic())
        if job.pages is not None:
            job.pages.release()

    def _freed(self, job: Job) -> None:
        """The job's pages are back."""
        self._changed()
        self._audit.changed()
