"""Threads for what would hold up the event loop: tokenizing, hashing, converting large reports.

They are the router's own. asyncio's default threads also resolve host names, which must not wait behind texts.

    run ──▶ a queue for each tenant ──▶ turns ──▶ 2 to 4 threads, of which one tenant may use all but one

Work that has begun can't be stopped, so a tenant whose client left still occupies its threads until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from baton.cores import usable
from baton.errors import Overloaded
from router.serving.turns import Turns

_LEAST, _MOST = 2, 4
_RETRY_S = 1.0

WAITING_BYTES = 64 << 20
"""Bytes of one tenant's requests that may wait for a thread; a single request may be larger."""

T = TypeVar("T")


class Run(Protocol):
    """Runs a function on a thread for one tenant."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Its result, or what it raises."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    function: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


class Threads:
    """A few threads that tenants share fairly; lives on the event loop."""

    def __init__(self, capacity: int, count: int | None = None) -> None:
        """`capacity` is how many requests of one tenant may wait, `count` the number of threads."""
        count = max(_LEAST, min(usable(), _MOST)) if count is None else count
        self._capacity = capacity
        self._turns: Turns[_Work] = Turns(count)
        self._waiting_bytes: Counter[str] = Counter()
        self._executor = ThreadPoolExecutor(count, "router")
        self._running: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()

    def check(self, tenant: str, size: int) -> None:
        """Raise Overloaded if a new request of the tenant, of `size` bytes, may not wait."""
        if (waiting := self._turns.waiting(tenant)) >= self._capacity:
            problem = f"{waiting} requests wait to be tokenized, {self._capacity} may"
            raise Overloaded(f"line_capacity: {problem}; try again later", _RETRY_S)
        if (held := self._waiting_bytes[tenant]) and held + size > WAITING_BYTES:
            problem = f"requests of {held} bytes wait to be tokenized, and {size} more exceed {WAITING_BYTES}"
            raise Overloaded(f"waiting_bytes: {problem}; try again later", _RETRY_S)

    def of(self, tenant: str) -> Run:
        """The threads as one tenant uses them."""
        return partial(self.run, tenant)

    async def run(self, tenant: str, function: Callable[[], T], size: int = 0) -> T:
        """Run on a thread when it is the tenant's turn; when cancelled before, it does not run.

        `size` is how many bytes are held for it alone while it waits.
        """
        result: asyncio.Future[T] = self._loop.create_future()
        work = _Work(function, size, result)
        self._turns.push(tenant, work)
        self._waiting_bytes[tenant] += size
        self._begin()
        try:
            return await result
        finally:
            if self._turns.remove(tenant, work):
                self._waits_no_more(tenant, work)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself, and nobody is told."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for running in self._running:
            running.cancel()

    def _begin(self) -> None:
        while (found := self._turns.begin()) is not None:
            tenant, work = found
            self._waits_no_more(tenant, work)
            running = self._loop.run_in_executor(self._executor, work.function)
            self._running.add(running)
            running.add_done_callback(partial(self._end, tenant, work))

    def _waits_no_more(self, tenant: str, work: _Work) -> None:
        self._waiting_bytes[tenant] -= work.size
        if not self._waiting_bytes[tenant]:
            del self._waiting_bytes[tenant]

    def _end(self, tenant: str, work: _Work, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if running.cancelled():
            work.result.cancel()
            return
        error = running.exception()
        if work.result.done():
            # Nobody waits for it any more.
            pass
        elif error is not None:
            work.result.set_exception(error)
        else:
            work.result.set_result(running.result())
        self._turns.end(tenant)
        self._begin()
