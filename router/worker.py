"""One dialled address: its channel, its watch, and what this router has running there.

    run:  dial ── Watch ── status … status ── silence, end or error ── lost ── wait, longer each time ── dial …

A worker is as good as its watch: it tells its status at least every second, so a watch that is silent for
`SILENCE_S` means that the worker is stopped or cut off, and all that runs there fails at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc

from baton.errors import BatonError, Unavailable
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.rpc.channel import control_channel
from baton.worker.servicer import status_from_proto
from baton.worker.status import WorkerIdentity, WorkerRole, WorkerStatus
from router.discovery import complete
from router.events import Blame, Deliver, Failed
from router.policy import DecodeView, PrefillView
from router.session import DecodeSession

SILENCE_S = 5.0

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0

_UNWANTED = "it is no longer wanted"

_logger = logging.getLogger(__name__)


class WorkerLink:
    """A worker as the router sees it; `changed` is called after every change of status or session.

    A worker that is no longer `listed` is kept until its watch ends: name servers drop a worker when it begins to
    drain, while its streams run on.
    """

    def __init__(self, address: str, role: WorkerRole, router_id: str, changed: Callable[[], None]) -> None:
        self.address = address
        self.role = role
        self.channel = control_channel(address)
        self.listed = True
        self.status: WorkerStatus | None = None
        """Latest status; None while the worker is lost."""
        self.session: DecodeSession | None = None
        """The session with an accepted decode worker, while it is open."""
        self._router_id = router_id
        self._changed = changed
        self._sessions: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats: set[Seat] = set()
        self._dispatched = 0
        self._said = ""

    @property
    def name(self) -> str:
        """What logs and messages call it: its id and address."""
        return f"{self.status.identity.worker_id} at {self.address}" if self.status else self.address

    async def run(self) -> None:
        """Watch the worker until it is lost and no longer listed, or the task is cancelled."""
        backoff = _FIRST_BACKOFF_S
        try:
            while True:
                reason = await self._watch()
                if self.status is not None:
                    backoff = _FIRST_BACKOFF_S
                self._lose(reason)
                if not self.listed:
                    return
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
        finally:
            self._said = _UNWANTED
            self._lose(_UNWANTED)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.channel.close()

    def accept(self) -> None:
        """Take the worker into service: a decode worker gets a session, again and again while it lasts."""
        if self.role is WorkerRole.DECODE and self._sessions is None:
            self._sessions = asyncio.create_task(self._keep_session(), name=f"sessions {self.address}")
            self._tasks.add(self._sessions)
            self._sessions.add_done_callback(self._tasks.discard)

    def dismiss(self) -> None:
        """Take the worker out of service; what runs there fails."""
        if self._sessions is not None:
            self._sessions.cancel()
            self._sessions = None

    def seat(self, tokens: int) -> Seat:
        """Count a prompt of `tokens` as being prefilled here, until the seat is released.

        Raises Unavailable when the worker is lost.
        """
        if self.status is None:
            raise Unavailable(f"prefill worker {self.address} is lost")
        self._dispatched += 1
        return Seat(self._seats, self, self.status.identity, tokens)

    def prefill_view(self) -> PrefillView | None:
        """What placement may know of a prefill worker; None while it is lost."""
        if self.status is None:
            return None
        return PrefillView(
            name=self.address,
            kv_format=self.status.identity.kv_format,
            draining=self.status.draining,
            pending_tokens=self.status.load.pending_tokens,
            rate=self.status.load.tokens_per_second,
            own_requests=len(self._seats),
            own_tokens=sum(seat.tokens for seat in self._seats),
            dispatched=self._dispatched,
        )

    def decode_view(self) -> DecodeView | None:
        """What placement may know of a decode worker; None while there is no session with it."""
        if self.status is None or self.session is None or not self.session.open:
            return None
        load = self.status.load
        return DecodeView(
            name=self.address,
            kv_format=self.status.identity.kv_format,
            converts_kv=self.status.identity.converts_kv,
            draining=self.status.draining,
            free_tokens=(load.pages_total - load.pages_used) * load.page_size,
            free_slots=load.slots_total - load.slots_used,
            own_requests=self.session.attempts,
        )

    async def _watch(self) -> str:
        """Follow one watch to its end, and say why it ended."""
        call = worker_pb2_grpc.WorkerStub(self.channel).Watch(worker_pb2.WatchRequest())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return "ended its watch"
                status = status_from_proto(message)
                if self.status and self.status.identity.incarnation != status.identity.incarnation:
                    return "was restarted"
                self.status = status
                self._said = ""
                self._changed()
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code().name)
        except BatonError as error:
            return f"sent a status that can't be read: {error}"
        except TimeoutError:
            return f"was silent for {SILENCE_S:g} s"
        finally:
            call.cancel()

    def _lose(self, reason: str) -> None:
        if reason != self._said:
            _logger.warning("no watch of worker %s: %s", self.name, reason)
            self._said = reason
        if self.status is None:
            return
        error = Unavailable(f"{self.role.value} worker {self.name}: {reason}")
        self.status = None
        self.dismiss()
        for seat in list(self._seats):
            seat.fail(error)
        self._changed()

    async def _keep_session(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            self.session = DecodeSession(self.channel, self.name, self._router_id)
            self._changed()
            began = asyncio.get_running_loop().time()
            try:
                await self.session.run()
            finally:
                self.session = None
                self._changed()
            if asyncio.get_running_loop().time() - began > _LONGEST_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LONGEST_BACKOFF_S)


class Seat:
    """A request's place among those that a prefill worker has of this router."""

    def __init__(self, seats: set[Seat], link: WorkerLink, identity: WorkerIdentity, tokens: int) -> None:
        self.link = link
        self.tokens = tokens
        self.kv_address = complete(identity.shards[0].kv_address, link.address)
        """Where decode workers reach the worker's KV."""
        self.incarnation = identity.incarnation
        self._seats = seats
        self._deliver: Deliver | None = None
        self._lost: Failed | None = None
        seats.add(self)

    def watch(self, deliver: Deliver) -> None:
        """Have the worker's loss delivered until the seat is released."""
        self._deliver = deliver
        if self._lost is not None:
            deliver(self._lost)

    def fail(self, error: BatonError) -> None:
        """The worker is lost."""
        self._lost = Failed(error, Blame.PREFILL)
        if self._deliver is not None:
            self._deliver(self._lost)

    def release(self) -> bool:
        """Give the seat up; False if it was given up before."""
        if self not in self._seats:
            return False
        self._seats.discard(self)
        return True
