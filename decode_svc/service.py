"""The asyncio side of decode: sessions, reservations, and what the engine thread reports.

    Reserve ── pages taken, or refused, at once
    Start   ── a task fetches the KV ── commit ── sequences go to the loop ── its reports come back as outputs
    Cancel, deadline, failure, end of session, last choice finished ── all through `_end`

What is final of a sequence's KV stays in the pool when it ends, unless the engine has failed, and is copied to the
cache that workers share (`write_backs`), if there is one.

Reservations are refused while the worker drains or has failed, while the batch lacks pages to go on, while the
new sequence would wait for a slot (`admission`), and while there are no pages; all but what can never be come with a
time to try again. Thereby a session can't hold more attempts than there are slots and those that are ahead, and those
whose further choices are pending. These are forked as places come free (`grants`), which is looked at whenever a
sequence or an attempt has ended, pages have returned, or the batch has changed.

Everything here runs on the asyncio loop; the engine thread only ever sees plain messages and KV handles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence

from baton.config.decode import DecodeConfig
from baton.engine.contract import Engine
from baton.errors import BatonError, OutOfPages, Overloaded
from baton.kv.prefix import PrefixCache
from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import State
from baton.request import Handoff
from baton.telemetry import metrics
from baton.transfer.exports import Exports
from baton.worker.audit import IdleAudit, take_ledger
from baton.worker.blocks import Blocks
from baton.worker.caches import Caches
from baton.worker.messages import Output, Reserved
from baton.worker.prefix_news import PrefixNews
from baton.worker.progress import Progress
from baton.worker.status import StatusHub, WorkerIdentity, WorkerLoad
from baton.worker.thread import EngineThread
from decode_svc.admission import Admission
from decode_svc.attempt import Attempt
from decode_svc.attempts import Attempts, context_ids
from decode_svc.claims import RENEW_S
from decode_svc.deadlines import Deadlines
from decode_svc.fetches import Fetch, Fetches
from decode_svc.grants import Grants
from decode_svc.ledger import entries
from decode_svc.load import Load
from decode_svc.loop import DecodeLoop, Report
from decode_svc.messages import Cancel, Command, Failure, FailureKind, Heartbeat, Reserve, Start
from decode_svc.prefixes import PrefixExports
from decode_svc.reservation import Refused, pinnable
from decode_svc.scheduler import Decoding
from decode_svc.session import MAX_ANSWERS, Session
from decode_svc.write_backs import WriteBacks

_log = logging.getLogger(__name__)


class DecodeService:
    """All that a decode worker does beside its forward passes."""

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        identity: WorkerIdentity,
        fetch: Fetch,
        exports: Exports,
        cache: PrefixCache,
    ) -> None:
        self._asyncio = loop = asyncio.get_running_loop()
        self._news = PrefixNews(engine, cache, lambda: self.status.changed())
        self._load = Load(engine)
        self.status = StatusHub(identity, self._status_load, self._news)
        self.progress = Progress()
        self.failed: asyncio.Future[None] = loop.create_future()
        self._config = config
        self._engine = engine
        self._cache = cache
        self._blocks = Blocks(engine, cache)
        self.caches = Caches(engine, cache)
        self._write_backs = WriteBacks(
            engine,
            self._blocks,
            enabled=cache.stores,
            crowded=lambda: self.loop.crowded,
            changed=self._idled,
        )
        self.attempts = Attempts(engine, config.reserve_tokens, self._write_backs.begin, exact=config.fetches_exact)
        self._prefixes = PrefixExports(exports, engine.spec.kv_format.block_size)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count()
        self._deadlines = Deadlines(self._overdue)
        self._fetches = Fetches(fetch, names=self._names, fetched=self._fetched, failed=self._fail)
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_due = False
        self._fork_timer: asyncio.TimerHandle | None = None
        self.loop = DecodeLoop(
            engine,
            self.progress,
            lambda report: loop.call_soon_threadsafe(self._reported, report),
            loop.time,
            self._write_backs.give_up,
        )
        self._grants = Grants(
            engine, self.attempts, Admission(engine.spec.slots, loop.time()), self.loop, self._write_backs.give_up
        )
        self._audit = IdleAudit(self.ledger, lambda: not self.attempts and not self._write_backs, self._broke)
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

    def close_session(self, session: Session, error: BatonError | None = None) -> None:
        """End a session, for whatever reason, and free all that it owned; idempotent."""
        for attempt in self.attempts.of(session.number):
            self._end(attempt)
        if self._sessions.pop(session.number, None) is not None:
            session.end(error)
        self._grants.drop(session.number)

    def handle(self, session: Session, command: Command) -> None:
        """Do what a router says; what makes no sense is answered or ignored, and never ends the session.

        What comes after the session's end is ignored: nobody would free what it takes.
        """
        if session.number not in self._sessions:
            return
        match command:
            case Reserve():
                session.tell(command.key, self._reserve(session, command))
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
        """Refuse new reservations, and return when all attempts have ended and their blocks are stored or dropped.

        What is left after `grace_s` seconds is ended.
        """
        self.status.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
                await self._write_backs.finished()
                await self._cache.flush()
            _log.info("drained")
        except TimeoutError:
            _log.info("drained: %d sequences moved after %g s", self.attempts.sequences, grace_s)
            self._fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    async def ledger(self) -> Ledger:
        """Who holds pages and host memory, and whether the sums are right."""

        def listed() -> list[LedgerEntry]:
            now = self._asyncio.time()
            return [*entries(self.attempts, self._engine, now), *self._write_backs.entries(now)]

        return await take_ledger(self.status.identity, self._engine, listed)

    async def close(self, turning: asyncio.Future[None]) -> None:
        """End all sessions, stop the loop and wait for everything that was begun."""
        self.status.drain()
        for session in list(self._sessions.values()):
            self.close_session(session)
        self._engine.watch_pages(None)
        self._news.close()
        self.loop.stop()
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.gather(self._auditing, return_exceptions=True)
        await asyncio.gather(turning, return_exceptions=True)
        await self._fetches.close()
        await self._prefixes.close()
        await self._write_backs.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _reserve(self, session: Session, request: Reserve) -> Reserved:
        if self.status.draining:
            return Reserved(False, "the worker is draining")
        if self.failed.done():
            return Reserved(False, "the worker's engine has failed")
        now = self._asyncio.time()
        try:
            attempt = self._grants.reserve(session.number, request, now, self._config.start_timeout_s)
        except Refused as error:
            return Reserved(False, str(error), never=True)
        except OutOfPages as error:
            retry_after = min(self._grants.admission.retry_after(now), RENEW_S)
            room = self._grants.room(now)
            return Reserved(False, str(error), retry_after_s=retry_after, room_tokens=room)
        except Overloaded as error:
            retry_after = error.retry_after or self._grants.admission.retry_after(now)
            return Reserved(False, str(error), retry_after_s=retry_after)
        self._idle.clear()
        self._deadlines.set(attempt)
        self._fork()
        self._load_changed()
        cached = attempt.handle.cached
        self.caches.reserved(cached // self._engine.spec.kv_format.block_size, len(pinnable(request)))
        return Reserved(True, cached_tokens=cached)

    def _start(self, session: Session, start: Start) -> None:
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.tell(start.key, Failure(FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.life.state is not State.RESERVED:
            return
        self.attempts.start(attempt, self._asyncio.time(), self._config.fetch_timeout_s, start.deadline_s)
        self._deadlines.set(attempt)
        if start.prefix_transfer_id:
            self._prefixes.begin(attempt, start.prefix_transfer_id)
        self._fetches.begin(attempt, start)

    def _cancel(self, session: Session, cancel: Cancel) -> None:
        attempt = self.attempts.get(session.number, cancel.key)
        if attempt is None:
            return
        if cancel.choice_index is not None:
            now = self._asyncio.time()
            if dropped := self.attempts.cancel_choice(attempt, cancel.choice_index, now):
                self.loop.drop(dropped)
                self._grants.admission.ended(now)
            if not self.attempts.over(attempt):
                self._fork()
                return
        self._end(attempt)

    def _compare(self, session: Session, heartbeat: Heartbeat) -> None:
        """End what the router does not go on with: it was ended there, and the word of it was lost."""
        for attempt in self.attempts.of(session.number):
            if attempt.key not in heartbeat.live:
                _log.warning("%s ends: its router %s does not list it", attempt.key, session.router_id)
                self._end(attempt)

    async def _names(self, attempt: Attempt, handoff: Handoff) -> Sequence[bytes] | None:
        """The digests of the handoff's full blocks, if anybody needs them."""
        if not self.attempts.named(attempt):
            return None
        return await self._blocks.names(context_ids(handoff), attempt.request.cache_salt)

    def _fetched(self, attempt: Attempt, handoff: Handoff, digests: Sequence[bytes] | None, fetch_ms: float) -> None:
        now = self._asyncio.time()
        self._prefixes.end(attempt)
        try:
            sequence = self.attempts.commit(attempt, handoff, fetch_ms, now, digests)
        except OutOfPages as error:
            self._fail(attempt, FailureKind.PREEMPTED, f"{attempt.key}: no page is left to keep the context: {error}")
            return
        metrics.REUSED_TOKENS.inc(attempt.handle.cached)
        if not self._config.fetches_exact:
            metrics.UNSHARED_TOKENS.inc(attempt.request.context_tokens)
        if sequence is None:
            self._end(attempt)
            return
        self._grants.admission.ready(now - attempt.reserved_at)
        self._deadlines.set(attempt)
        self._fork([sequence])

    def _fork(self, sequences: Sequence[Decoding] = ()) -> None:
        """Let these sequences run, and the further choices whose turn it is."""
        if self._fork_timer is not None:
            self._fork_timer.cancel()
            self._fork_timer = None
        if self.failed.done():
            return
        now = self._asyncio.time()
        forked = self._grants.forks(now)
        if sequences := [*sequences, *forked.started]:
            self.loop.add(sequences)
        for broken, error in forked.failed:
            self._fail(broken, FailureKind.ENGINE, f"{broken.key}: a choice can't be forked: {error}")
        # A failure above comes back here by itself, and may have set the timer.
        if self._fork_timer is None and not math.isinf(at := self._grants.wake_at(now)):
            self._fork_timer = self._asyncio.call_at(at, self._fork)

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
            attempt.stepped = True
            self._sessions[attempt.session].tell(
                attempt.key, Output(choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self.attempts.sequence_ended(output.id, now, output.digests)
                self._grants.admission.ended(now)
                if self.attempts.over(attempt):
                    self._end(attempt)
        for lost in report.failures:
            if (owner := self.attempts.owner(lost.id)) is not None:
                self._fail(owner[0], lost.kind, f"{owner[0].key}: {lost.message}")
        self._load.reported(report)
        self._load_changed()
        self._fork()

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
            self._sessions[attempt.session].tell(attempt.key, Failure(kind, message))
            self._end(attempt, sound=kind is not FailureKind.ENGINE)

    def _fail_all(self, kind: FailureKind, message: str) -> None:
        for attempt in self.attempts:
            self._fail(attempt, kind, message)

    def _end(self, attempt: Attempt, *, sound: bool = True) -> None:
        """The one way out: whatever the attempt holds, in whatever state it is, is given back.

        Its KV is left for others if it is `sound`.
        """
        now = self._asyncio.time()
        self._prefixes.end(attempt)
        if dropped := self.attempts.end(attempt, now, sound=sound):
            self.loop.drop(dropped)
            self._grants.admission.ended(now, len(dropped))
        self._deadlines.drop(attempt)
        self._fetches.stop(attempt)
        self._idled()
        self._load_changed()
        self._fork()

    def _idled(self) -> None:
        """The last attempt may have ended, or the last write-back."""
        if not self.attempts:
            self._idle.set()
            self._audit.changed()

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
        if not self._load_due:
            self._load_due = True
            self._asyncio.call_soon_threadsafe(self._returned)

    def _returned(self) -> None:
        self._load_due = False
        self._load_changed()
        self._fork()

    def _status_load(self) -> WorkerLoad:
        return self._load.status(self.loop.paused, self.attempts.forks, self.attempts.newcomers)

    def _load_changed(self) -> None:
        self._load.show_pages()
        self.status.changed()
