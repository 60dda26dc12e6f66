"""The prefill worker: the life of each prompt is one coroutine, and all prompts share one engine.

    submit ── look up ── allocate ── load ── compute, chunk by chunk ── commit ── write back ── hold ── free
       └──────────┴──────────┴─────────┴──────────────┴── abort, deadline, fault ───────────────────────▲

`_serve` is that life, from top to bottom. It waits for two decisions of the scheduler: for all its pages at once
(`_allocate_pages`), and for the engine before each chunk (`ChunkRunner`). Full blocks are published after each
chunk, so the work of an aborted job is not lost; those of a long prompt also go to the shared cache, so the work of a
worker that dies is not lost either. After a fault of the engine all cached blocks are dropped, because they may be
wrong. Finished KV is kept until its export has ended. Whenever no job is left, the worker audits itself.

`ChunkRunner` shares the one engine. A job waits in `compute`. When the engine is free, the job that the scheduler
chooses gets it until its chunk has ended. After every layer (with pipeline stages, after the chunk), and after each
part of the prompt's logprobs, a running chunk checks whether its job was aborted or is late, and tells the export how
many tokens are final. Then it runs the chunks of jobs that the scheduler has chosen meanwhile: they preempt it.

On a mixed worker decode uses the same engine (`SharedEngine`). Then other chunks share the passes of the batch, and a
prompt never waits for pages: a job in place takes those of its reservation (`baton.worker.in_place`), which decode
frees, and another one gets its pages at once or is refused. So two mixed workers never wait for each other's pages. A
job in place may wait for another prompt that computes their common beginning, and then shares its pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from baton.config.worker import PrefillConfig
from baton.engine.contract import ChunkResult, Engine, compute_chunk
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    IncompleteTransfer,
    InvalidRequest,
    NoToken,
    OutOfPages,
    Overloaded,
    TransferError,
    Unavailable,
)
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from baton.process.executors import EngineThread, wait_to_end
from baton.request import Prefilled
from baton.telemetry import metrics
from baton.telemetry.logs import about
from baton.worker.health import NoTokenCounter, Watchdog
from baton.worker.in_place import Computed, InPlaceTransfers, Offer
from baton.worker.start import WorkerParts
from baton.worker.status import WorkerLoad
from prefill_svc.job import PrefillJob, PrefillRequest, count_by_tier, ledger_entries, make_result, overdue_error
from prefill_svc.prefix import PeerFetcher, PrefixLoader
from prefill_svc.scheduler import PrefillScheduler, ScheduledJob

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Chunks(Protocol):
    """Computes the chunks of a worker's jobs; used on the asyncio loop only."""

    async def compute(self, job: PrefillJob, begin: Callable[[], object]) -> ChunkResult:
        """Compute the next tokens of a job when it is its turn; they are counted in `job.computed_tokens`.

        `begin` is called when the computation begins. If the caller is cancelled, CancelledError is raised when the
        engine has ended its work for the job, whose tokens count. If the job's `error` is set or its deadline has
        passed, the chunk ends early with that error.
        """

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call a function on the engine thread, between two passes."""


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """An engine that decode uses too.

    transfers   the prompts that are computed in pages of decode's reservations
    start_s     longest wait for the start of a reservation, in seconds
    may_take    returns whether a prompt without a reservation may take its pages now, given the number of all of them
                and of those that it would not share
    on_taken    called when such a prompt has taken its pages
    write_back  queues a copy of published blocks to the cache: their owner, all digests of the prompt, and the number
                of leading blocks that need no copy
    """

    transfers: InPlaceTransfers
    start_s: float
    may_take: Callable[[int, int], bool]
    on_taken: Callable[[], object]
    write_back: Callable[[str, Sequence[bytes], int], object]


class PrefillWorker:
    """All jobs of one worker; used on the asyncio loop only.

    `make_chunks` makes the computer of chunks, given the scheduler and the jobs whose callers wait. `shared` is None
    unless decode uses the engine too.
    """

    def __init__(
        self,
        config: PrefillConfig,
        parts: WorkerParts,
        peers: PeerFetcher,
        make_chunks: Callable[[PrefillScheduler, Mapping[ScheduledJob, PrefillJob]], Chunks],
        shared: SharedEngine | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._engine = engine = parts.engine
        self._exports = parts.exports
        self._cache, self._peers = parts.cache, peers
        self._changed = parts.changed
        self._shared = shared
        self._scheduler = PrefillScheduler(engine.spec, config.chunk_size, config.max_waiting)
        self._prefix = PrefixLoader(parts, peers, lambda: self._scheduler.rate.value, config.long_prompt_chunks)
        self._open_jobs: dict[ScheduledJob, PrefillJob] = {}
        """Jobs whose callers wait for the answer."""
        self._live_jobs: dict[PrefillJob, None] = {}
        """Jobs that may hold pages or an export."""
        self._watchdog = parts.watchdog
        self._chunks = make_chunks(self._scheduler, self._open_jobs)
        self._refusal = ""
        self._block_size = engine.spec.kv_format.block_size
        self._no_tokens = NoTokenCounter()
        self._closing = False
        self._next_allocation = self._loop.call_soon(self._allocate_pages)
        self._audit = parts.audit
        self._audit.add(self)

    def start(self) -> None:
        """Audit whenever the worker is idle."""
        self._audit.start()

    def submit(self, request: PrefillRequest) -> PrefillJob:
        """Accept a request.

        Raises InvalidRequest, Overloaded or Unavailable, or TransferError for a transfer id that has ended.
        """
        # A drain lets decode's attempts end, and these may still need their prompts.
        if self._refusal and (self.failed.done() or self._closing or not request.in_place):
            raise Unavailable(self._refusal)
        if request.in_place and (self._shared is None or not request.transfer_id):
            raise InvalidRequest("in_place", "needs a mixed worker and a transfer id", request.transfer_id)
        now = time.monotonic()
        scheduled = self._scheduler.admit(len(request.prompt_ids) + len(request.output_ids), request.tenant)
        try:
            if request.in_place and self._shared is not None:
                self._shared.transfers.announce(request.transfer_id)
            elif request.transfer_id:
                self._exports.announce(request.transfer_id)
        except BatonError:
            self._scheduler.remove(scheduled)
            raise
        job = self._open_jobs[scheduled] = PrefillJob.create(request, scheduled, now)
        self._live_jobs[job] = None
        job.serve_task = asyncio.create_task(self._serve(job), name=f"prefill {request.name}")
        self._changed()
        return job

    def abort(self, job: PrefillJob, error: BatonError) -> None:
        """End a job early; a chunk of it stops after the current layer. Does nothing if the job has finished."""
        if job.finished or job.error is not None:
            return
        job.error = error
        # A task that is cancelled before its first step never runs, and would free nothing.
        if job.started and job.serve_task is not None:
            job.serve_task.cancel()

    def abandon(self, transfer_id: str, incarnation: str) -> None:
        """End an export that nobody will fetch, and the job that computes for it; idempotent."""
        if incarnation != self._exports.incarnation:
            return
        for job in [job for job in self._open_jobs.values() if job.request.transfer_id == transfer_id]:
            self.abort(job, Cancelled("the attempt was abandoned"))
        self._exports.release(transfer_id, incarnation, "was abandoned")
        if self._shared is not None:
            self._shared.transfers.end(transfer_id, "was abandoned")

    def load_report(self) -> WorkerLoad:
        """The worker's load."""
        stats, scheduler = self._engine.stats(), self._scheduler
        return WorkerLoad(
            pending_tokens=scheduler.pending_tokens,
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=self._engine.spec.page_size,
            tokens_per_second=scheduler.rate.value,
            requests_without_token=len(self._open_jobs),
        )

    @property
    def waiting_prompts(self) -> int:
        """Number of prompts without a computed chunk."""
        return self._scheduler.waiting

    @property
    def running_prompts(self) -> int:
        """Number of prompts with a computed chunk whose callers wait for the answer."""
        return len(self._open_jobs) - self._scheduler.waiting

    @property
    def prompts_for_others(self) -> int:
        """Number of prompts whose callers wait for the answer, except those in place."""
        return sum(not job.request.in_place for job in self._open_jobs.values())

    def set_gauges(self) -> None:
        """Set the gauges of the worker."""
        stats = self._engine.stats()
        metrics.set_kv_usage(used=stats.used, free=stats.free, cached=stats.cached)
        metrics.WAITING.set(self.waiting_prompts)
        metrics.RUNNING.set(self.running_prompts)
        metrics.QUEUED_SECONDS.labels("prefill").set(self._scheduler.pending_seconds)

    @property
    def idle(self) -> bool:
        """Whether no job may hold pages or an export."""
        return not self._live_jobs

    def ledger_entries(self) -> list[LedgerEntry]:
        """One entry for each job; one in place has no pages of its own."""
        return ledger_entries(self._live_jobs, self._engine.spec, time.monotonic())

    def refuse(self) -> None:
        """Refuse new requests."""
        self._refusal = self._refusal or "the worker is draining"

    async def wait_finished(self) -> None:
        """Wait until no job, export or write-back is left; for a drain, after `refuse`."""
        while tasks := [job.serve_task for job in self._live_jobs if job.serve_task is not None]:
            await asyncio.wait(tasks)
        await self._cache.flush()

    def cut_short(self, grace_s: float) -> None:
        """Log that a drain of `grace_s` seconds was too short; jobs end with the worker."""
        _log.warning("the drain is cut short after %g s: %d prompts are left", grace_s, len(self._live_jobs))

    async def close(self) -> None:
        """End all jobs and exports, wait for every thread and task, and free all pages."""
        self.refuse()
        self._closing = True
        self._prefix.stop()
        tasks = [job.serve_task for job in self._live_jobs if job.serve_task is not None]
        for job in list(self._live_jobs):
            self.abort(job, Unavailable("the worker stops"))
        self._exports.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._audit.close()
        await self._exports.wait_closed()
        await self._peers.close()
        if not self.failed.cancel():
            self.failed.exception()

    # A prompt's life.

    async def _serve(self, job: PrefillJob) -> None:
        """Serve a job from its look-up until it has freed everything."""
        job.started = True
        try:
            self._end(job, await self._prefill(job))
            await self._hold(job)
        finally:
            self._free(job)

    async def _prefill(self, job: PrefillJob) -> Prefilled | BatonError:
        """Run a job up to its result; returns the error if it fails."""
        timeout = asyncio.timeout_at(_finite(job.lifecycle.deadline))
        try:
            async with timeout:
                await self._look_up(job)
                await self._allocate(job)
                await self._load(job)
                return self._commit(job, await self._compute_chunks(job, timeout))
        except asyncio.CancelledError:
            return job.error or Unavailable("the worker stops")
        except BatonError as error:
            return error
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                return overdue_error(job)
            _log.exception("%s: the prefill failed", job.request.name, extra=about(job.request.name))
            return EngineError(f"{type(error).__name__}: {error}")

    async def _look_up(self, job: PrefillJob) -> None:
        """Hash the prompt's blocks, and look up which of them are cached."""
        if job.error is not None:
            raise job.error
        await self._prefix.look_up(job)
        cached, needs_load = self._prefix.estimate_cached_tokens(job)
        if self._shared is None:
            self._scheduler.finish_lookup(job.scheduled, cached, needs_load=needs_load)
        else:
            self._scheduler.set_cached_tokens(job.scheduled, cached)

    async def _allocate(self, job: PrefillJob) -> None:
        """Wait for all pages of the job, then open its export."""
        if self._shared is not None:
            await self._allocate_shared(job, self._shared)
        else:
            job.pages_ready = self._loop.create_future()
            self._allocate_pages()
            await job.pages_ready
        if job.request.transfer_id and not job.request.in_place:
            job.export = self._exports.open(
                job.request.transfer_id, job.allocated_handle, len(job.token_ids), on_closed=job.export_closed.set
            )

    async def _load(self, job: PrefillJob) -> None:
        """Load the planned cached blocks into the pages."""
        if self._prefix.has_lost_blocks(job):
            await self._prefix.look_up_again(job)
            self._scheduler.set_cached_tokens(job.scheduled, self._prefix.planned_tokens(job))
        await self._prefix.load(job)
        job.computed_tokens = job.cached_tokens
        for tier, tokens in count_by_tier(job.prefix.origins, job.cached_tokens).items():
            metrics.PREFILL_TOKENS.labels(tier).inc(tokens)
        if job.computed_tokens:
            self._prefix.mark_final(job, job.computed_tokens)
            await self._prefix.publish_loaded(job)
            self._allocate_pages()

    async def _compute_chunks(self, job: PrefillJob, timeout: asyncio.Timeout) -> ChunkResult:
        """Compute the tokens that are not cached, chunk by chunk; returns the result of the last chunk."""

        def begin() -> None:
            if job.lifecycle.state is State.PREPARING:
                job.start(time.monotonic())
                timeout.reschedule(_finite(job.lifecycle.deadline))

        while True:
            try:
                result = await self._chunks.compute(job, begin)
            except asyncio.CancelledError:
                self._prefix.publish(job)
                raise
            except Exception as error:
                raise await self._handle_fault(job, error) from None
            self._prefix.publish(job)
            job.report_progress(time.monotonic())
            if job.computed_tokens == len(job.token_ids):
                self._no_tokens.record_success()
                return result
            self._allocate_pages()
            self._changed()
            await self._prefix.save(job, waits=self._shared is None)

    def _commit(self, job: PrefillJob, result: ChunkResult) -> Prefilled:
        """Commit the KV to its export or to the reservation that has the pages, with the first token of each choice."""
        handoff, done = make_result(job, result.tokens, self._engine.spec.eos_token_ids)
        if self._shared is not None and job.request.in_place:
            self._shared.transfers.commit(job.request.transfer_id, Computed(handoff, job.prefix.digests))
        if job.export is not None:
            job.export.commit(handoff)
            if not job.export.ended:
                job.lifecycle.enter(State.HELD, time.monotonic())
        return done

    async def _hold(self, job: PrefillJob) -> None:
        """Write new blocks of a job back, if it was computed, and keep its KV until its export has ended."""
        try:
            if job.error is not None:
                await self._prefix.give_up(job)
            elif self._shared is None or not job.request.in_place:
                await self._prefix.write_back(job)
            elif digests := await self._prefix.unsaved_digests(job):
                # The pages may be freed at any time, so the copy pins the published blocks.
                stored = max(job.cached_tokens // self._block_size, job.prefix.saved)
                self._shared.write_back(f"{job.request.name}/prompt", digests, stored)
        except Exception:
            _log.exception("%s: blocks could not be written back", job.request.name, extra=about(job.request.name))
        if job.export is not None:
            await job.export_closed.wait()

    def _end(self, job: PrefillJob, outcome: Prefilled | BatonError) -> None:
        """Give the caller the last event, once."""
        job.finish(outcome)
        if isinstance(outcome, BatonError):
            job.error = job.error or outcome
            metrics.WASTED_PREFILL_TOKENS.inc(max(0, job.computed_tokens - job.cached_tokens))
            if job.export is not None:
                job.export.fail(outcome)
            elif job.request.in_place and self._shared is not None:
                self._shared.transfers.end(job.request.transfer_id, f"failed at its source: {outcome}")
            elif job.request.transfer_id:
                self._exports.withdraw(job.request.transfer_id, f"was given up: {outcome}")
        if job.lifecycle.state is not State.HELD:
            job.lifecycle.end(time.monotonic())
        self._scheduler.remove(job.scheduled)
        del self._open_jobs[job.scheduled]
        self._changed()
        self._allocate_pages()

    def _free(self, job: PrefillJob) -> None:
        """Free all that the job held; prompts that wait for pages may get them now."""
        job.lifecycle.end(time.monotonic())
        if job.handle is not None and not job.request.in_place:
            self._engine.free(job.handle)
        del self._live_jobs[job]
        self._allocate_pages()
        self._changed()
        self._audit.notify()

    # Pages.

    def _allocate_pages(self) -> None:
        """Allocate pages to the prompts whose turn it is, and end their wait for `pages_ready`.

        Called whenever a prompt may have become able to get pages. If decode uses the engine too, all look whether
        they still wait for the beginning of another prompt.
        """
        refused: set[ScheduledJob] = set()
        if self._shared is not None:
            for job in self._open_jobs.values():
                if job.pages_ready is not None and not job.pages_ready.done():
                    job.pages_ready.set_result(None)
            return
        while not self._closing:
            now = time.monotonic()
            scheduled = self._scheduler.next_allocation(now, self._deferred(), refused)
            if scheduled is None:
                return
            job = self._open_jobs[scheduled]
            if job.pages_ready is None or job.pages_ready.done():
                # It was cancelled, but its coroutine has not run since.
                self._scheduler.remove(scheduled)
            elif self._prefix.evict(job):
                self._next_allocation.cancel()
                self._next_allocation = self._loop.call_soon(self._allocate_pages)
                return
            elif self._try_allocate(job):
                self._record_allocation(job)
                job.pages_ready.set_result(None)
            else:
                refused.add(scheduled)
                self._scheduler.mark_refused(scheduled, now)

    async def _allocate_shared(self, job: PrefillJob, shared: SharedEngine) -> None:
        """Take the pages of the job's reservation, or, if it has none here, pages that are free now.

        Raises TransferError if the reservation has ended, and Overloaded if the pages are not free.
        """
        if job.request.in_place:
            try:
                async with asyncio.timeout(shared.start_s):
                    offer = await shared.transfers.take(job.request.transfer_id, lambda error: self.abort(job, error))
            except TimeoutError:
                raise TransferError(
                    f"{job.request.name}: its reservation was not started in {shared.start_s:g} s"
                ) from None
            self._check_offer(job, offer)
            while self._should_defer(job):
                job.pages_ready = self._loop.create_future()
                await job.pages_ready
            job.handle = offer.handle
        else:
            # Nothing is evicted for a prompt that is refused.
            while self._may_take_pages(job, shared) and self._prefix.evict(job):  # noqa: ASYNC110 nothing is awaited
                await asyncio.sleep(0)
            if not self._may_take_pages(job, shared) or not self._try_allocate(job):
                raise Overloaded(
                    f"the pages for {len(job.token_ids)} tokens are not free, or kept for requests that decode here"
                )
            shared.on_taken()
        self._record_allocation(job)

    def _may_take_pages(self, job: PrefillJob, shared: SharedEngine) -> bool:
        """Whether a job without a reservation may take its pages now."""
        tokens, pages_for = len(job.token_ids), self._engine.spec.pages_for
        return shared.may_take(pages_for(tokens), pages_for(tokens - self._engine.match_prefix(job.readable_digests)))

    def _check_offer(self, job: PrefillJob, offer: Offer) -> None:
        """Raise IncompleteTransfer if a reservation is not for the job's tokens."""
        cached, expected = offer.handle.cached_tokens, len(job.token_ids)
        if offer.context_tokens != expected:
            raise IncompleteTransfer(f"{job.request.name}: {offer.context_tokens} tokens are reserved for {expected}")
        last = -(-cached // self._block_size) - 1
        # The last digest of a chain names all blocks before it too.
        if cached and tuple(job.readable_digests[last : last + 1]) != (offer.pinned_digest,):
            raise IncompleteTransfer(f"{job.request.name}: the {cached} pinned tokens are not those of the prompt")

    def _record_allocation(self, job: PrefillJob) -> None:
        """Plan what to load into the pages of a job, and record that it has them."""
        self._prefix.plan_load(job)
        in_host, planned = job.allocated_handle.in_host, self._prefix.planned_tokens(job)
        needs_load = bool(job.prefix.load_plan) or self._prefix.has_lost_blocks(job)
        self._scheduler.record_allocation(job.scheduled, planned, in_host=in_host, needs_load=needs_load)

    def _try_allocate(self, job: PrefillJob) -> bool:
        """Allocate all pages of a job; False if they are not free."""
        try:
            job.handle = self._engine.reserve(
                job.request.name, len(job.token_ids), job.readable_digests, len(job.token_ids) - 1
            )
        except OutOfPages:
            return False
        return True

    def _deferred(self) -> set[ScheduledJob]:
        """Prompts that should wait because another one is about to compute their prefix."""
        return {
            scheduled
            for scheduled in self._scheduler.waiting_for_pages()
            if self._should_defer(self._open_jobs[scheduled])
        }

    def _should_defer(self, job: PrefillJob) -> bool:
        """Whether another job with pages is about to compute most of what this one needs, soon enough."""
        return any(
            self._prefix.should_defer(
                job, other, self._scheduler.priority(other.scheduled) - self._scheduler.priority(job.scheduled)
            )
            for other in self._open_jobs.values()
            if other.handle is not None and other.error is None
        )

    # Faults.

    async def _handle_fault(self, job: PrefillJob, error: Exception) -> Exception:
        """The error of a chunk that raised: its job was stopped, it can't be computed, or the engine failed."""
        if error is job.error or isinstance(error, DeadlineExceeded | Overloaded | Unavailable):
            return error
        if job.error is not None and not job.allocated_handle.alive:
            # The reservation that has the pages ended before the chunk began.
            return job.error
        _log.error("%s: a chunk failed", job.request.name, exc_info=error, extra=about(job.request.name))
        if isinstance(error, NoToken) and job.handle is not None:
            self._engine.uncache(job.handle)
            self._no_tokens.record_failure(job.request.request_id)
            job.error = error
            if self._no_tokens.suspected:
                check = partial(self._no_tokens.run_self_test, self._engine, self._watchdog, step=False)
                await self._check(self._chunks.run(check))
            return error
        # The error may also have damaged cached blocks. The end of the job gives its pages to others, which must not
        # find any of these blocks.
        self._engine.drop_cached()
        job.error = EngineError(f"{type(error).__name__}: {error}")
        await self._check(self._chunks.run(self._engine.audit))
        return job.error

    async def _check(self, check: asyncio.Future[Any]) -> None:
        """Wait for a check of the engine, also when cancelled; if it raises, the engine has failed."""
        check.add_done_callback(self._on_checked)
        await wait_to_end(check)

    def fail_engine(self, error: BaseException) -> None:
        """End all jobs because the engine can't be trusted any more, and set `failed`; idempotent."""
        if self.failed.done():
            return
        self._refusal = f"the engine failed: {error}"
        for job in list(self._open_jobs.values()):
            self.abort(job, Unavailable(self._refusal))
        self.failed.set_exception(error)

    def _on_checked(self, check: asyncio.Future[Any]) -> None:
        if not check.cancelled() and (error := check.exception()) is not None:
            self._audit.fail(error)


def _finite(deadline: float) -> float | None:
    return None if math.isinf(deadline) else deadline


@dataclass(slots=True)
class _RunningChunk:
    """One call to the engine; `seconds` are its own, without those of the chunks that preempted it."""

    job: PrefillJob
    start: int
    end: int
    preempts: bool
    seconds: float = 0.0


class ChunkRunner:
    """The Chunks of a worker that only prefills: each chunk of its `jobs` is a pass of its own on `thread`."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        watchdog: Watchdog,
        scheduler: PrefillScheduler,
        jobs: Mapping[ScheduledJob, PrefillJob],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._scheduler = scheduler
        self._watchdog = watchdog
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._running: list[PrefillJob] = []
        """The job that was given the free engine, then those that preempt it; they end in any order."""

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """As in Chunks."""
        return self._thread.run(function)

    async def compute(self, job: PrefillJob, begin: Callable[[], object]) -> ChunkResult:
        """As in Chunks."""
        async with self._acquire_engine(job) as end:
            begin()
            return await self._run_chunk(job, end)

    @contextlib.asynccontextmanager
    async def _acquire_engine(self, job: PrefillJob) -> AsyncIterator[int]:
        """Wait for the engine; yields the end of the chunk that the job must compute now."""
        self._scheduler.make_ready(job.scheduled, job.computed_tokens)
        job.chunk_assigned = self._loop.create_future()
        self._assign_engine()
        try:
            yield await job.chunk_assigned
        finally:
            if job in self._running:
                self._running.remove(job)
                # Not at once: this job may ask for the engine again, and may have fewer remaining tokens than others.
                self._loop.call_soon(self._assign_engine)

    async def _run_chunk(self, job: PrefillJob, end: int) -> ChunkResult:
        """Compute the job's next tokens up to `end`; call it while the job has the engine.

        Returns or raises only when the engine no longer uses the job's pages.
        """
        job.computing_end = end
        chunk = _RunningChunk(job, job.computed_tokens, end, preempts=job is not self._running[0])
        run = self._thread.run_preempting if chunk.preempts else self._thread.run
        call = run(self._compute_on_thread, chunk)
        cancelled = False
        try:
            await wait_to_end(call)
        except asyncio.CancelledError:
            cancelled = True
        self._scheduler.charge(job.scheduled, chunk.seconds)
        result = call.result()
        self._scheduler.finish_chunk(job.scheduled, end, chunk.seconds)
        metrics.PREFILL_TOKENS.labels("computed").inc(end - chunk.start)
        job.computed_tokens = end
        job.add_prompt_logprobs(result.prompt_logprobs)
        if cancelled:
            raise asyncio.CancelledError
        return result

    def _assign_engine(self) -> None:
        """Give the engine to the prompt that the scheduler chooses if it is free, and to those that may preempt it."""
        while True:
            choice = self._scheduler.next_chunk(self._running[0].scheduled if self._running else None)
            if choice is None:
                break
            scheduled, end = choice
            job = self._jobs[scheduled]
            if job.chunk_assigned is None or job.chunk_assigned.done():
                # It was cancelled, but its coroutine has not run since.
                self._scheduler.remove(scheduled)
                continue
            self._running.append(job)
            self._scheduler.start_chunk(scheduled)
            job.chunk_assigned.set_result(end)
        if not self._running:
            self._watchdog.set_idle()

    def _compute_on_thread(self, chunk: _RunningChunk) -> ChunkResult:
        """Compute one chunk; runs on the engine thread."""
        job, began, others_s = chunk.job, time.monotonic(), 0.0

        def on_layer(layer: int) -> None:
            nonlocal others_s
            self._watchdog.record()
            job.check()
            if job.export is not None:
                job.export.mark_final(layer, chunk.end)
            if not chunk.preempts:
                paused = time.monotonic()
                self._thread.preemption_point()
                others_s += time.monotonic() - paused

        self._watchdog.record()
        job.check()
        try:
            return compute_chunk(self._engine, job.chunk(chunk.start, chunk.end, on_layer))
        finally:
            chunk.seconds = time.monotonic() - began - others_s
