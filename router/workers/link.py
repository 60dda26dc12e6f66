"""One dialled address: its channel, its watch, and what this router has running there.

    run:  dial ── Watch ── status … status ── silence, end or error ── lost ── wait, longer each time ── dial …

A worker is as good as its watch: it tells its status at least every second, so a watch that is silent for
`SILENCE_S` means that the worker is stopped or cut off, and all that runs there fails at once. The same holds for one
that says of itself that it makes no progress: it is lost until it says otherwise. One that drains has left when
its watch ends, and nobody is warned of that.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from typing import Protocol

import grpc

from baton.errors import BatonError, Unavailable
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.rates import DecayingSum
from baton.rpc.channel import control_channel
from baton.rpc.silence import SILENCE_S, SilenceTimer
from baton.rpc.tls import Tls
from baton.worker.prefix_changes import PrefixChange
from baton.worker.servicer import status_from_proto
from baton.worker.status import WorkerRole, WorkerStatus
from router.placement.fleet import RECENT_S, DecodeView, PrefillView
from router.placement.prefix_directory import BlockNamespace
from router.request import Cause
from router.workers.failures import WorkerLoss, WorkerLosses
from router.workers.prefill import PrefillAssignment
from router.workers.session import DecodeSession, SessionEnd

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_SOON_S, _SOON_BACKOFF_S = 20.0, 0.2
"""Seconds for which the successor of a lost worker is expected, and those between two calls meanwhile, at most."""


_UNWANTED = "it is no longer wanted"
_STALLED = "it answers, but makes no progress"

_logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Followers of a worker's events."""

    def update_worker(self, link: WorkerLink) -> None:
        """Its status or its session is another."""

    def update_view(self, link: WorkerLink) -> None:
        """This router has given it something, or taken something back."""

    def update_prefixes(self, link: WorkerLink, change: PrefixChange | None) -> None:
        """It reported which prefixes it holds; None when what it reported before counts no longer."""


class WorkerLink:
    """A worker as the router sees it.

    A worker that is no longer `listed` is kept until its watch ends: name servers drop a worker when it begins to
    drain, while its streams run on.
    """

    def __init__(
        self,
        address: str,
        role: WorkerRole,
        router_id: str,
        observer: Observer,
        losses: WorkerLosses,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self._tls = tls
        self._generation = tls.generation if tls else 0
        self.channel = control_channel(address, tls, role.value)
        self.listed = True
        self.status: WorkerStatus | None = None
        """Latest status; None while the worker is lost."""
        self.namespace: BlockNamespace | None = None
        """The namespace of its blocks; None before its first status."""
        self.session: DecodeSession | None = None
        """The session with an accepted decode worker, while it is open."""
        self._router_id = router_id
        self._observer = observer
        self._sessions: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses = losses
        self._incarnation = ""
        self._assignments: set[PrefillAssignment] = set()
        self._present: dict[PrefillAssignment, str] = {}
        """Requests that the worker computes, or whose KV is fetched from it."""
        self._shared = False
        """Whether requests of other routers without a token were there, by its latest status."""
        self._lost = asyncio.Event()
        self._ending: tuple[str, Cause] | None = None
        self._dispatched = 0
        self._recent = DecayingSum(RECENT_S)
        self._granted_tokens = self._granted_slots = 0
        self._said = ""
        self._left = False
        """Whether it drained before it was lost, and has not come back yet."""

    @property
    def _label(self) -> str:
        return f"{self.role.value} {self.address}"

    @property
    def name(self) -> str:
        """Its name in logs and messages: id and address."""
        return _name(self.status, self.address)

    async def run(self) -> None:
        """Watch the worker until it is lost and no longer listed, or the task is cancelled."""
        loop = asyncio.get_running_loop()
        backoff, lost_at = _FIRST_BACKOFF_S, -_SOON_S
        try:
            while True:
                await self._redial()
                reason = await self._watch()
                if self.status is not None:
                    backoff, lost_at = _FIRST_BACKOFF_S, loop.time()
                self._lose(reason)
                self._observer.update_prefixes(self, None)
                if not self.listed:
                    return
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                soon = loop.time() - lost_at < _SOON_S
                backoff = min(2 * backoff, _SOON_BACKOFF_S if soon else _LONGEST_BACKOFF_S)
        finally:
            self._said = _UNWANTED
            self._lose(_UNWANTED)
            self._observer.update_prefixes(self, None)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.channel.close()

    def accept(self) -> None:
        """Take the worker into service: a decode worker gets a session, again and again while it lasts."""
        self._ending = None
        if self.role is WorkerRole.DECODE and self._sessions is None:
            self._sessions = asyncio.create_task(self._keep_session(), name=f"sessions {self.address}")
            self._tasks.add(self._sessions)
            self._sessions.add_done_callback(self._tasks.discard)

    def dismiss(self) -> None:
        """Take the worker out of service; what runs there fails."""
        if self._sessions is not None:
            self._sessions.cancel()
            self._sessions = None

    def assign(self, tokens: int, cached_tokens: int = 0) -> PrefillAssignment:
        """Count a prompt of `tokens`, of which some are thought to be cached, as being prefilled here.

        It counts until the assignment is closed. Raises Unavailable when the worker is lost.
        """
        if self.status is None:
            raise Unavailable(f"prefill worker {self.address} is lost")
        self._dispatched += 1
        self._recent.add(tokens - cached_tokens, asyncio.get_running_loop().time())
        assignment = PrefillAssignment(self, self.status.identity, tokens, cached_tokens, self._lost)
        self._assignments.add(assignment)
        self._observer.update_view(self)
        return assignment

    def unassign(self, assignment: PrefillAssignment) -> bool:
        """Count a prompt no longer; False if it did not count."""
        if assignment not in self._assignments:
            return False
        self._assignments.discard(assignment)
        self._observer.update_view(self)
        return True

    def attach(self, assignment: PrefillAssignment, request_id: str) -> None:
        """The request is there now, and is a suspect if the worker dies."""
        self._present[assignment] = request_id

    def detach(self, assignment: PrefillAssignment) -> None:
        """The request needs nothing more of the worker."""
        self._present.pop(assignment, None)

    def subtract_room(self, tokens: int, slots: int) -> None:
        """A decode worker has given away room that its latest status can't know of."""
        self._granted_tokens += tokens
        self._granted_slots += slots
        self._observer.update_view(self)

    @property
    def consumer(self) -> str:
        """Audience of KV tickets for this decode worker; "" while it is lost."""
        return "" if self.status is None else self.status.identity.consumer

    @property
    def draining(self) -> bool:
        """Whether it says that it takes no new work."""
        return self.status is not None and self.status.draining

    def prefill_view(self) -> PrefillView | None:
        """Placement's view of a prefill worker; None while it is lost."""
        if self.status is None:
            return None
        return PrefillView(
            name=self.address,
            kv_format=self.status.identity.kv_format,
            draining=self.status.draining,
            pending_tokens=self.status.load.pending_tokens,
            rate=self.status.load.tokens_per_second,
            own_requests=len(self._assignments),
            own_tokens=sum(assignment.tokens - assignment.cached_tokens for assignment in self._assignments),
            dispatched=self._dispatched,
            recent_tokens=self._recent.value(asyncio.get_running_loop().time()),
            incarnation=self._incarnation,
        )

    def decode_view(self) -> DecodeView | None:
        """Placement's view of a decode worker; None while there is no session with it."""
        if self.status is None or self.session is None or not self.session.open:
            return None
        load = self.status.load
        return DecodeView(
            name=self.address,
            kv_format=self.status.identity.kv_format,
            converts_kv=self.status.identity.converts_kv,
            draining=self.status.draining,
            free_tokens=max((load.pages_total - load.pages_used) * load.page_size - self._granted_tokens, 0),
            free_slots=max(load.slots_total - load.slots_used - self._granted_slots, 0),
            own_requests=self.session.attempts,
            incarnation=self._incarnation,
        )

    @property
    def problem(self) -> str:
        """Why the worker is lost; empty while it is not, or was not dialled yet."""
        return self._said

    async def _redial(self) -> None:
        """Make another channel if the TLS files are not those that it was made with."""
        if self._tls is None or self._tls.generation == self._generation:
            return
        self._generation = self._tls.generation
        old, self.channel = self.channel, control_channel(self.address, self._tls, self.role.value)
        await old.close()

    async def _watch(self) -> str:
        """Follow one watch to its end, and say why it ended."""
        call = worker_pb2_grpc.WorkerStub(self.channel).Watch(worker_pb2.WatchRequest())
        silence = SilenceTimer(SILENCE_S, call.cancel)
        try:
            with silence:
                while True:
                    message = await call.read()
                    silence.reset()
                    if message is grpc.aio.EOF:
                        return "ended its watch"
                    status = status_from_proto(message)
                    if self.status and self.status.identity.incarnation != status.identity.incarnation:
                        return "was restarted"
                    if status.prefixes is not None:
                        self._observer.update_prefixes(self, status.prefixes)
                    if status.stalled:
                        self._lose(_STALLED)
                        continue
                    if status.draining and not self.draining:
                        _logger.info("%s worker %s drains", self.role.value, _name(status, self.address))
                    self._update_status(status)
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code().name)
        except BatonError as error:
            return f"sent a status that can't be read: {error}"
        except asyncio.CancelledError:
            if not silence.ended_call():
                raise
            return f"was silent for {SILENCE_S:g} s"
        except Exception as error:
            # It is dialled again; a watch that nobody keeps would leave the worker out for good.
            _logger.exception("a status of %s worker %s can't be handled", self.role.value, self.name)
            return f"sent a status that can't be handled: {type(error).__name__}: {error}"
        finally:
            call.cancel()

    def _update_status(self, status: WorkerStatus) -> None:
        known = self.status.identity if self.status else None
        if known is None or known != status.identity:
            self.namespace = BlockNamespace.of(status.identity)
        else:
            # The same object, so that nobody need compare it again.
            status = replace(status, identity=known)
        self.status, self._incarnation = status, status.identity.incarnation
        self._losses.record_status(self._label, self._incarnation)
        self._granted_tokens = self._granted_slots = 0
        self._shared = status.load.newcomers > self._newcomers()
        self._said, self._left = "", False
        self._observer.update_worker(self)

    def _lose(self, reason: str) -> None:
        self._left = self._left or self.draining
        if reason != self._said:
            if self._left:
                _logger.info("%s worker %s has left: %s", self.role.value, self.name, reason)
            else:
                _logger.warning("can't watch %s worker %s: %s", self.role.value, self.name, reason)
            self._said = reason
        if self.status is None:
            return
        cause = Cause.DRAIN if self.status.draining else Cause.LOST
        self._ending = reason, cause
        loss = self._loss(cause, len(set(self._present.values())))
        for assignment in self._present:
            assignment.loss = loss
        self._present.clear()
        error = Unavailable(f"{self.role.value} worker {self.name}: {reason}")
        self.status = None
        self._lost.set()
        self._lost = asyncio.Event()
        self.dismiss()
        for assignment in list(self._assignments):
            assignment.fail(error, cause)
        self._observer.update_worker(self)

    def _loss(self, cause: Cause, suspects: int) -> WorkerLoss | None:
        if cause is not Cause.LOST:
            return None
        now = asyncio.get_running_loop().time()
        return self._losses.record_loss(self._label, self._incarnation, suspects, now, shared=self._shared)

    def _newcomers(self) -> int:
        """This router's requests that are here and have had no token from the worker."""
        if self.role is WorkerRole.DECODE:
            return self.session.newcomers if self.session else 0
        # An assignment is closed at the first token, and its request stays until the KV is fetched.
        return len(self._assignments & self._present.keys())

    def _on_session_end(self, suspects: int) -> SessionEnd:
        reason, cause = self._ending or ("", Cause.DRAIN if self.draining else Cause.LOST)
        return SessionEnd(reason, cause, self._loss(cause, suspects))

    async def _keep_session(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            session = self.session = DecodeSession(
                self.channel, self.name, self._router_id, lambda: self._observer.update_view(self)
            )
            self._observer.update_worker(self)
            began = asyncio.get_running_loop().time()
            try:
                await session.run(self._on_session_end)
            finally:
                if self.session is session:
                    self.session = None
                    self._observer.update_worker(self)
            if asyncio.get_running_loop().time() - began > _LONGEST_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)


def _name(status: WorkerStatus | None, address: str) -> str:
    return f"{status.identity.worker_id} at {address}" if status else address
