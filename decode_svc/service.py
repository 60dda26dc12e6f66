"""The asyncio side of decode: sessions, reservations, and what the engine thread reports.

    Reserve ── pages taken, or refused, at once
    Start   ── a task fetches the KV ── commit ── sequences go to the loop ── its reports come back as outputs
    Cancel, deadline, failure, end of session, last choice finished ── all through `_end`

Reservations are refused while the worker drains or has failed, while the batch lacks pages to go on, while the
new sequences would wait for slots (`admission`), and while there are no pages; all but what can never be come with a
time to try again. Thereby a session can't hold more attempts than there are slots and those that are ahead.

Everything here runs on the asyncio loop; the engine thread only ever sees plain messages and KV handles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from baton.engine.contract import Engine
from baton.errors import Overloaded
from baton.ledger import Ledger
from baton.lifecycle import State
from baton.request import Handoff
from baton.rpc.tls import Tls
from baton.telemetry import metrics
from baton.worker.audit import IdleAudit, take_ledger
from baton.worker.progress import Progress
from baton.worker.status import StatusHub, WorkerIdentity, WorkerLoad
from baton.worker.thread import EngineThread
from decode_svc.admission import Admission
from decode_svc.attempts import Attempt, Attempts, Refused
from decode_svc.config import DecodeConfig
from decode_svc.deadlines import Deadlines
from decode_svc.fetches import Fetch, Fetches
from decode_svc.ledger import entries
from decode_svc.loop import DecodeLoop, Report
from decode_svc.messages import Cancel, Command, Failure, FailureKind, Heartbeat, Output, Reserve, Reserved, Start
from decode_svc.session import MAX_ANSWERS, Session

_log = logging.getLogger(__name__)

_RATE_WEIGHT = 0.1


class DecodeService:
    """All that a decode worker does beside its forward passes."""

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        identity: WorkerIdentity,
        fetch: Fetch,
        tls: Tls | None = None,
    ) -> None:
        self._asyncio = loop = asyncio.get_running_loop()
        self.status = StatusHub(identity, self._load)
        self.progress = Progress()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._config = config
        self._engine = engine
        self.attempts = Attempts(engine, config.reserve_tokens)
        self._admission = Admission(engine.spec.slots, loop.time())
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count()
        self._deadlines = Deadlines(self._overdue)
        consumer = identity.principal or identity.incarnation
        self._fetches = Fetches(config, engine, fetch, consumer, tls, fetched=self._fetched, failed=self._fail)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tokens_per_second = 0.0
        self._last = Report()
        self._news_due = False
        self.loop = DecodeLoop(
            engine, self.progress, lambda report: loop.call_soon_threadsafe(self._reported, report), loop.time
        )
        self._audit = IdleAudit(self.ledger, lambda: not self.attempts, self._broke)
        self._auditing: asyncio.Task[None] | None = None

    def start(self, thread: EngineThread) -> asyncio.Future[None]:
        """Let the loop turn on the engine thread; the future ends when it has stopped."""
        self._engine.watch_pages(self._pages_returned)
        self._auditing = asyncio.create_task(self._audit.run(), name="audit")
        self._auditing.add_done_callback(self._stopped)
        turning = thread.run(self.loop.run)
        turning.add_done_callback(self._stopped)
        return turning

    def open_session(self, router_id: str) -> Session:
        """A new session, owner of all that comes through it."""
        number = next(self._numbers)
        session = Session(number, router_id, lambda: [attempt.key for attempt in self.attempts.of(number)])
        self._sessions[number] = session
        return session

    def close_session(self, session: Session, error: Overloaded | None = None) -> None:
        """End a session, for whatever reason, and free all that it owned; idempotent."""
        for attempt in self.attempts.of(session.number):
            self._end(attempt)
        if self._sessions.pop(session.number, None) is not None:
            session.end(error)

    def handle(self, session: Session, command: Command) -> None:
        """Do what a router says; what makes no sense is answered or ignored, and never ends the session.

        What comes after the session's end is ignored: nobody would free what it takes.
        """
        if session.number not in self._sessions:
            return
        match command:
            case Reserve():
                session.tell(self._reserve(session, command))
            case Start():
                self._start(session, command)
            case Cancel():
                self._cancel(session, command)
            case Heartbeat():
                self._compare(session, command)
        if session.unread > MAX_ANSWERS:
            message = f"{session.unread} answers were not read; at most {MAX_ANSWERS} are kept for a session"
            _log.warning("the session of router %s ends: %s", session.router_id, message)
            self.close_session(session, Overloaded(message))

    async def drain(self, grace_s: float) -> None:
        """Refuse new reservations, and return when all attempts have ended; after `grace_s` seconds, end them."""
        self.status.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
            _log.info("drained")
        except TimeoutError:
            _log.info("drained: %d sequences moved after %g s", self.attempts.sequences, grace_s)
            self._fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    async def ledger(self) -> Ledger:
        """Who holds pages and host memory, and whether the sums are right."""
        return await take_ledger(
            self.status.identity, self._engine, lambda: entries(self.attempts, self._engine, self._asyncio.time())
        )

    async def close(self, turning: asyncio.Future[None]) -> None:
        """End all sessions, stop the loop and wait for everything that was begun."""
        self.status.drain()
        for session in list(self._sessions.values()):
            self.close_session(session)
        self._engine.watch_pages(None)
        self.loop.stop()
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.gather(self._auditing, return_exceptions=True)
        await asyncio.gather(turning, return_exceptions=True)
        await self._fetches.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _reserve(self, session: Session, request: Reserve) -> Reserved:
        if self.status.draining:
            return Reserved(request.key, False, "the worker is draining")
        if self.failed.done():
            return Reserved(request.key, False, "the worker's engine has failed")
        now = self._asyncio.time()
        try:
            self.attempts.check(session.number, request)
            self._check_load(request, now)
            attempt = self.attempts.reserve(session.number, request, now, self._config.start_timeout_s)
        except Refused as error:
            return Reserved(request.key, False, str(error), never=True)
        except Overloaded as error:
            retry_after = error.retry_after or self._admission.retry_after(now)
            return Reserved(request.key, False, str(error), retry_after_s=retry_after)
        self._idle.clear()
        self._deadlines.set(attempt)
        self._load_changed()
        return Reserved(request.key, True)

    def _check_load(self, request: Reserve, now: float) -> None:
        if self.loop.crowded:
            stats = self._engine.stats()
            free = stats.free + stats.cached
            raise Overloaded(
                f"the batch lacks pages, {free} of {stats.total} are free; {self.loop.paused} sequences are paused"
            )
        self._admission.check(self.attempts.sequences, request.choices, now)

    def _start(self, session: Session, start: Start) -> None:
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.tell(Failure(start.key, FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.life.state is not State.RESERVED:
            return
        self.attempts.start(attempt, self._asyncio.time(), self._config.fetch_timeout_s, start.deadline_s)
        self._deadlines.set(attempt)
        self._fetches.begin(attempt, start)

    def _cancel(self, session: Session, cancel: Cancel) -> None:
        attempt = self.attempts.get(session.number, cancel.key)
        if attempt is None:
            return
        if cancel.choice_index is not None:
            now = self._asyncio.time()
            if dropped := self.attempts.cancel_choice(attempt, cancel.choice_index, now):
                self.loop.drop(dropped)
                self._admission.ended(now)
            if not self.attempts.over(attempt):
                return
        self._end(attempt)

    def _compare(self, session: Session, heartbeat: Heartbeat) -> None:
        """End what the router does not go on with: it was ended there, and the word of it was lost."""
        for attempt in self.attempts.of(session.number):
            if attempt.key not in heartbeat.live:
                _log.warning("%s ends: its router %s does not list it", attempt.key, session.router_id)
                self._end(attempt)

    def _fetched(self, attempt: Attempt, handoff: Handoff, fetch_ms: float) -> None:
        now = self._asyncio.time()
        if sequences := self.attempts.commit(attempt, handoff, fetch_ms, now):
            self._admission.ready(now - attempt.reserved_at)
            self._deadlines.set(attempt)
            self.loop.add(sequences)
        else:
            self._end(attempt)

    def _reported(self, report: Report) -> None:
        """Pass one turn of the engine thread on to the routers: one message for each."""
        now = self._asyncio.time()
        for sequence, state in report.moves:
            self.attempts.moved(sequence, state, now)
        for output in report.outputs:
            owner = self.attempts.owner(output.id)
            if owner is None:
                continue
            attempt, choice = owner
            self._sessions[attempt.session].tell(
                Output(attempt.key, choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self.attempts.sequence_ended(output.id, now)
                self._admission.ended(now)
                if self.attempts.over(attempt):
                    self._end(attempt)
        for lost in report.failures:
            if (owner := self.attempts.owner(lost.id)) is not None:
                self._fail(owner[0], lost.kind, f"{owner[0].key}: {lost.message}")
        self._measure(report)

    def _measure(self, report: Report) -> None:
        self._last = report
        metrics.SEQUENCES_PAUSED.inc(sum(state is State.PAUSED for _, state in report.moves))
        metrics.SEQUENCES_RESUMED.inc(report.resumed)
        metrics.SEQUENCES_PREEMPTED.inc(sum(lost.kind is FailureKind.PREEMPTED for lost in report.failures))
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            rate = tokens / report.seconds
            before = self._tokens_per_second or rate
            self._tokens_per_second = before + _RATE_WEIGHT * (rate - before)
        self._load_changed()

    def _overdue(self, attempt: Attempt) -> None:
        life = attempt.life
        if life.of_request():
            given = life.deadline - attempt.reserved_at
            message = f"{attempt.key} was {life.state.value} at its deadline, {given:.3g} s after its reservation"
            self._fail(attempt, FailureKind.DEADLINE, message)
        else:
            message = f"{attempt.key} was still {life.state.value} after {life.deadline - life.since:g} s"
            # It is not the request's deadline that passed, so another attempt may follow.
            self._fail(attempt, FailureKind.TRANSFER, message)

    def _fail(self, attempt: Attempt, kind: FailureKind, message: str) -> None:
        if not attempt.life.ended:
            self._sessions[attempt.session].tell(Failure(attempt.key, kind, message))
            self._end(attempt)

    def _fail_all(self, kind: FailureKind, message: str) -> None:
        for attempt in self.attempts:
            self._fail(attempt, kind, message)

    def _end(self, attempt: Attempt) -> None:
        """The one way out: whatever the attempt holds, in whatever state it is, is given back."""
        now = self._asyncio.time()
        if dropped := self.attempts.end(attempt, now):
            self.loop.drop(dropped)
            self._admission.ended(now, len(dropped))
        self._deadlines.drop(attempt)
        self._fetches.stop(attempt)
        if not self.attempts:
            self._idle.set()
            self._audit.changed()
        self._load_changed()

    def _stopped(self, running: asyncio.Future[None]) -> None:
        """The engine thread, or the audit, has ended."""
        error = None if running.cancelled() else running.exception()
        if error is not None:
            _log.error("the worker can't go on: %s", error)
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """The worker can't go on, and its supervisor is told."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._fail_all(FailureKind.ENGINE, f"{type(error).__name__}: {error}")

    def _pages_returned(self) -> None:
        """Called by whichever thread has given pages back."""
        self.loop.wake()
        if not self._news_due:
            self._news_due = True
            self._asyncio.call_soon_threadsafe(self._load_changed)

    def _load_changed(self) -> None:
        self._news_due = False
        stats = self._engine.stats()
        for state in ("used", "free", "cached"):
            metrics.PAGES.labels("decode", state).set(getattr(stats, state))
        self.status.changed()

    def _load(self) -> WorkerLoad:
        stats, spec = self._engine.stats(), self._engine.spec
        return WorkerLoad(
            waiting=self._last.waiting,
            running=self._last.running,
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=spec.page_size,
            slots_used=self._last.running,
            slots_total=spec.slots,
            tokens_per_second=self._tokens_per_second,
            sequences_paused=self.loop.paused,
        )
