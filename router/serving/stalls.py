"""Ends streams whose clients take nothing.

A front end writes until the client's flow-control window is full, and then the write waits until the client reads.
Keepalive does not help: a client that reads nothing still answers pings. So each item has a bound, from when the front
end has it until it asks for the next one. It is short while the router drains and the request is generated: only the
client could then hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from baton.errors import DeadlineExceeded
from baton.telemetry.metrics import CLIENTS_STALLED

DRAIN_LIMIT_S = 5.0

_TICK_S = 1.0
_LATE_S = 0.5

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class ClientStream(Generic[T]):
    """What one client is sent, item by item; asking for an item tells that the client has taken the one before.

    `take` makes the items and raises StopAsyncIteration after the last; `generated` tells whether all output is there.
    """

    def __init__(
        self,
        guard: StallGuard,
        take: Callable[[], Awaitable[T]],
        generated: Callable[[], bool],
        ending: asyncio.Timeout,
    ) -> None:
        self._guard = guard
        self._take = take
        self.generated = generated
        self.ending = ending

    def __aiter__(self) -> ClientStream[T]:
        return self

    async def __anext__(self) -> T:
        self._guard.writing.pop(self, None)
        item = await self._take()
        self._guard.writing[self] = self._guard.now()
        return item


class StallGuard:
    """Watches all streams to clients, which may take `limit_s` seconds for each item."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.draining = False
        self.writing: dict[ClientStream[Any], float] = {}
        """Streams that wait for their clients, the longest first, and since when."""
        self.now = asyncio.get_running_loop().time

    @contextlib.asynccontextmanager
    async def stream(
        self, take: Callable[[], Awaitable[T]], generated: Callable[[], bool]
    ) -> AsyncIterator[ClientStream[T]]:
        """A stream, which is ended by DeadlineExceeded when its client takes nothing for too long."""
        try:
            async with asyncio.timeout(None) as ending:
                stream = ClientStream(self, take, generated, ending)
                try:
                    yield stream
                finally:
                    self.writing.pop(stream, None)
        except TimeoutError:
            if not ending.expired():
                raise
            CLIENTS_STALLED.inc()
            problem = f"the client took none of its waiting output for {self.limit_s:g} s"
            if self.draining:
                problem = "the router drains, and the client took none of its waiting output"
            raise DeadlineExceeded(f"client_stall_s: {problem}") from None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Judge the streams until the block ends."""
        watching = asyncio.create_task(self._watch(), name="client stalls")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        tick_s = min(_TICK_S, self.limit_s / 2)
        while True:
            due = self.now() + tick_s
            await asyncio.sleep(tick_s)
            now = self.now()
            if now > due + _LATE_S:
                # This process was paused or busy, and has not yet noticed what clients took meanwhile.
                continue
            for stream in self._overdue(now):
                self._end(stream, now)

    def _end(self, stream: ClientStream[Any], now: float) -> None:
        # A stream is ended once: its write may take a while to notice, and a timeout that has fired can't be set again.
        del self.writing[stream]
        try:
            stream.ending.reschedule(now)
        except Exception:
            _logger.exception("a stream whose client takes nothing could not be ended")

    def _overdue(self, now: float) -> list[ClientStream[Any]]:
        short_s = min(self.limit_s, DRAIN_LIMIT_S)
        found = []
        for stream, since in self.writing.items():
            waited = now - since
            if waited >= self.limit_s or (self.draining and waited >= short_s and stream.generated()):
                found.append(stream)
            elif waited < short_s:
                break
        return found
