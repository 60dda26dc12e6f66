"""A cap on requests in flight, which tells when it let each of them through."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque


class Cap:
    """Lets `most` requests through at a time; the others wait, and follow in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[asyncio.Future[float]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def enter(self) -> float:
        """Wait for a place, which is to be left again. Returns when it was free, a time of `time.perf_counter`.

        What passes from then until the caller goes on is the event loop's, not the cap's.
        """
        if self._free:
            self._free -= 1
            return time.perf_counter()
        place: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():
                # It was given just before.
                self.leave()
            with contextlib.suppress(ValueError):
                self._waiting.remove(place)
            raise

    def leave(self) -> None:
        """Give the place to the request that has waited longest."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(time.perf_counter())
                return
        self._free += 1
