"""The decode worker: each attempt's life, from its reservation to its end; one generation batch for all of them.

    Reserve   `_reserve`    pages taken, or refused, at once                                     RESERVED
    Start     `_start`      its pinned prefix is exported for prefill, its KV is being fetched   TRANSFERRING
              `_transfer`   fetch ─▶ name blocks ─▶ `_commit`                                    SLOT_WAIT
              `_run`        sequences go to the engine thread (`decode_svc.loop`), which decodes
              `report`      what its steps yield goes to the routers                             DECODING ⇄ PAUSED
    Cancel, deadline, fault, end of the session, last choice finished ──▶ `_end`                 ENDED

`_end` is the one way out: whatever an attempt holds, in whatever state it is, is given back there, at once. What is
final of its KV stays in the pool, unless the engine has failed, and is copied to the cache that workers share
(`decode_svc.write_backs`), if there is one.

Reservations are refused while the worker drains or has failed, while the batch lacks pages to go on, while the new
sequence would wait for a slot, and while there are no pages (`decode_svc.admission`); all but what can never be come
with a time to try again. So a session can't hold more attempts than there are slots and those that are ahead, and those
whose further choices are pending. These are forked as places come free, which is looked at whenever a sequence or an
attempt has ended, pages have returned, or the batch has changed.

Everything here runs on the asyncio loop; the engine thread only ever sees plain messages and KV handles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import abc
from typing import Protocol

from baton.config.decode import DecodeConfig
from baton.engine.contract import Engine, KvHandle
from baton.errors import BatonError, EngineError, OutOfPages, Overloaded, SourceUnreachable
from baton.kv.prefix import PrefixCache
from baton.lifecycle import State
from baton.request import Handoff
from baton.telemetry import metrics
from baton.transfer.export import Export
from baton.transfer.exports import Exports
from baton.transfer.remote import RemoteExport
from baton.worker.blocks import Blocks
from baton.worker.caches import Caches
from baton.worker.messages import Output, Reserved
from baton.worker.progress import Progress
from decode_svc.admission import Admission, SlotForecast
from decode_svc.attempts import Attempts, context_ids
from decode_svc.claims import RENEW_S
from decode_svc.deadlines import Deadlines
from decode_svc.load import Load
from decode_svc.loop import DecodeLoop, Report
from decode_svc.messages import Cancel, Command, Failure, FailureKind, Heartbeat, Reserve, Start
from decode_svc.sequence import Attempt, Refused, Sequence, pinnable
from decode_svc.session import MAX_ANSWERS, Session
from decode_svc.write_backs import WriteBacks

_log = logging.getLogger(__name__)


class Fetch(Protocol):
    """Pulls tokens `[first, tokens)` of an export into the handle; raises TransferError if they do not all arrive."""

    async def __call__(self, source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff: ...


class DecodeWorker:
    """All sessions and attempts of one worker.

    `changed` is called when its load is another, `idled` when nothing may be left.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        fetch: Fetch,
        exports: Exports,
        cache: PrefixCache,
        caches: Caches,
        progress: Progress,
        changed: abc.Callable[[], None],
        idled: abc.Callable[[], None],
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._config = config
        self._engine = engine
        self._fetch = fetch
        self._exports = exports
        self._caches = caches
        self._changed, self._on_idle = changed, idled
        self.idle = asyncio.Event()
        """Set while there is no attempt."""
        self.idle.set()
        self._blocks = Blocks(engine, cache)
        self.load = Load(engine)
        self.refusal = ""
        """Why nothing is reserved any more."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Gets an exception when the engine can't go on."""
        self.write_backs = WriteBacks(
            engine,
            self._blocks,
            enabled=cache.stores,
            short_of_pages=lambda: self.loop.short_of_pages,
            changed=self._idled,
        )
        self.attempts = Attempts(engine, config.reserve_tokens, self.write_backs.begin, exact=config.fetches_exact)
        self.sessions: dict[int, Session] = {}
        self._numbers = itertools.count()
        self._deadlines = Deadlines(self._overdue)
        self._transfers: dict[Attempt, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefix_exports: dict[Attempt, Export] = {}
        self._fork_timer: asyncio.TimerHandle | None = None
        self.loop = DecodeLoop(
            engine,
            progress,
            lambda report: loop.call_soon_threadsafe(self.report, report),
            loop.time,
            self.write_backs.give_up,
        )
        forecast = SlotForecast(engine.spec.slots, loop.time())
        self.admission = Admission(engine, self.attempts, forecast, self.loop, self.write_backs.give_up)

    def open_session(self, router_id: str) -> Session:
        """A new session, owner of all that comes through it."""
        number = next(self._numbers)
        session = Session(number, router_id, lambda: [attempt.key for attempt in self.attempts.of(number)])
        self.sessions[number] = session
        return session

    def close_session(self, session: Session, error: BatonError | None = None) -> None:
        """End a session, for whatever reason, and free all that it owned; idempotent."""
        for attempt in self.attempts.of(session.number):
            self._end(attempt)
        if self.sessions.pop(session.number, None) is not None:
            session.end(error)
        self.admission.drop(session.number)

    def handle(self, session: Session, command: Command) -> None:
        """Do what a router says; what makes no sense is answered or ignored, and never ends the session.

        What comes after the session's end is ignored: nobody would free what it takes.
        """
        if session.number not in self.sessions:
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

    # An attempt's life.

    def _reserve(self, session: Session, request: Reserve) -> Reserved:
        """Take an attempt's pages, or say why not."""
        if self.refusal:
            return Reserved(False, self.refusal)
        now, forecast = self._loop.time(), self.admission.forecast
        try:
            attempt = self.admission.reserve(session.number, request, now, self._config.start_timeout_s)
        except Refused as error:
            return Reserved(False, str(error), never=True)
        except OutOfPages as error:
            retry_after_s = min(forecast.retry_after(now), RENEW_S)
            room = self.admission.room(now)
            return Reserved(False, str(error), retry_after_s=retry_after_s, room_tokens=room)
        except Overloaded as error:
            return Reserved(False, str(error), retry_after_s=error.retry_after or forecast.retry_after(now))
        self.idle.clear()
        self._deadlines.set(attempt)
        self._run()
        self._changed()
        cached = attempt.handle.cached
        self._caches.reserved(cached // self._engine.spec.kv_format.block_size, len(pinnable(request)))
        return Reserved(True, cached_tokens=cached)

    def _start(self, session: Session, start: Start) -> None:
        """Fetch a reserved attempt's KV, and let prefill fetch what it has pinned."""
        attempt = self.attempts.get(session.number, start.key)
        if attempt is None:
            session.tell(start.key, Failure(FailureKind.TRANSFER, f"nothing is reserved for {start.key}"))
            return
        if attempt.life.state is not State.RESERVED:
            return
        self.attempts.start(attempt, self._loop.time(), self._config.fetch_timeout_s, start.deadline_s)
        self._deadlines.set(attempt)
        if start.prefix_transfer_id:
            self._export_prefix(attempt, start.prefix_transfer_id)
        task = asyncio.create_task(self._transfer(attempt, start.source), name=f"fetch {start.key}")
        self._transfers[attempt] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _export_prefix(self, attempt: Attempt, transfer_id: str) -> None:
        """Let prefill fetch what the attempt has pinned. Without it prefill computes: a failure here fails nothing.

        The pinned tokens are final, so the export is committed at once, and hands nothing over. The pages are the
        attempt's own: the export ends before its handle is freed.
        """
        tokens = attempt.handle.cached
        if not tokens:
            # A fetch that is here already, or on its way, need not wait for what never comes.
            self._exports.release(transfer_id, self._exports.incarnation, "has nothing to export")
            return

        def closed() -> None:
            del self._prefix_exports[attempt]

        try:
            export = self._exports.open(transfer_id, attempt.handle, tokens, on_closed=closed)
        except BatonError as error:
            _log.warning("%s: its prefix can't be exported: %s", attempt.key, error)
            return
        self._prefix_exports[attempt] = export
        export.commit_prefix(pinnable(attempt.request)[tokens // self._engine.spec.kv_format.block_size - 1])
        metrics.PREFIX_EXPORTS.inc()

    def _end_prefix_export(self, attempt: Attempt) -> None:
        if (export := self._prefix_exports.get(attempt)) is not None:
            export.end("ended with its attempt")

    async def _transfer(self, attempt: Attempt, source: RemoteExport) -> None:
        """Fetch an attempt's KV, but for what it has pinned, and commit it. A failure ends the attempt."""
        started, tokens = self._loop.time(), attempt.request.context_tokens
        try:
            handoff = await self._fetch(source, attempt.handle, tokens=tokens, first=attempt.handle.cached)
            digests = None
            if self.attempts.needs_names(attempt):
                digests = await self._blocks.names(context_ids(handoff), attempt.request.cache_salt)
            # It may have ended while the last frame was being written.
            if not attempt.life.ended:
                self._commit(attempt, handoff, digests, (self._loop.time() - started) * 1e3)
        except OutOfPages as error:
            self._fail(attempt, FailureKind.PREEMPTED, f"{attempt.key}: no page is left to keep the context: {error}")
        except BatonError as error:
            self._fail(attempt, _kind(error), str(error))
        except Exception as error:
            _log.exception("fetching %s failed", attempt.key)
            self._fail(attempt, FailureKind.ENGINE, f"{type(error).__name__}: {error}")
        finally:
            self._transfers.pop(attempt, None)

    def _commit(self, attempt: Attempt, handoff: Handoff, digests: abc.Sequence[bytes] | None, fetch_ms: float) -> None:
        """All KV is there: the first choice that goes on runs, further ones wait to be forked."""
        now = self._loop.time()
        self._end_prefix_export(attempt)
        sequence = self.attempts.commit(attempt, handoff, fetch_ms, now, digests)
        metrics.REUSED_TOKENS.inc(attempt.handle.cached)
        if not self._config.fetches_exact:
            metrics.UNSHARED_TOKENS.inc(attempt.request.context_tokens)
        if sequence is None:
            self._end(attempt)
            return
        self.admission.forecast.ready(now - attempt.reserved_at)
        self._deadlines.set(attempt)
        self._run([sequence])

    def _run(self, committed: abc.Sequence[Sequence] = ()) -> None:
        """Let these sequences decode, and the further choices whose turn it is."""
        if self._fork_timer is not None:
            self._fork_timer.cancel()
            self._fork_timer = None
        if self.failed.done():
            return
        now = self._loop.time()
        forked = self.admission.forks(now)
        if ready := [*committed, *forked.started]:
            self.loop.add(ready)
        for broken, error in forked.failed:
            self._fail(broken, FailureKind.ENGINE, f"{broken.key}: a choice can't be forked: {error}")
        # A failure above comes back here by itself, and may have set the timer.
        if self._fork_timer is None and not math.isinf(at := self.admission.wake_at(now)):
            self._fork_timer = self._loop.call_at(at, self._run)

    def report(self, report: Report) -> None:
        """Pass one turn of the engine thread on to the routers: one message for each."""
        now = self._loop.time()
        for sequence, state in report.states:
            self.attempts.set_state(sequence, state, now)
        for output in report.outputs:
            owner = self.attempts.owner(output.id)
            if owner is None:
                continue
            attempt, choice = owner
            attempt.stepped = True
            self.sessions[attempt.session].tell(
                attempt.key, Output(choice, output.output_index, output.tokens, output.finish, output.timings)
            )
            if output.finish is not None:
                self.attempts.sequence_ended(output.id, now, output.digests)
                self.admission.forecast.ended(now)
                if self.attempts.is_over(attempt):
                    self._end(attempt)
        for lost in report.failures:
            if (owner := self.attempts.owner(lost.id)) is not None:
                self._fail(owner[0], lost.kind, f"{owner[0].key}: {lost.message}")
        self.load.reported(report)
        self._changed()
        self._run()

    def _cancel(self, session: Session, cancel: Cancel) -> None:
        """End an attempt, or one choice of it."""
        attempt = self.attempts.get(session.number, cancel.key)
        if attempt is None:
            return
        if cancel.choice_index is not None:
            now = self._loop.time()
            if dropped := self.attempts.cancel_choice(attempt, cancel.choice_index, now):
                self.loop.drop(dropped)
                self.admission.forecast.ended(now)
            if not self.attempts.is_over(attempt):
                self._run()
                return
        self._end(attempt)

    def _compare(self, session: Session, heartbeat: Heartbeat) -> None:
        """End what the router does not go on with: it was ended there, and the word of it was lost."""
        for attempt in self.attempts.of(session.number):
            if attempt.key not in heartbeat.live:
                _log.warning("%s ends: its router %s does not list it", attempt.key, session.router_id)
                self._end(attempt)

    def _overdue(self, attempt: Attempt) -> None:
        """An attempt has been in its state for too long."""
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
        """End an attempt with a fault, and tell its router; nothing if it has ended."""
        if not attempt.life.ended:
            self.sessions[attempt.session].tell(attempt.key, Failure(kind, message))
            self._end(attempt, publish=kind is not FailureKind.ENGINE)

    def _end(self, attempt: Attempt, *, publish: bool = True) -> None:
        """Give back all that an attempt holds, in whatever state it is, once.

        What is final of its KV is left for others, unless `publish` is False.
        """
        now = self._loop.time()
        self._end_prefix_export(attempt)
        if dropped := self.attempts.end(attempt, now, publish=publish):
            self.loop.drop(dropped)
            self.admission.forecast.ended(now, len(dropped))
        self._deadlines.drop(attempt)
        transfer = self._transfers.pop(attempt, None)
        if transfer is not None and transfer is not asyncio.current_task():
            # A task that is cancelled before its first step would never release the export.
            self._loop.call_soon(transfer.cancel)
        self._idled()
        self._changed()
        self._run()

    # The worker as a whole.

    def fail_all(self, kind: FailureKind, message: str) -> None:
        """End all attempts with a fault."""
        for attempt in self.attempts:
            self._fail(attempt, kind, message)

    def break_down(self, error: BaseException) -> None:
        """The engine can't go on: end all attempts, and tell whoever runs this worker."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.refusal = "the worker's engine has failed"
            self.fail_all(FailureKind.ENGINE, f"{type(error).__name__}: {error}")

    def use_returned_pages(self) -> None:
        """Pages have come free: what waits for them may go on."""
        self._changed()
        self._run()

    async def close(self) -> None:
        """End all sessions and wait for everything that was begun, once the loop has stopped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._exports.close()
        await self._exports.drained()
        await self.write_backs.close()
        if not self.failed.cancel():
            self.failed.exception()

    def _idled(self) -> None:
        """The last attempt may have ended, or the last write-back."""
        if not self.attempts:
            self.idle.set()
            self._on_idle()


def _kind(error: BatonError) -> FailureKind:
    match error:
        case SourceUnreachable():
            return FailureKind.SOURCE_UNREACHABLE
        case EngineError():
            return FailureKind.ENGINE
    return FailureKind.TRANSFER
