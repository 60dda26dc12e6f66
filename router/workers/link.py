"""The link between a router and one worker: its channel, its watch, its session, and the requests there.

A worker that prefills has assignments, one that decodes has a session, and a mixed worker has both.

    run:  dial ── Watch ── status … status ── silence, end or error ── lost ── wait, longer each time ── dial …

A worker sends its status on the watch at least every second. If the watch is silent for `SILENCE_S` seconds, the worker
is stopped or cut off: it is lost, and all attempts there fail at once. A worker that reports that it makes no progress
is lost too, until it reports progress. A worker that drains gets nothing new, and the router ends its watch when it has
nothing there any more. The worker waits for that, so no message is lost on its way. Such an end, and a later one of a
draining worker, is logged without a warning; until the worker ends, dials find it still draining, and leave again. A
new worker is listed before it listens, since it loads its model first; the log warns if it does not listen for long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import replace
from typing import Protocol

import grpc

from baton.errors import BatonError, Unavailable
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.rates import DecayingSum
from baton.rpc.channel import SILENCE_S, SilenceTimer, control_channel
from baton.rpc.tls import Tls
from baton.worker.status import (
    PrefixChange,
    WorkerRole,
    WorkerStatus,
    status_from_proto,
)
from router.placement.policy import RECENT_S, DecodeView, PrefillView
from router.placement.prefix_directory import BlockNamespace
from router.workers.decode_session import DecodeSession, SessionEnd
from router.workers.failures import Cause, WorkerLosses
from router.workers.prefill_call import PrefillAssignment

_logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_SOON_S, _SOON_BACKOFF_S = 20.0, 0.2
"""Seconds after a loss in which the worker is expected back, and most seconds between two dials meanwhile."""


_LOAD_S = 600.0
"""Seconds that a new worker may load its model before the log warns that it does not listen."""


_UNWANTED = "it is no longer wanted"
_STALLED = "it answers, but makes no progress"
_SILENT = "was silent for"
_DRAINED = "it has drained"


class LinkOwner(Protocol):
    """The pool of a link, which hears of its changes."""

    def update_worker(self, link: WorkerLink) -> None:
        """Handle a new status or session of the worker, or its loss."""

    def update_view(self, link: WorkerLink) -> None:
        """Handle a change of the requests at the worker."""

    def update_prefixes(self, link: WorkerLink, change: PrefixChange) -> None:
        """Record a change of the prefixes that the worker holds."""

    async def forget_prefixes(self, link: WorkerLink) -> None:
        """Forget the prefixes of the worker, which is lost."""


class WorkerLink:
    """The router's link to one worker: channel, watch, session, and the requests there.

    `listed` tells whether discovery still finds the address. A link that is no longer listed is kept until its watch
    ends, because name servers drop a worker when it begins to drain, while its streams go on.
    """

    def __init__(
        self,
        address: str,
        role: WorkerRole,
        router_id: str,
        pool: LinkOwner,
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
        """The latest status; None while the worker is lost."""
        self.namespace: BlockNamespace | None = None
        """The namespace of its blocks; None before its first status."""
        self.session: DecodeSession | None = None
        """The session with an accepted worker that decodes, while it is open."""
        self._router_id = router_id
        self._pool = pool
        self._sessions: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses = losses
        self._incarnation = ""
        self._assignments: set[PrefillAssignment] = set()
        self._suspects: dict[PrefillAssignment, str] = {}
        """Request ids of the assignments whose prompt is computed here, or whose KV is fetched from here."""
        self._has_foreign_suspects = False
        """Whether the latest status counts requests of other routers that have no token yet."""
        self._lost = asyncio.Event()
        self._ending: SessionEnd | None = None
        self._recent = DecayingSum(RECENT_S)
        self._granted_tokens = self._granted_slots = 0
        self.problem = ""
        """The reason why the worker is lost; empty if it is not lost, or was not dialled yet."""
        self._has_drained = False
        """Whether the worker drained before it was lost, and has not come back yet."""
        self._expected_by: float | None = None
        """Time until which a new worker may load its model without a warning; None if it has been seen."""

    @property
    def label(self) -> str:
        """The worker's role and address, by which the router tells workers apart."""
        return f"{self.role.value} {self.address}"

    @property
    def name(self) -> str:
        """The worker's name in logs and errors: id and address."""
        return _name(self.status, self.address)

    async def run(self) -> None:
        """Watch the worker until it is lost and no longer listed, or until cancelled."""
        loop = asyncio.get_running_loop()
        backoff, lost_at = _FIRST_BACKOFF_S, -_SOON_S
        self._expected_by = loop.time() + _LOAD_S
        try:
            while True:
                await self._redial()
                reason = await self._watch()
                if self.status is not None:
                    backoff, lost_at = _FIRST_BACKOFF_S, loop.time()
                self._lose(reason)
                await self._pool.forget_prefixes(self)
                if not self.listed:
                    return
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                soon = loop.time() - lost_at < _SOON_S
                backoff = min(2 * backoff, _SOON_BACKOFF_S if soon else _MAX_BACKOFF_S)
        finally:
            self.problem = _UNWANTED
            self._lose(_UNWANTED)
            await self._pool.forget_prefixes(self)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.channel.close()

    def accept(self) -> None:
        """Take the worker into service. One that decodes gets a session, and a new one whenever that ends."""
        self._ending = None
        if self.role.decodes and self._sessions is None:
            self._sessions = asyncio.create_task(self._keep_session(), name=f"sessions {self.address}")
            self._tasks.add(self._sessions)
            self._sessions.add_done_callback(self._tasks.discard)

    def close_session(self) -> None:
        """Take the worker out of service; attempts in its session fail."""
        if self._sessions is not None:
            self._sessions.cancel()
            self._sessions = None

    def assign(self, tokens: int, cached_tokens: int = 0) -> PrefillAssignment:
        """Count a prompt of `tokens` tokens here until the assignment is released.

        The worker is thought to hold the first `cached_tokens` of them. Raises Unavailable if the worker is lost.
        """
        if self.status is None:
            raise Unavailable(f"{self.role.value} worker {self.address} is lost")
        assignment = PrefillAssignment(self, self.status.identity, tokens, cached_tokens, self._lost)
        self._assignments.add(assignment)
        self._pool.update_view(self)
        return assignment

    def release(self, assignment: PrefillAssignment) -> bool:
        """Stop counting the prompt of an assignment; False if it did not count."""
        if assignment not in self._assignments:
            return False
        self._assignments.discard(assignment)
        self._pool.update_view(self)
        return True

    def add_suspect(self, assignment: PrefillAssignment, request_id: str) -> None:
        """Make the request a suspect if the worker dies: its prompt goes there now."""
        self._suspects[assignment] = request_id
        self._recent.add(assignment.tokens - assignment.cached_tokens, asyncio.get_running_loop().time())

    def remove_suspect(self, assignment: PrefillAssignment) -> None:
        """Make the request no suspect any more: it needs nothing more from the worker."""
        self._suspects.pop(assignment, None)

    def subtract_free(self, tokens: int, slots: int) -> None:
        """Subtract pages of `tokens` tokens and some slots from the free ones until the next status counts them."""
        self._granted_tokens += tokens
        self._granted_slots += slots
        self._pool.update_view(self)

    @property
    def consumer(self) -> str:
        """The audience of KV tickets for this worker; empty while it is lost."""
        return "" if self.status is None else self.status.identity.consumer

    @property
    def fingerprint(self) -> str:
        """The worker's fingerprint; empty while it is lost."""
        return "" if self.status is None else self.status.identity.fingerprint

    @property
    def draining(self) -> bool:
        """Whether the worker reports that it takes no new work."""
        return self.status is not None and self.status.draining

    @property
    def _in_use(self) -> bool:
        """Whether requests of this router are at the worker, or on their way there."""
        in_session = self.session is not None and self.session.open_calls > 0
        return in_session or bool(self._assignments) or bool(self._suspects)

    def prefill_view(self, *, retired: bool) -> PrefillView | None:
        """The view of a worker that prefills for placement; None while it is lost.

        A `retired` worker takes no new requests, because the fleet has moved to another fingerprint.
        """
        if self.status is None:
            return None
        return PrefillView(
            address=self.address,
            kv_format=self.status.identity.kv_format,
            draining=self.status.draining or retired,
            pending_tokens=self.status.load.pending_tokens,
            rate=self.status.load.tokens_per_second,
            open_requests=len(self._assignments),
            open_tokens=sum(assignment.tokens - assignment.cached_tokens for assignment in self._assignments),
            recent_tokens=self._recent.value(asyncio.get_running_loop().time()),
            incarnation=self._incarnation,
            running=self.status.load.slots_used,
        )

    def decode_view(self, *, retired: bool) -> DecodeView | None:
        """The view of a worker that decodes for placement; None while there is no session with it."""
        if self.status is None or self.session is None or not self.session.open:
            return None
        load = self.status.load
        return DecodeView(
            address=self.address,
            kv_format=self.status.identity.kv_format,
            converts_kv=self.status.identity.converts_kv,
            draining=self.status.draining or retired,
            free_tokens=max((load.pages_total - load.pages_used) * load.page_size - self._granted_tokens, 0),
            free_slots=max(load.slots_total - load.slots_used - self._granted_slots, 0),
            open_requests=self.session.open_calls,
            incarnation=self._incarnation,
            slots=load.slots_total,
            step_seconds=load.step_seconds,
            transfer_bytes_per_second=load.transfer_bytes_per_second,
        )

    async def _redial(self) -> None:
        """Make a new channel if the TLS files have changed since the last one was made."""
        if self._tls is None or self._tls.generation == self._generation:
            return
        self._generation = self._tls.generation
        old, self.channel = self.channel, control_channel(self.address, self._tls, self.role.value)
        await old.close()

    async def _watch(self) -> str:
        """Read one watch to its end; returns the reason of the end."""
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
                        self._pool.update_prefixes(self, status.prefixes)
                    if status.stalled:
                        self._lose(_STALLED)
                        continue
                    if status.draining and self.status is None:
                        self._has_drained, self._expected_by = True, None
                        self._losses.record_status(self.label, status.identity.incarnation)
                        return _DRAINED
                    if status.draining and not self.draining:
                        _logger.info("%s worker %s drains", self.role.value, _name(status, self.address))
                    self._update_status(status)
                    if status.draining and not self._in_use:
                        return _DRAINED
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code().name)
        except BatonError as error:
            return f"sent a status that can't be read: {error}"
        except asyncio.CancelledError:
            if not silence.ended_call():
                raise
            return f"{_SILENT} {SILENCE_S:g} s"
        except Exception as error:
            # The worker must be dialled again after any error, or it would stay unused.
            _logger.exception("a status of %s worker %s can't be handled", self.role.value, self.name)
            return f"sent a status that can't be handled: {type(error).__name__}: {error}"
        finally:
            call.cancel()

    def _update_status(self, status: WorkerStatus) -> None:
        known = self.status.identity if self.status else None
        if known is None or known != status.identity:
            self.namespace = BlockNamespace.of(status.identity)
        else:
            # The same object makes later comparisons cheap.
            status = replace(status, identity=known)
        self.status, self._incarnation = status, status.identity.incarnation
        self._losses.record_status(self.label, self._incarnation)
        self._granted_tokens = self._granted_slots = 0
        self._has_foreign_suspects = status.load.requests_without_token > self._requests_without_token()
        self.problem, self._has_drained, self._expected_by = "", False, None
        self._pool.update_worker(self)

    def _lose(self, reason: str) -> None:
        self._has_drained = self._has_drained or self.draining
        if self._expected_by is not None and _is_unreachable(reason):
            self._log_absence(reason)
        elif reason != self.problem:
            if self._has_drained:
                _logger.info("%s worker %s has left: %s", self.role.value, self.name, reason)
            else:
                _logger.warning("can't watch %s worker %s: %s", self.role.value, self.name, reason)
        self.problem = reason
        if self.status is None:
            return
        cause = Cause.DRAIN if self.status.draining else Cause.LOST
        self._ending = self._session_end(reason, cause)
        loss = self._ending.loss
        for assignment in self._suspects:
            assignment.loss = loss
        self._suspects.clear()
        error = Unavailable(f"{self.role.value} worker {self.name}: {reason}")
        self.status = None
        self._lost.set()
        self._lost = asyncio.Event()
        self.close_session()
        for assignment in list(self._assignments):
            assignment.fail(error, cause)
        self._pool.update_worker(self)

    def _log_absence(self, reason: str) -> None:
        """Log once that a new worker does not listen, and warn once if that takes long."""
        if not self.problem:
            _logger.info("%s worker %s does not listen yet: %s", self.role.value, self.name, reason)
        elif self._expected_by is not None and asyncio.get_running_loop().time() > self._expected_by:
            self._expected_by = math.inf
            words = "%s worker %s has not listened for %g s: %s"
            _logger.warning(words, self.role.value, self.name, _LOAD_S, reason)

    def _session_end(self, reason: str, cause: Cause) -> SessionEnd:
        """The end of the session, whose suspects are those of all that ran at the worker.

        A request that a mixed worker prefilled and decoded counts once.
        """
        session = self.session
        without_token = {*self._suspects.values(), *(session.granted_requests(without_token=True) if session else ())}
        suspects = without_token or (session.granted_requests() if session else set())
        loss = None
        if cause is Cause.LOST:
            now, foreign = asyncio.get_running_loop().time(), self._has_foreign_suspects
            loss = self._losses.record_loss(
                self.label, self._incarnation, len(suspects), now, has_foreign_suspects=foreign
            )
        return SessionEnd(reason, cause, loss, all_suspected=not without_token)

    def _requests_without_token(self) -> int:
        """Number of this router's requests here that have no token from the worker yet."""
        decoding = self.session.attempts_without_token if self.session else []
        # An assignment is released at the first token, but its request stays until the KV was fetched.
        prefilling = [name for assignment, name in self._suspects.items() if assignment in self._assignments]
        # A mixed worker counts a request once that it prefills and decodes.
        counted = {name for name, _ in decoding}
        return len(decoding) + sum(name not in counted for name in prefilling)

    def _on_session_end(self) -> SessionEnd:
        return self._ending or self._session_end("", Cause.DRAIN if self.draining else Cause.LOST)

    async def _keep_session(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            session = self.session = DecodeSession(
                self.channel, self.name, self._router_id, lambda: self._pool.update_view(self)
            )
            self._pool.update_worker(self)
            began = asyncio.get_running_loop().time()
            try:
                await session.run(self._on_session_end)
            finally:
                if self.session is session:
                    self.session = None
                    self._pool.update_worker(self)
            if asyncio.get_running_loop().time() - began > _MAX_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF_S)


def _is_unreachable(reason: str) -> bool:
    """Whether no process answers at the address; gRPC says so in words only."""
    return "Failed to connect to remote host" in reason or reason.startswith(_SILENT)


def _name(status: WorkerStatus | None, address: str) -> str:
    return f"{status.identity.worker_id} at {address}" if status else address
