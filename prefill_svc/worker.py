"""The prefill worker: each prompt's life in one coroutine, one engine for all of them.

    submit ── look up ── allocate ── load ── compute, chunk by chunk ── commit ── write back ── hold ── free
       └──────────┴──────────┴─────────┴──────────────┴── abort, deadline, fault ───────────────────────▲

`_live` is that life, top to bottom. Twice it waits for its turn, which the scheduler decides: for all of its pages at
once (`_give_pages`), and for the engine at each chunk (`prefill_svc.chunks`). Full blocks are published after each
chunk, so what an aborted job has computed is not lost; after a fault of the engine nothing that was cached is trusted
any more. Finished KV is held for as long as its export lives. Whenever nothing is left, the worker audits itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from baton.config.prefill import PrefillConfig
from baton.engine.contract import ChunkResult, Engine
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    NoToken,
    OutOfPages,
    Overloaded,
    Unavailable,
)
from baton.ledger import Ledger
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.transfer.exports import Exports
from baton.worker.audit import IdleAudit, take_ledger
from baton.worker.faults import Faults
from baton.worker.progress import Progress
from baton.worker.status import WorkerIdentity, WorkerLoad
from baton.worker.thread import EngineThread
from prefill_svc.chunks import Chunks
from prefill_svc.job import Job, PrefillDone, PrefillTask, by_tier, finished, overdue
from prefill_svc.ledger import entries
from prefill_svc.prefix import PrefixLoader, Tiers
from prefill_svc.scheduler import Prompt, Scheduler

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
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._engine = engine
        self._thread = thread
        self._identity = identity
        self._exports = exports
        self._tiers = tiers
        self._changed = changed
        self._scheduler = Scheduler(engine.spec, config.chunk_size, config.max_waiting)
        self._prefix = PrefixLoader(engine, tiers, lambda: self._scheduler.rate.value)
        self._queue: dict[Prompt, Job] = {}
        """Jobs whose callers wait."""
        self._alive: dict[Job, None] = {}
        """Jobs that may hold something."""
        self._chunks = Chunks(engine, thread, self._scheduler, progress, self._queue)
        self._refusal = ""
        self._faults = Faults()
        self._closing = False
        self._audit = IdleAudit(self.ledger, lambda: not self._alive, self._break)
        self._audit_task = asyncio.create_task(self._audit.run(), name="idle-audit")
        self._audit_task.add_done_callback(self._audit_ended)

    def submit(self, task: PrefillTask) -> Job:
        """Accept a task; raises InvalidRequest, Overloaded or Unavailable, or what refuses the transfer id."""
        if self._refusal:
            raise Unavailable(self._refusal)
        now = time.monotonic()
        entry = self._scheduler.admit(len(task.prompt_ids) + len(task.output_ids), now, task.tenant)
        try:
            if task.transfer_id:
                self._exports.announce(task.transfer_id)
        except BatonError:
            self._scheduler.remove(entry)
            raise
        job = self._queue[entry] = Job.of(task, entry, now)
        self._alive[job] = None
        job.running = asyncio.create_task(self._live(job), name=f"prefill {task.name}")
        self._changed()
        return job

    def abort(self, job: Job, error: BatonError) -> None:
        """End a job early; one in the middle of a chunk stops after the layer. Does nothing to one that is over."""
        if job.over or job.error is not None:
            return
        job.error = error
        # A task that is cancelled before its first step never runs, and would free nothing.
        if job.begun and job.running is not None:
            job.running.cancel()

    def abandon(self, transfer_id: str, incarnation: str) -> None:
        """End the export that nobody will fetch, and a job that still computes for it; idempotent."""
        if incarnation != self._identity.incarnation:
            return
        for job in [job for job in self._queue.values() if job.task.transfer_id == transfer_id]:
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
            newcomers=len(self._queue),
        )

    async def ledger(self) -> Ledger:
        """Who holds what, and whether the sums are right."""
        spec = self._engine.spec
        return await take_ledger(
            self._identity, self._engine, lambda: entries(list(self._alive), spec, time.monotonic())
        )

    def refuse(self) -> None:
        """Take no new work."""
        self._refusal = self._refusal or "the worker is draining"

    async def finished(self) -> None:
        """Return once no job, no export and no write-back is left; at a drain, after `refuse`."""
        while tasks := [job.running for job in self._alive if job.running is not None]:
            await asyncio.wait(tasks)
        await self._tiers.cache.flush()

    async def close(self) -> None:
        """End all jobs and exports, wait for every thread and task, and leave no page behind."""
        self.refuse()
        self._closing = True
        self._prefix.stop()
        self._audit_task.cancel()
        tasks = [job.running for job in self._alive if job.running is not None]
        for job in list(self._alive):
            self.abort(job, Unavailable("the worker stops"))
        self._exports.close()
        await asyncio.gather(*tasks, self._audit_task, return_exceptions=True)
        await self._exports.drained()
        await self._tiers.peers.close()
        if not self.failed.cancel():
            self.failed.exception()

    # A prompt's life.

    async def _live(self, job: Job) -> None:
        """Serve a job from its look-up until nothing of it is left."""
        job.begun = True
        try:
            self._end(job, await self._prefill(job))
            await self._keep(job)
        finally:
            self._free(job)

    async def _prefill(self, job: Job) -> PrefillDone | BatonError:
        """Everything up to the answer, which may be an error."""
        timeout = asyncio.timeout_at(_finite(job.life.deadline))
        try:
            async with timeout:
                await self._look_up(job)
                await self._allocate(job)
                await self._load(job)
                return self._commit(job, await self._compute(job, timeout))
        except asyncio.CancelledError:
            return job.error or Unavailable("the worker stops")
        except BatonError as error:
            return error
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                return overdue(job)
            _log.exception("%s: the prefill failed", job.task.name)
            return EngineError(f"{type(error).__name__}: {error}")

    async def _look_up(self, job: Job) -> None:
        """Name the prompt's blocks, and ask which of them are cached."""
        if job.error is not None:
            raise job.error
        await self._prefix.look_up(job)
        self._scheduler.await_pages(job.entry, self._prefix.expected_at_look_up(job))

    async def _allocate(self, job: Job) -> None:
        """Wait for all pages of the job, and for its export to be open."""
        job.turn = self._loop.create_future()
        self._give_pages()
        await job.turn
        if job.task.transfer_id:
            job.export = self._exports.open(
                job.task.transfer_id, job.pages, len(job.ids), on_closed=job.export_closed.set
            )

    async def _load(self, job: Job) -> None:
        """Bring cached blocks into the pages, as far as that is worth it."""
        if self._prefix.lost_blocks(job):
            await self._prefix.look_up_again(job)
            self._scheduler.expect(job.entry, self._prefix.expected(job))
        await self._prefix.load(job)
        job.computed = job.found
        for tier, tokens in by_tier(job.sources, job.found).items():
            metrics.PREFILL_TOKENS.labels(tier).inc(tokens)
        if job.computed:
            self._prefix.advance(job, job.computed)
            self._prefix.publish(job)
        job.tell(job.progress())

    async def _compute(self, job: Job, timeout: asyncio.Timeout) -> ChunkResult:
        """Compute what is not cached, chunk by chunk; the last chunk's result."""
        while True:
            async with self._chunks.turn(job) as end:
                if job.life.state is State.QUEUED:
                    job.start(time.monotonic())
                    timeout.reschedule(_finite(job.life.deadline))
                try:
                    result = await self._chunks.run(job, end)
                except asyncio.CancelledError:
                    self._prefix.publish(job)
                    raise
                except Exception as error:
                    raise await self._fault(job, error) from None
                self._prefix.publish(job)
            if job.computed == len(job.ids):
                self._faults.computed()
                return result
            job.tell(job.progress())
            self._give_pages()
            self._changed()

    def _commit(self, job: Job, result: ChunkResult) -> PrefillDone:
        """Hand the KV over, with the first token of each choice."""
        handoff, done = finished(job, result.tokens, self._engine.spec.eos_token_ids)
        if job.export is not None:
            job.export.commit(handoff)
            if not job.export.ended:
                job.life.enter(State.HELD, time.monotonic())
        return done

    async def _keep(self, job: Job) -> None:
        """Write new blocks of a finished job back, and hold its KV until its export has ended."""
        if job.error is None:
            try:
                await self._prefix.write_back(job)
            except Exception:
                _log.exception("%s: blocks could not be written back", job.task.name)
        if job.export is not None:
            await job.export_closed.wait()

    def _end(self, job: Job, outcome: PrefillDone | BatonError) -> None:
        """Give the caller the last event, once."""
        job.over = True
        if isinstance(outcome, BatonError):
            job.error = job.error or outcome
            metrics.WASTED_PREFILL_TOKENS.inc(max(0, job.computed - job.found))
            if job.export is not None:
                job.export.fail(outcome)
            elif job.task.transfer_id:
                self._exports.withdraw(job.task.transfer_id, f"was given up: {outcome}")
        if job.life.state is not State.HELD:
            job.life.end(time.monotonic())
        job.tell(outcome)
        self._scheduler.remove(job.entry)
        del self._queue[job.entry]
        self._changed()
        self._give_pages()

    def _free(self, job: Job) -> None:
        """Give back all that the job held; what waits for pages may get them now."""
        job.life.end(time.monotonic())
        if job.handle is not None:
            self._engine.free(job.handle)
        del self._alive[job]
        self._give_pages()
        self._changed()
        self._audit.changed()

    # Pages.

    def _give_pages(self) -> None:
        """Allocate pages for the prompts whose turn it is; called whenever one may have become able to get them."""
        refused: set[Prompt] = set()
        while not self._closing:
            now = time.monotonic()
            entry = self._scheduler.next_allocation(now, self._deferred(), refused)
            if entry is None:
                return
            job = self._queue[entry]
            if job.turn is None or job.turn.done():
                # It was cancelled, and has yet to wake up.
                self._scheduler.remove(entry)
            elif self._reserve(job):
                self._prefix.plan(job)
                self._scheduler.allocate(entry, self._prefix.expected(job))
                job.turn.set_result(0)
            else:
                refused.add(entry)
                self._scheduler.refuse(entry, now)

    def _reserve(self, job: Job) -> bool:
        """Take all pages of a job; False if they are not free."""
        prefix = job.digests if job.task.reads else ()
        try:
            job.handle = self._engine.reserve(job.task.name, len(job.ids), prefix, len(job.ids) - 1)
        except OutOfPages:
            return False
        return True

    def _deferred(self) -> set[Prompt]:
        """Prompts that do best to wait for what another computes."""
        return {entry for entry in self._scheduler.waiting_for_pages() if self._defers(self._queue[entry])}

    def _defers(self, job: Job) -> bool:
        """Whether another job with pages is about to compute most of what this one lacks, soon enough."""
        rank = self._scheduler.rank
        return any(
            self._prefix.defers(job, other, rank(other.entry) - rank(job.entry))
            for other in self._queue.values()
            if other.handle is not None and other.error is None
        )

    # Faults.

    async def _fault(self, job: Job, error: Exception) -> Exception:
        """What a chunk that raised means: its job was to stop, or can't be computed, or the engine failed."""
        if error is job.error or isinstance(error, DeadlineExceeded | Overloaded | Unavailable):
            return error
        _log.error("%s: a chunk failed", job.task.name, exc_info=error)
        if isinstance(error, NoToken) and job.handle is not None:
            self._engine.retract(job.handle)
            try:
                self._faults.failed(job.task.request_id)
            except EngineError as broken:
                self._break(broken)
            return error
        # Whatever spoiled the chunk may have spoiled what was cached, too. The job's end gives its pages to others, who
        # must not find anything of that.
        self._engine.drop_cached()
        try:
            await self._thread.run(self._engine.audit)
        except Exception as broken:
            self._break(broken)
        return EngineError(f"{type(error).__name__}: {error}")

    def _break(self, error: BaseException) -> None:
        """The engine can't be trusted any more: end all jobs, and tell whoever runs this worker."""
        self._refusal = f"the engine failed: {error}"
        for job in list(self._queue.values()):
            self.abort(job, Unavailable(self._refusal))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _audit_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)


def _finite(deadline: float) -> float | None:
    return None if math.isinf(deadline) else deadline
