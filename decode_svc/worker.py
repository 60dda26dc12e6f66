"""The decode worker: the life of each attempt from its reservation to its end. All share one generation batch.

    Reserve   `_reserve`    take pages, or refuse at once                                    RESERVED
    Start     `_start`      export its pinned prefix to prefill, and start to fetch its KV   TRANSFERRING
              `_transfer`   fetch ─▶ hash blocks ─▶ `_commit`                                SLOT_WAIT
              `schedule`    give its sequences to the engine thread (`decode_svc.loop`)      SLOT_WAIT
              `report`      send the results of each step to the router                      DECODING
    Cancel, deadline, fault, end of the session, last choice finished ──▶ `_end`             ENDED

Every attempt ends in `_end`, which frees everything that the attempt holds, in any state. Its final KV stays in the
pool, unless the engine has failed. With a shared cache, the KV is also copied there (`WriteBacks`).

A reservation is refused while the worker drains or has failed, and for the reasons in `decode_svc.admission`. The
answer has a time after which to retry, unless the reservation can never be granted. Pending choices are forked when
slots and pages come free: `schedule` checks that after each event. `decode_svc.attempts` has the pages and states of
an attempt, and its methods have the names of the steps here.

Everything here runs on the asyncio loop; the engine thread gets only plain messages and KV handles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import abc
from typing import Protocol

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine, KvHandle
from baton.errors import BatonError, OutOfPages, Overloaded
from baton.kv.prefix.contract import PrefixCache
from baton.lifecycle import State
from baton.rates import DecayingAverage
from baton.request import Handoff, Output, RemoteExport, ReserveResult
from baton.telemetry import metrics
from baton.transfer.export import ExportRegistry
from baton.worker.cache_tiers import BlockCopier, CacheTiers
from baton.worker.health import Watchdog
from baton.worker.status import WorkerLoad
from decode_svc.admission import RENEW_S, Admission, SlotForecast
from decode_svc.attempts import Attempts, DecodeAttempt, Failure, FailureKind
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.reservation import InvalidReservation, Reserve, context_ids, pinnable_digests
from decode_svc.scheduler import DecodeSequence
from decode_svc.session import MAX_ANSWERS, Cancel, Command, Ended, Heartbeat, RouterSession, Start
from decode_svc.write_backs import WriteBacks

_log = logging.getLogger(__name__)

_RATE_WEIGHT = 0.1


class KvFetcher(Protocol):
    """Function that fetches `tokens` of an export of `length` tokens into the handle; raises TransferError."""

    async def __call__(self, source: RemoteExport, handle: KvHandle, *, tokens: range, length: int) -> Handoff: ...


class DecodeWorker:
    """All sessions and attempts of one worker.

    `changed` is called when the load has changed, `on_idle` when no attempt is left.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        fetch_kv: KvFetcher,
        exports: ExportRegistry,
        cache: PrefixCache,
        cache_tiers: CacheTiers,
        watchdog: Watchdog,
        changed: abc.Callable[[], None],
        on_idle: abc.Callable[[], None],
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._config = config
        self._engine = engine
        self._fetch_kv = fetch_kv
        self._exports = exports
        self._cache_tiers = cache_tiers
        self._changed, self._on_idle = changed, on_idle
        self.idle = asyncio.Event()
        """Set while there is no attempt."""
        self.idle.set()
        self._blocks = BlockCopier(engine, cache)
        self.load_meter = LoadMeter(engine)
        self.refusal = ""
        """The reason for which all reservations are refused, or an empty string."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Future that gets an exception when the engine can't go on."""
        self.write_backs = WriteBacks(
            engine,
            self._blocks,
            enabled=cache.enabled,
            short_of_pages=lambda: self.decode_loop.missing_pages() > 0,
            changed=self._check_idle,
        )
        self.attempts = Attempts(engine, config.reserve_tokens, exact=not config.convert_kv)
        self.sessions: dict[int, RouterSession] = {}
        self._numbers = itertools.count()
        self._transfers: dict[DecodeAttempt, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.decode_loop = DecodeLoop(
            engine,
            watchdog,
            lambda report: loop.call_soon_threadsafe(self.report, report),
            loop.time,
            self.write_backs.release_pages,
        )
        forecast = SlotForecast(engine.spec.slots, loop.time())
        missing, reclaim = self.decode_loop.missing_pages, self.write_backs.release_pages
        self.admission = Admission(engine, self.attempts, forecast, missing, reclaim)

    def open_session(self, router_id: str) -> RouterSession:
        """Open a session, which will own all attempts that it reserves."""
        number = next(self._numbers)
        session = RouterSession(
            number, router_id, lambda: [attempt.key for attempt in self.attempts.in_session(number)]
        )
        self.sessions[number] = session
        return session

    def close_session(self, session: RouterSession, error: BatonError | None = None) -> None:
        """End a session and all its attempts; idempotent. If there is an error, the router gets it."""
        for attempt in self.attempts.in_session(session.number):
            self._end(attempt)
        if self.sessions.pop(session.number, None) is not None:
            session.end(error)
        self.admission.drop_session(session.number)

    async def receive(self, session: RouterSession, command: Command) -> None:
        """Handle a command. For a long context it first evicts cached blocks in slices, between which others run."""
        if isinstance(command, Reserve):
            evict, now = self.admission.evict, self._loop.time
            while not self.refusal and evict(session.number, command, now()):  # noqa: ASYNC110 nothing is awaited
                await asyncio.sleep(0)
        self.handle(session, command)

    def handle(self, session: RouterSession, command: Command) -> None:
        """Handle a router's command. An invalid command is answered or ignored, and never ends the session.

        Commands after the end of the session are ignored, because nobody would free what they reserve.
        """
        if session.number not in self.sessions:
            return
        match command:
            case Reserve():
                session.send(command.key, self._reserve(session, command))
            case Start():
                self._start(session, command)
            case Cancel():
                self._cancel(session, command)
            case Heartbeat():
                self._handle_heartbeat(session, command)
        if session.unread > MAX_ANSWERS:
            message = f"{session.unread} answers were not read; at most {MAX_ANSWERS} are kept for a session"
            _log.warning("the session of router %s ends: %s", session.router_id, message)
            self.close_session(session, Overloaded(message))

    # An attempt's life.

    def _reserve(self, session: RouterSession, request: Reserve) -> ReserveResult:
        """Reserve pages for an attempt, or answer why not."""
        if self.refusal:
            return ReserveResult(False, self.refusal)
        now, forecast = self._loop.time(), self.admission.forecast
        try:
            attempt = self.admission.reserve(session.number, request, now, self._config.start_timeout_s)
        except InvalidReservation as error:
            return ReserveResult(False, str(error), too_small=True)
        except OutOfPages as error:
            retry_after_s = min(forecast.retry_after(now), RENEW_S)
            room = self.admission.free_context_tokens(now)
            return ReserveResult(False, str(error), retry_after_s=retry_after_s, reservable_tokens=room)
        except Overloaded as error:
            return ReserveResult(False, str(error), retry_after_s=error.retry_after or forecast.retry_after(now))
        self.idle.clear()
        self.schedule()
        cached = attempt.handle.cached_tokens
        found = cached // self._engine.spec.kv_format.block_size
        self._cache_tiers.record_lookup(found, len(pinnable_digests(request)))
        return ReserveResult(True, cached_tokens=cached)

    def _start(self, session: RouterSession, start: Start) -> None:
        """Fetch a reserved attempt's KV, and export its pinned blocks to prefill."""
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.send(start.key, Failure(FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.life.state is not State.RESERVED:
            return
        limit_s = self._config.fetch_limit_s(attempt.request.context_tokens)
        self.attempts.start(attempt, self._loop.time(), limit_s, start.deadline_s)
        if start.prefix_transfer_id:
            self._export_prefix(attempt, start.prefix_transfer_id)
        transfer = self._transfer(attempt, start.source)
        self._transfers[attempt] = asyncio.create_task(transfer, name=f"fetch {start.key}")
        self.schedule()

    def _export_prefix(self, attempt: DecodeAttempt, transfer_id: str) -> None:
        """Export the attempt's pinned blocks to prefill. If this fails, prefill computes them.

        The pinned tokens are final, so the export is committed at once, without a handoff. The pages belong to the
        attempt, so the export ends before the attempt's handle is freed.
        """
        tokens = attempt.handle.cached_tokens
        if not tokens:
            # A fetch that waits for this export, or will come, must not wait for something that never comes.
            self._exports.release(transfer_id, self._exports.incarnation, "has nothing to export")
            return
        try:
            export = self._exports.open(transfer_id, attempt.handle, tokens)
        except BatonError as error:
            _log.warning("%s: its prefix can't be exported: %s", attempt.key, error)
            return
        attempt.prefix_transfer_id = transfer_id
        export.commit_prefix(pinnable_digests(attempt.request)[tokens // self._engine.spec.kv_format.block_size - 1])
        metrics.PREFIX_EXPORTS.inc()

    def _end_prefix_export(self, attempt: DecodeAttempt) -> None:
        if attempt.prefix_transfer_id:
            self._exports.release(attempt.prefix_transfer_id, self._exports.incarnation, "ended with its attempt")

    async def _transfer(self, attempt: DecodeAttempt, source: RemoteExport) -> None:
        """Fetch an attempt's KV, except the pinned blocks, and commit it. A failure ends the attempt."""
        started, length = self._loop.time(), attempt.request.context_tokens
        missing = range(attempt.handle.cached_tokens, length)
        try:
            handoff = await self._fetch_kv(source, attempt.handle, tokens=missing, length=length)
            digests = None
            if self.attempts.needs_digests(attempt):
                digests = await self._blocks.hash_blocks(context_ids(handoff), attempt.request.cache_salt)
                self.attempts.check_handoff(attempt, handoff, digests)
                if self.attempts.may_publish(attempt):
                    await self._blocks.publish(attempt.handle, digests)
            # The attempt may have ended while the last frame was written.
            if not attempt.life.ended:
                self._commit(attempt, handoff, digests, (self._loop.time() - started) * 1e3)
        except OutOfPages as error:
            self._fail(attempt, FailureKind.PREEMPTED, f"{attempt.key}: no page is left to keep the context: {error}")
        except BatonError as error:
            self._fail(attempt, FailureKind.of(error), str(error))
        except Exception as error:
            _log.exception("fetching %s failed", attempt.key)
            self._fail(attempt, FailureKind.ENGINE, f"{type(error).__name__}: {error}")
        finally:
            del self._transfers[attempt]

    def _commit(
        self, attempt: DecodeAttempt, handoff: Handoff, digests: abc.Sequence[bytes] | None, fetch_ms: float
    ) -> None:
        """Commit an attempt whose KV is complete: its first choice goes to the engine, further ones become pending."""
        now = self._loop.time()
        self._end_prefix_export(attempt)
        sequence = self.attempts.commit(attempt, handoff, fetch_ms, now, digests)
        metrics.REUSED_TOKENS.inc(attempt.handle.cached_tokens)
        if self._config.convert_kv:
            metrics.UNSHARED_TOKENS.inc(attempt.request.context_tokens)
        if sequence is None:
            self._end(attempt)
            return
        self.admission.forecast.record_ready(now - attempt.reserved_at)
        self.schedule([sequence])

    def schedule(self, committed: abc.Sequence[DecodeSequence] = ()) -> None:
        """Let work go on that waits for slots, pages or the time.

        Called after each event that may change them: a reservation, start, commit or end of an attempt, a cancellation,
        a report of the engine thread, the return of pages, and the timer.
        """
        self._changed()
        self._add_write_backs()
        refused = self._start_sequences(committed)
        self._set_timer()
        for attempt, error in refused:
            self._fail(attempt, FailureKind.ENGINE, f"{attempt.key}: a choice can't be forked: {error}")

    def _add_write_backs(self) -> None:
        """Copy the blocks of sequences that have ended since the last call to the shared cache."""
        for published in self.attempts.take_published():
            self.write_backs.add(published)

    def _start_sequences(
        self, committed: abc.Sequence[DecodeSequence]
    ) -> abc.Sequence[tuple[DecodeAttempt, Exception]]:
        """Give committed sequences, and forks whose turn it is, to the engine thread.

        Returns the attempts whose fork the engine refused, with the errors.
        """
        if self.failed.done():
            return ()
        forked = self.admission.start_forks(self._loop.time())
        if ready := [*committed, *forked.started]:
            self.decode_loop.add(ready)
        return forked.failed

    def _set_timer(self) -> None:
        """Set the timer to the next deadline of an attempt, or to the next time when a fork may start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = min(self.admission.wake_at(self._loop.time()), self.attempts.deadline)
        if not (self.failed.done() or math.isinf(wake_at)):
            # `call_soon`: results that the loop has received by the deadline are handled first, and count.
            self._timer = self._loop.call_at(wake_at, self._loop.call_soon, self._wake)

    def _wake(self) -> None:
        """End attempts whose deadline has passed, and try the forks again."""
        now = self._loop.time()
        for attempt in self.attempts:
            if attempt.life.is_overdue(now):
                failure = attempt.overdue_failure()
                self._fail(attempt, failure.kind, failure.message)
        self.schedule()

    def report(self, report: StepReport) -> None:
        """Send the results of one turn of the engine thread to the routers, as one message for each."""
        now = self._loop.time()
        for sequence in report.joined:
            self.attempts.join(sequence, now)
        for output in report.outputs:
            owner = self.attempts.find_owner(output.id)
            if owner is None:
                continue
            attempt, choice = owner
            attempt.has_output = True
            self.sessions[attempt.session].send(
                attempt.key, Output(choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self.attempts.end_sequence(output.id, now, output.digests)
                self.admission.forecast.record_end(now)
                if self.attempts.is_finished(attempt):
                    self._end(attempt)
        for lost in report.failures:
            if (owner := self.attempts.find_owner(lost.id)) is not None:
                self._fail(owner[0], lost.kind, f"{owner[0].key}: {lost.message}")
        self.load_meter.record(report)
        self.schedule()

    def _cancel(self, session: RouterSession, cancel: Cancel) -> None:
        """End an attempt, one choice of it, or the claim of an attempt that was refused."""
        attempt = self.attempts.get(session.number, cancel.key)
        if attempt is None:
            if self.admission.cancel_claim((session.number, cancel.key)):
                self.schedule()
            return
        if cancel.choice_index is not None:
            now = self._loop.time()
            if dropped := self.attempts.cancel_choice(attempt, cancel.choice_index, now):
                self.decode_loop.drop(dropped)
                self.admission.forecast.record_end(now)
            if not self.attempts.is_finished(attempt):
                self.schedule()
                return
        self._end(attempt)

    def _handle_heartbeat(self, session: RouterSession, heartbeat: Heartbeat) -> None:
        """End the attempts that the router does not list: it has ended them, but its message was lost."""
        for attempt in self.attempts.in_session(session.number):
            if attempt.key not in heartbeat.live:
                _log.warning("%s ends: its router %s does not list it", attempt.key, session.router_id)
                self._end(attempt)

    def _fail(self, attempt: DecodeAttempt, kind: FailureKind, message: str) -> None:
        """End an attempt with a failure, and tell its router. Does nothing if it has ended."""
        if not attempt.life.ended:
            self._end(attempt, Failure(kind, message))

    def _end(self, attempt: DecodeAttempt, failure: Failure | None = None) -> None:
        """End an attempt in any state: tell its router, and free everything that it holds. Idempotent.

        Its final KV is published in the pool, unless the engine has failed.
        """
        now = self._loop.time()
        publish = failure is None or failure.kind is not FailureKind.ENGINE
        if not attempt.life.ended:
            self.sessions[attempt.session].send(attempt.key, failure or Ended())
        self._end_prefix_export(attempt)
        if dropped := self.attempts.end(attempt, now, publish=publish):
            self.decode_loop.drop(dropped)
            self.admission.forecast.record_end(now, len(dropped))
        transfer = self._transfers.get(attempt)
        if transfer is not None and transfer is not asyncio.current_task():
            # `call_soon`, because a task that is cancelled before its first step would never release the export.
            self._loop.call_soon(transfer.cancel)
        self._check_idle()
        self.schedule()

    # The worker as a whole.

    def fail_all(self, kind: FailureKind, message: str) -> None:
        """End all attempts with a failure."""
        for attempt in self.attempts:
            self._fail(attempt, kind, message)

    def fail_engine(self, error: BaseException) -> None:
        """End all attempts because the engine can't go on, and set `failed`."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.refusal = "the worker's engine has failed"
            self.fail_all(FailureKind.ENGINE, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Wait for transfers, exports and write-backs; call it after all sessions and the decode loop have ended."""
        await asyncio.gather(*self._transfers.values(), return_exceptions=True)
        self._exports.close()
        await self._exports.wait_closed()
        await self.write_backs.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _check_idle(self) -> None:
        """Report that the worker is idle, if no attempt is left; called when an attempt or a write-back has ended."""
        if not self.attempts:
            self.idle.set()
            self._on_idle()


class LoadMeter:
    """The load of the worker, measured from the reports of the engine thread, for its status and metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._tokens_per_second = DecayingAverage(_RATE_WEIGHT)

    def record(self, report: StepReport) -> None:
        """Count the results of one turn of the engine thread."""
        self._running = report.running
        metrics.SEQUENCES_PREEMPTED.inc(sum(lost.kind is FailureKind.PREEMPTED for lost in report.failures))
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            self._tokens_per_second.add(tokens / report.seconds)

    def set_page_metrics(self) -> None:
        """Set the page gauges."""
        stats = self._engine.stats()
        for state in ("used", "free", "cached"):
            metrics.PAGES.labels("decode", state).set(getattr(stats, state))

    def status(self, requests_without_token: int) -> WorkerLoad:
        """The load now, given the number of attempts without a token."""
        stats, spec = self._engine.stats(), self._engine.spec
        return WorkerLoad(
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=spec.page_size,
            slots_used=self._running,
            slots_total=spec.slots,
            tokens_per_second=self._tokens_per_second.value,
            requests_without_token=requests_without_token,
        )
