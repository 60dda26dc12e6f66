"""The asyncio side of decode: sessions, reservations, fetches, deadlines, and what the engine thread reports.

    Reserve ── pages taken, or refused, at once
    Start   ── a task fetches the KV ── commit ── sequences go to the loop ── its reports come back as outputs
    Cancel, deadline, failure, end of session, last choice finished ── all through `_end`

An attempt has one timer: until it is started, that of the unused reservation; from then on its deadline.
Everything here runs on the asyncio loop; the engine thread only ever sees plain messages and KV handles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Protocol

import grpc

from baton.config import parse_address
from baton.engine.contract import Engine, KvHandle
from baton.errors import BatonError, ConfigError, EngineError, OutOfPages, SourceUnreachable, TransferError
from baton.request import Handoff
from baton.telemetry import metrics
from baton.worker.progress import Progress
from baton.worker.status import StatusHub, WorkerIdentity, WorkerLoad
from baton.worker.thread import EngineThread
from decode_svc.attempts import Attempt, Attempts, AttemptState, Refused
from decode_svc.channels import KvChannels
from decode_svc.config import DecodeConfig
from decode_svc.loop import DecodeLoop, Report
from decode_svc.messages import Cancel, Command, Failure, FailureKind, Output, Reserve, Reserved, Start
from decode_svc.session import Session

_log = logging.getLogger(__name__)

_RATE_WEIGHT = 0.1


class Fetch(Protocol):
    """What `baton.transfer.fetcher.fetch` does."""

    async def __call__(
        self,
        channel: grpc.aio.Channel,
        engine: Engine,
        handle: KvHandle,
        *,
        transfer_id: str,
        incarnation: str,
        tokens: int,
        timeout_s: float,
        stall_timeout_s: float,
    ) -> Handoff: ...


class DecodeService:
    """All that a decode worker does beside its forward passes."""

    def __init__(self, config: DecodeConfig, engine: Engine, identity: WorkerIdentity, fetch: Fetch) -> None:
        self.status = StatusHub(identity, self._load)
        self.progress = Progress()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self._engine = engine
        self._fetch = fetch
        self.attempts = Attempts(engine)
        self._channels = KvChannels()
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count()
        self._timers: dict[Attempt, asyncio.TimerHandle] = {}
        self._fetches: dict[Attempt, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tokens_per_second = 0.0
        self._last = Report()
        loop = asyncio.get_running_loop()
        self.loop = DecodeLoop(engine, self.progress, lambda report: loop.call_soon_threadsafe(self._reported, report))

    def start(self, thread: EngineThread) -> asyncio.Future[None]:
        """Let the loop turn on the engine thread; the future ends when it has stopped."""
        turning = thread.run(self.loop.run)
        turning.add_done_callback(self._stopped)
        return turning

    def open_session(self, router_id: str) -> Session:
        """A new session, owner of all that comes through it."""
        session = Session(next(self._numbers), router_id)
        self._sessions[session.number] = session
        return session

    def close_session(self, session: Session) -> None:
        """End a session, for whatever reason, and free all that it owned; idempotent."""
        for attempt in self.attempts:
            if attempt.session == session.number:
                self._end(attempt)
        self._sessions.pop(session.number, None)
        session.end()

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

    async def drain(self, grace_s: float) -> None:
        """Refuse new reservations, and return when all attempts have ended; after `grace_s` seconds, end them."""
        self.status.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    async def close(self, turning: asyncio.Future[None]) -> None:
        """End all sessions, stop the loop and wait for everything that was begun."""
        self.status.drain()
        for session in list(self._sessions.values()):
            self.close_session(session)
        self.loop.stop()
        await asyncio.gather(turning, *self._tasks, return_exceptions=True)
        await self._channels.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _reserve(self, session: Session, request: Reserve) -> Reserved:
        if self.status.draining:
            return Reserved(request.key, False, "the worker is draining")
        if self.failed.done():
            return Reserved(request.key, False, "the worker's engine has failed")
        try:
            attempt = self.attempts.reserve(session.number, request)
        except Refused as error:
            return Reserved(request.key, False, str(error), never=True)
        except OutOfPages as error:
            return Reserved(request.key, False, str(error))
        self._idle.clear()
        # It is not the request's deadline that passes here, so another attempt may follow.
        unused = "was reserved but not started in time"
        self._set_timer(attempt, self._config.start_timeout_s, FailureKind.TRANSFER, unused)
        self._load_changed()
        return Reserved(request.key, True)

    def _start(self, session: Session, start: Start) -> None:
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.tell(Failure(start.key, FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.state is not AttemptState.RESERVED:
            return
        self.attempts.start(attempt)
        self._timers.pop(attempt).cancel()
        if start.deadline_s is not None:
            self._set_timer(attempt, start.deadline_s, FailureKind.DEADLINE, "has passed its deadline")
        task = asyncio.create_task(self._fetch_and_decode(attempt, start), name=f"fetch {start.key}")
        self._fetches[attempt] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, session: Session, cancel: Cancel) -> None:
        attempt = self.attempts.get(session.number, cancel.key)
        if attempt is None:
            return
        if cancel.choice_index is not None:
            if dropped := self.attempts.cancel_choice(attempt, cancel.choice_index):
                self.loop.drop(dropped)
            if not self.attempts.over(attempt):
                return
        self._end(attempt)

    async def _fetch_and_decode(self, attempt: Attempt, start: Start) -> None:
        started = time.monotonic()
        try:
            _check_source(start)
            async with self._channels.use(start.source_address) as channel:
                handoff = await self._fetch(
                    channel,
                    self._engine,
                    attempt.handle,
                    transfer_id=start.transfer_id,
                    incarnation=start.source_incarnation,
                    tokens=attempt.request.context_tokens,
                    timeout_s=self._config.fetch_timeout_s,
                    stall_timeout_s=self._config.fetch_stall_s,
                )
            if attempt.state is AttemptState.ENDED:
                return
            now = time.monotonic()
            sequences = self.attempts.commit(attempt, handoff, (now - started) * 1e3, now)
        except BatonError as error:
            self._fail(attempt, _kind(error), str(error))
        except Exception as error:
            _log.exception("fetching %s failed", start.key)
            self._fail(attempt, FailureKind.ENGINE, f"{type(error).__name__}: {error}")
        else:
            self._fetches.pop(attempt)
            if sequences:
                self.loop.add(sequences)
            else:
                self._end(attempt)

    def _reported(self, report: Report) -> None:
        """Pass one turn of the engine thread on to the routers: one message for each."""
        for output in report.outputs:
            owner = self.attempts.owner(output.id)
            if owner is None:
                continue
            attempt, choice = owner
            self._sessions[attempt.session].tell(
                Output(attempt.key, choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self.attempts.sequence_ended(output.id)
                if self.attempts.over(attempt):
                    self._end(attempt)
        for sequence, message in report.failures:
            if (owner := self.attempts.owner(sequence)) is not None:
                self._fail(owner[0], FailureKind.ENGINE, message)
        self._measure(report)

    def _measure(self, report: Report) -> None:
        self._last = report
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            rate = tokens / report.seconds
            before = self._tokens_per_second or rate
            self._tokens_per_second = before + _RATE_WEIGHT * (rate - before)
        self._load_changed()

    def _set_timer(self, attempt: Attempt, seconds: float, kind: FailureKind, what: str) -> None:
        message = f"{attempt.key} {what} ({seconds:g} s)"
        self._timers[attempt] = asyncio.get_running_loop().call_later(seconds, self._fail, attempt, kind, message)

    def _fail(self, attempt: Attempt, kind: FailureKind, message: str) -> None:
        if attempt.state is not AttemptState.ENDED:
            self._sessions[attempt.session].tell(Failure(attempt.key, kind, message))
            self._end(attempt)

    def _fail_all(self, kind: FailureKind, message: str) -> None:
        for attempt in self.attempts:
            self._fail(attempt, kind, message)

    def _end(self, attempt: Attempt) -> None:
        """The one way out: whatever the attempt holds, here or on the engine thread, is given back."""
        if dropped := self.attempts.end(attempt):
            self.loop.drop(dropped)
        if (timer := self._timers.pop(attempt, None)) is not None:
            timer.cancel()
        task = self._fetches.pop(attempt, None)
        if task is not None and task is not asyncio.current_task():
            # A task that is cancelled before its first step would never release the export.
            asyncio.get_running_loop().call_soon(task.cancel)
        if not self.attempts:
            self._idle.set()
        self._load_changed()

    def _stopped(self, turning: asyncio.Future[None]) -> None:
        error = None if turning.cancelled() else turning.exception()
        if error is None or self.failed.done():
            return
        _log.error("the engine thread ended: %s", error)
        self.failed.set_exception(error)
        self._fail_all(FailureKind.ENGINE, f"{type(error).__name__}: {error}")

    def _load_changed(self) -> None:
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
        )


def _check_source(start: Start) -> None:
    """Raise TransferError unless the start names something that can be fetched."""
    if not start.transfer_id:
        raise TransferError(f"{start.key}: transfer_id is empty")
    try:
        parse_address(start.source_address)
    except ConfigError as error:
        raise TransferError(f"{start.key}: source_address {error}") from None


def _kind(error: BatonError) -> FailureKind:
    match error:
        case SourceUnreachable():
            return FailureKind.SOURCE_UNREACHABLE
        case EngineError():
            return FailureKind.ENGINE
    return FailureKind.TRANSFER
