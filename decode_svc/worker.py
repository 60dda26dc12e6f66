"""The decode worker: the life of each attempt from its reservation to its end. All share one generation batch.

    Reserve   `_reserve`           let it wait for a slot and pages, or refuse it at once
              `resume_waiting`     grant it: take pages                                             RESERVED
    Start     `_start`             export its pinned prefix to prefill, and start to fetch its KV   TRANSFERRING
              `_fetch_and_commit`  fetch ─▶ hash and publish blocks ─▶ `_commit`                    TRANSFERRING
              `_commit`            give its first choice to the engine thread (`decode_svc.loop`)   SLOT_WAIT
              `resume_waiting`     give it further choices when slots and pages are free            SLOT_WAIT
              `on_step_report`     send the results of each step to the router                      DECODING
    Cancel, deadline, fault, end of the session, last choice finished ──▶ `_end`                    ENDED

Every attempt ends in `_end`, which frees everything that the attempt holds, in any state. Its final KV stays in the
pool, unless the engine has failed. With a shared cache, the KV is also copied there (`WriteBacks`).

A reservation is refused if it can never be granted, or while the worker drains or has failed. Otherwise it is granted
at once, or its router is told that it waits, and gets a second answer later. Reservations are granted and pending
choices are forked when slots and pages come free: `resume_waiting` asks `decode_svc.admission` after each event.
`decode_svc.attempts` has the pages and states of an attempt.

A sequence's handle is freed, and its final blocks are published, where the sequence ends:

    it finishes or is preempted           engine thread (`DecodeLoop`); publishes
    it fails                              engine thread; publishes nothing
    it is cancelled, or its attempt ends  event loop (`Attempts`); publishes unless the engine has failed

Everything here runs on the asyncio loop; the engine thread gets only plain messages and KV handles. If the engine
thread ends, or the audit of the idle worker finds pages without owner, the worker can't go on. Then `failed` gets the
exception, and the supervisor starts another process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import abc

from baton.config.worker import DecodeConfig
from baton.errors import BatonError, OutOfPages, Overloaded
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from baton.process.executors import EngineThread
from baton.request import Handoff, Output, RemoteExport, ReserveResult, join_ids
from baton.telemetry import metrics
from baton.telemetry.logs import about
from baton.transfer.fetcher import ExportFetcher
from baton.worker.in_place import Computed, InPlaceTransfers, Offer
from baton.worker.prefix_cache import BlockCopier
from baton.worker.start import WorkerParts
from baton.worker.status import WorkerLoad
from decode_svc.admission import Admission, Progress
from decode_svc.attempts import Attempts, DecodeAttempt, ledger_entries
from decode_svc.load_meter import LoadMeter
from decode_svc.loop import DecodeLoop, PromptSource, StepReport
from decode_svc.messages import AttemptKey, Cancel, Command, Ended, Failure, FailureKind, Heartbeat, Reserve, Start
from decode_svc.reservation import ReservationTooLarge
from decode_svc.scheduler import BatchPages
from decode_svc.session import MAX_ANSWERS, MAX_WAITING, RouterSession
from decode_svc.write_backs import WriteBacks

_log = logging.getLogger(__name__)


class DecodeWorker:
    """All sessions and attempts of one worker, and its engine thread; used on the asyncio loop only.

    The worker decodes from `start` on. On a mixed worker, the passes also compute the chunks of `prompts`, and
    `transfers` has the prompts that are computed in pages of its attempts.
    """

    def __init__(
        self,
        config: DecodeConfig,
        parts: WorkerParts,
        fetcher: ExportFetcher,
        *,
        transfers: InPlaceTransfers | None = None,
        prompts: PromptSource | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._config = config
        self._engine = engine = parts.engine
        self._fetcher = fetcher
        self._exports = parts.exports
        self._cache = cache = parts.cache
        self._cache_admin = parts.cache_admin
        self._changed = parts.changed
        self._in_place = transfers
        self._idle = asyncio.Event()
        """Set while there is no attempt."""
        self._idle.set()
        self._blocks = BlockCopier(engine, cache)
        self._load_meter = LoadMeter(engine)
        self._refusal = ""
        """The reason for which all reservations are refused, or an empty string."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Future that gets an exception when the engine can't go on."""
        self.batch_pages = BatchPages()
        self.write_backs = WriteBacks(
            engine, self._blocks, self.batch_pages, enabled=cache.enabled, changed=self._check_idle
        )
        self.attempts = Attempts(engine, self.write_backs.add, shares_kv=not config.convert_kv)
        self.sessions: dict[int, RouterSession] = {}
        self._numbers = itertools.count()
        self._transfers: dict[DecodeAttempt, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.decode_loop = DecodeLoop(
            engine,
            parts.watchdog,
            lambda report: loop.call_soon_threadsafe(self.on_step_report, report),
            loop.time,
            self.write_backs.release_pages,
            self.batch_pages,
            prompts,
        )
        self.admission = Admission(
            engine,
            self.attempts,
            config.reserve_tokens,
            self.batch_pages,
            self.write_backs.release_pages,
            start_limit_s=config.start_timeout_s,
            # Prefill computes the last token of a context, also in pages of an attempt.
            computed_tokens=0 if transfers is None else 1,
        )
        self._audit = parts.audit
        self._audit.add(self)
        self._loop_run: asyncio.Future[None] | None = None
        self._resume_scheduled = False

    def start(self, thread: EngineThread) -> None:
        """Run the decode loop on the engine thread, and an audit whenever the worker is idle."""
        self._engine.watch_pages(self.on_pages_returned)
        self._audit.start()
        self._loop_run = thread.run(self.decode_loop.run)
        self._loop_run.add_done_callback(self._on_stopped)

    def open_session(self, router_id: str) -> RouterSession:
        """Open a session, which will own all attempts that it reserves."""
        number = next(self._numbers)

        def list_live() -> list[AttemptKey]:
            attempts = self.attempts.in_session(number)
            return [*(attempt.key for attempt in attempts), *self.admission.in_session(number)]

        session = self.sessions[number] = RouterSession(number, router_id, list_live)
        return session

    def close_session(self, session: RouterSession, error: BatonError | None = None) -> None:
        """End a session, its attempts and its reservations; idempotent. If there is an error, the router gets it."""
        self.admission.clear(session.number)
        for attempt in self.attempts.in_session(session.number):
            self._end(attempt)
        if self.sessions.pop(session.number, None) is not None:
            session.end(error)
        self.resume_waiting()

    def handle_command(self, session: RouterSession, command: Command) -> None:
        """Handle a router's command.

        Commands after the end of the session are ignored, because nobody would free what they reserve. Raises
        InvalidRequest for a reservation that is malformed, or repeats the key of a live attempt.
        """
        if session.number not in self.sessions:
            return
        match command:
            case Reserve():
                self._reserve(session, command)
            case Start():
                self._start(session, command)
            case Cancel():
                self._cancel(session, command)
            case Heartbeat():
                self._handle_heartbeat(session, command)
        message, waiting = "", len(self.admission.in_session(session.number))
        if session.unread > MAX_ANSWERS:
            message = f"{session.unread} answers were not read; at most {MAX_ANSWERS} are kept for a session"
        elif waiting > MAX_WAITING:
            message = f"{waiting} reservations wait; at most {MAX_WAITING} may wait in a session"
        if message:
            _log.warning("the session of router %s ends: %s", session.router_id, message)
            self.close_session(session, Overloaded(message))

    # An attempt's life.

    def _reserve(self, session: RouterSession, reservation: Reserve) -> None:
        """Let a reservation wait, and grant it if it can be now; or refuse it. Raises InvalidRequest if malformed."""
        if self._refusal:
            session.send(reservation.key, ReserveResult(False, self._refusal))
            return
        try:
            self.admission.register(session.number, reservation, self._loop.time())
        except ReservationTooLarge as error:
            session.send(reservation.key, ReserveResult(False, str(error), too_small=True))
            return
        self.resume_waiting()

    def _answer_granted(self, attempt: DecodeAttempt) -> None:
        """Tell the router of a new attempt that its pages are reserved."""
        self._idle.clear()
        cached_tokens = attempt.handle.cached_tokens
        cached_blocks = cached_tokens // self._engine.spec.kv_format.block_size
        self._cache_admin.record_lookup(cached_blocks, len(attempt.reservation.pinnable_digests))
        answer = ReserveResult(True, cached_tokens=cached_tokens)
        self.sessions[attempt.session_number].send(attempt.key, answer)

    def _start(self, session: RouterSession, start: Start) -> None:
        """Fetch a reserved attempt's KV, and export its pinned blocks to prefill."""
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.send(start.key, Failure(FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.lifecycle.state is not State.RESERVED:
            return
        limit_s = self._config.fetch_limit_s(attempt.reservation.context_tokens)
        self.attempts.start(attempt, self._loop.time(), limit_s, start.deadline_s)
        if start.prefix_transfer_id:
            self._export_prefix(attempt, start.prefix_transfer_id)
        try:
            computing = self._offer_pages(attempt, start.source)
        except BatonError as error:
            self._fail(attempt, FailureKind.of(error), str(error))
        else:
            transfer = self._fetch_and_commit(attempt, start.source, computing)
            self._transfers[attempt] = asyncio.create_task(transfer, name=f"fetch {start.key}")
        self.resume_waiting()

    def _offer_pages(self, attempt: DecodeAttempt, source: RemoteExport) -> asyncio.Future[Computed] | None:
        """Offer the attempt's pages to the prompt that is computed in place; None if its KV comes from elsewhere."""
        if self._in_place is None or source.incarnation != self._exports.incarnation:
            return None
        pinned = attempt.reservation.pinnable_digests[: self.attempts.pinned_blocks(attempt)]
        offer = Offer(attempt.handle, attempt.reservation.context_tokens, pinned[-1] if pinned else b"")
        computing = self._in_place.offer(source.transfer_id, offer)
        attempt.in_place_transfer_id = source.transfer_id
        return computing

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
            _log.warning("%s: its prefix can't be exported: %s", attempt.key, error, extra=about(str(attempt.key)))
            return
        attempt.prefix_transfer_id = transfer_id
        export.commit_prefix(attempt.reservation.pinnable_digests[tokens // self._engine.spec.kv_format.block_size - 1])
        metrics.PREFIX_EXPORTS.inc()

    def _end_prefix_export(self, attempt: DecodeAttempt) -> None:
        if attempt.prefix_transfer_id:
            self._exports.release(attempt.prefix_transfer_id, self._exports.incarnation, "ended with its attempt")

    async def _fetch_and_commit(
        self, attempt: DecodeAttempt, source: RemoteExport, computing: asyncio.Future[Computed] | None
    ) -> None:
        """Fetch an attempt's KV, except the pinned blocks, and commit it. A failure ends the attempt.

        If its prompt is computed in its own pages, this waits for `computing`, and fetches nothing.
        """
        started, digests = self._loop.time(), None
        try:
            if computing is not None:
                computed = await computing
                handoff, digests, fetch_ms = computed.handoff, computed.digests or None, 0.0
            else:
                handoff = await self._fetch(attempt, source)
                fetch_ms = (self._loop.time() - started) * 1e3
            if digests is None and self.attempts.needs_digests(attempt):
                context = join_ids(handoff.prompt_ids, handoff.output_ids)
                digests = await self._blocks.hash_blocks(context, attempt.reservation.cache_salt)
            self.attempts.check_handoff(attempt, handoff, digests or ())
            if digests is not None and self.attempts.may_publish(attempt):
                await self._blocks.publish(attempt.handle, digests)
            # The attempt may have ended while the last frame was written.
            if not attempt.lifecycle.ended:
                self._commit(attempt, handoff, digests, fetch_ms)
        except OutOfPages as error:
            self._fail(attempt, FailureKind.PREEMPTED, f"{attempt.key}: no page is left to keep the context: {error}")
        except BatonError as error:
            self._fail(attempt, FailureKind.of(error), str(error))
        except Exception as error:
            _log.exception("fetching %s failed", attempt.key, extra=about(str(attempt.key)))
            self._fail(attempt, FailureKind.ENGINE, f"{type(error).__name__}: {error}")
        finally:
            del self._transfers[attempt]
            self.resume_waiting()

    async def _fetch(self, attempt: DecodeAttempt, source: RemoteExport) -> Handoff:
        length = attempt.reservation.context_tokens
        missing, limit_s = range(attempt.handle.cached_tokens, length), self._config.fetch_limit_s(length)
        return await self._fetcher.fetch(source, attempt.handle, tokens=missing, length=length, timeout_s=limit_s)

    def _commit(
        self, attempt: DecodeAttempt, handoff: Handoff, digests: abc.Sequence[bytes] | None, fetch_ms: float
    ) -> None:
        """Commit an attempt whose KV is complete: its first choice goes to the engine, further ones become pending."""
        now = self._loop.time()
        self._end_prefix_export(attempt)
        sequence = self.attempts.commit(attempt, handoff, fetch_ms, now, digests)
        metrics.REUSED_TOKENS.inc(attempt.handle.cached_tokens)
        if self._config.convert_kv:
            metrics.UNSHARED_TOKENS.inc(attempt.reservation.context_tokens)
        if sequence is None:
            self._end(attempt)
            return
        self.admission.forecast.record_ready(now - attempt.reserved_at)
        self.decode_loop.add([sequence])

    def resume_waiting(self) -> None:
        """Grant the reservations and make the forks whose turn it is, answer those that wait, and set the timer.

        Called once after each event by which work that waits for slots, pages or the time may go on: a command, the end
        of a transfer, of a session or of a drain, a report of the engine thread, the return of pages, and the timer.
        """
        self._changed()
        progress = Progress()
        if not self.failed.done():
            progress = self.admission.advance(self._loop.time())
            for attempt in progress.granted:
                self._answer_granted(attempt)
            for waiting, answer in progress.answers:
                self.sessions[waiting.session_number].send(waiting.reservation.key, answer)
            if progress.forked:
                self.decode_loop.add(progress.forked)
            for attempt, error in progress.failed:
                self._fail(attempt, FailureKind.ENGINE, f"{attempt.key}: a choice can't be forked: {error}")
            if progress.evicting or progress.failed:
                # There may be more to do.
                self.on_pages_returned()
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer to the next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = min(self.admission.deadline, self.attempts.deadline)
        if not (self.failed.done() or math.isinf(wake_at)):
            # `call_soon`: results that the loop has received by the deadline are handled first, and count.
            self._timer = self._loop.call_at(wake_at, self._loop.call_soon, self._wake)

    def _wake(self) -> None:
        """End attempts whose deadline has passed, and go on with all that waits."""
        now = self._loop.time()
        for attempt in self.attempts:
            if attempt.lifecycle.is_overdue(now):
                failure = attempt.overdue_failure()
                self._fail(attempt, failure.kind, failure.message)
        self.resume_waiting()

    def on_step_report(self, report: StepReport) -> None:
        """Hand a report of the engine thread to the sessions of their routers.

        The engine thread sends each report to the asyncio loop (`call_soon_threadsafe`).
        """
        now = self._loop.time()
        for sequence in report.joined:
            self.attempts.join(sequence, now)
        for output in report.outputs:
            owner = self.attempts.find_owner(output.id)
            if owner is None:
                continue
            attempt, choice = owner
            attempt.has_output = True
            self.sessions[attempt.session_number].send(
                attempt.key, Output(choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self._load_meter.record_sequence(now - attempt.choices[choice].since)
                self.attempts.end_sequence(output.id, now, output.digests)
                self.admission.forecast.record_end(now)
                if self.attempts.is_finished(attempt):
                    self._end(attempt)
        for lost in report.failures:
            if (owner := self.attempts.find_owner(lost.id)) is not None:
                self._fail(owner[0], lost.kind, f"{owner[0].key}: {lost.message}")
        self._load_meter.record(report)
        self.resume_waiting()

    def _cancel(self, session: RouterSession, cancel: Cancel) -> None:
        """End a waiting reservation, an attempt, or one choice of them."""
        attempt, choice = self.attempts.get(session.number, cancel.key), cancel.choice_index
        if attempt is None:
            self.admission.cancel(session.number, cancel.key, choice)
        elif choice is None:
            self._end(attempt)
        else:
            now = self._loop.time()
            if dropped := self.attempts.cancel_choice(attempt, choice, now):
                self.decode_loop.drop(dropped)
                self.admission.forecast.record_end(now)
            if self.attempts.is_finished(attempt):
                self._end(attempt)
        self.resume_waiting()

    def _handle_heartbeat(self, session: RouterSession, heartbeat: Heartbeat) -> None:
        """End reservations and attempts that the router does not list: it has ended them, but its message was lost."""
        for lost in self.admission.in_session(session.number) - heartbeat.live:
            self.admission.cancel(session.number, lost)
        for attempt in self.attempts.in_session(session.number):
            if attempt.key not in heartbeat.live:
                key, router_id = str(attempt.key), session.router_id
                _log.warning("%s ends: its router %s does not list it", key, router_id, extra=about(key))
                self._end(attempt)
        self.resume_waiting()

    def _fail(self, attempt: DecodeAttempt, kind: FailureKind, message: str) -> None:
        """End an attempt with a failure, and tell its router. Does nothing if it has ended."""
        if not attempt.lifecycle.ended:
            self._end(attempt, Failure(kind, message))

    def _end(self, attempt: DecodeAttempt, failure: Failure | None = None) -> None:
        """End an attempt in any state: tell its router, and free everything that it holds. Idempotent.

        Its final KV is published in the pool, unless the engine has failed. The caller must `resume_waiting` when it
        has ended all that it ends, so that nothing is forked for an attempt whose turn to end comes next.
        """
        now = self._loop.time()
        publish = failure is None or failure.kind is not FailureKind.ENGINE
        if not attempt.lifecycle.ended:
            self.sessions[attempt.session_number].send(attempt.key, failure or Ended())
        self._end_prefix_export(attempt)
        if self._in_place is not None and attempt.in_place_transfer_id:
            self._in_place.end(attempt.in_place_transfer_id, "ended with its reservation")
        if dropped := self.attempts.end(attempt, now, publish=publish):
            self.decode_loop.drop(dropped)
            self.admission.forecast.record_end(now, len(dropped))
        transfer = self._transfers.get(attempt)
        if transfer is not None and transfer is not asyncio.current_task():
            # `call_soon`, because a task that is cancelled before its first step would never release the export.
            self._loop.call_soon(transfer.cancel)
        self._check_idle()

    # The worker as a whole.

    def load_report(self) -> WorkerLoad:
        """The worker's load."""
        return self._load_meter.report(self.attempts.requests_without_token, self._fetcher.rate.value)

    def set_gauges(self) -> None:
        """Set the gauges of the worker."""
        self._load_meter.set_gauges(self.attempts.ready_choices, len(self.admission))

    @property
    def idle(self) -> bool:
        """Whether there is no attempt and no write-back."""
        return not self.attempts and not self.write_backs

    def ledger_entries(self) -> list[LedgerEntry]:
        """One entry for each handle."""
        now = self._loop.time()
        return [*ledger_entries(self.attempts, self._engine, now), *self.write_backs.entries(now)]

    def refuse(self) -> None:
        """Refuse all waiting and new reservations."""
        self._refusal = self._refusal or "the worker is draining"
        for waiting in self.admission.clear():
            answer = ReserveResult(False, self._refusal)
            self.sessions[waiting.session_number].send(waiting.reservation.key, answer)

    async def wait_finished(self) -> None:
        """Wait until no attempt or write-back is left; for a drain, after `refuse`."""
        await self._idle.wait()
        await self.write_backs.wait_finished()
        await self._cache.flush()

    def cut_short(self, grace_s: float) -> None:
        """End the attempts that are left after a drain of `grace_s` seconds, so that routers move their sequences."""
        _log.info("drained: %d sequences moved after %g s", self.attempts.held_sequences, grace_s)
        self.fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    def fail_all(self, kind: FailureKind, message: str) -> None:
        """End all attempts with a failure."""
        for attempt in self.attempts:
            self._fail(attempt, kind, message)
        self.resume_waiting()

    def fail_engine(self, error: BaseException) -> None:
        """End all attempts because the engine can't go on, and set `failed`."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._refusal = "the worker's engine has failed"
            self.refuse()
            self.fail_all(FailureKind.ENGINE, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """End all sessions and exports, wait for every thread and task, and free all pages."""
        self.refuse()
        for session in list(self.sessions.values()):
            self.close_session(session)
        self._engine.watch_pages(None)
        self.decode_loop.stop()
        await self._audit.close()
        if self._loop_run is not None:
            await asyncio.gather(self._loop_run, return_exceptions=True)
        await asyncio.gather(*self._transfers.values(), return_exceptions=True)
        self._exports.close()
        await self._exports.wait_closed()
        await self.write_backs.close()
        if not self.failed.cancel():
            self.failed.exception()

    def on_pages_returned(self) -> None:
        """Called when pages have returned to the pool, from any thread."""
        if not self._resume_scheduled:
            self._resume_scheduled = True
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._resume_scheduled = False
        self.resume_waiting()

    def _on_stopped(self, running: asyncio.Future[None]) -> None:
        """Called when the engine thread has ended."""
        error = None if running.cancelled() else running.exception()
        if error is not None:
            _log.error("the worker can't continue: %s", error)
            self._audit.fail(error)

    def _check_idle(self) -> None:
        """Note that the worker is idle, if no attempt is left; called when an attempt or a write-back has ended."""
        if not self.attempts:
            self._idle.set()
            self._audit.notify()
