"""Threads for what would hold up the event loop: tokenizing, hashing, converting large reports.

They are the router's own. asyncio's default threads also resolve host names, which must not wait behind texts.

    run ──▶ a queue for each tenant, which take turns ──▶ 2 to 4 threads, of which one tenant may use all but one

So another tenant's first piece of work starts at once beside one flood, and beside several after at most one piece of
each. Work that has begun can't be stopped: a tenant whose client left still occupies its threads until it has ended.
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
from router.placement.queue import FairQueue

_LEAST, _MOST = 2, 4
_RETRY_S = 1.0

WAITING_BYTES = 64 << 20
"""Bytes of one tenant's requests that may wait for a thread; a single request may be larger."""

T = TypeVar("T")


class RunOnThread(Protocol):
    """Runs a function on a thread for one tenant."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Its result, or what it raises."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    function: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


class Threads:
    """A few threads that tenants share fairly; lives on the event loop."""

    def __init__(self, capacity: int, count: int | None = None) -> None:
        """`capacity` is how many requests of one tenant may wait, `count` the number of threads."""
        self._count = max(_LEAST, min(usable(), _MOST)) if count is None else count
        self._most = max(1, self._count - 1)
        """Threads that one tenant may use at a time."""
        self._capacity = capacity
        self._queue: FairQueue[_Job] = FairQueue()
        self._in_use: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._executor = ThreadPoolExecutor(self._count, "router")
        self._running: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()

    def check(self, tenant: str, size: int) -> None:
        """Raise Overloaded if a new request of the tenant, of `size` bytes, may not wait."""
        if (count := self._queue.waiting(tenant)) >= self._capacity:
            problem = f"{count} requests wait to be tokenized, {self._capacity} may"
            raise Overloaded(f"line_capacity: {problem}; try again later", _RETRY_S)
        if (waiting := self._waiting_bytes[tenant]) and waiting + size > WAITING_BYTES:
            problem = f"requests of {waiting} bytes wait to be tokenized, and {size} more exceed {WAITING_BYTES}"
            raise Overloaded(f"waiting_bytes: {problem}; try again later", _RETRY_S)

    def of(self, tenant: str) -> RunOnThread:
        """The threads as one tenant uses them."""
        return partial(self.run, tenant)

    async def run(self, tenant: str, function: Callable[[], T], size: int = 0) -> T:
        """Run on a thread when it is the tenant's turn; when cancelled before, it does not run.

        `size` is how many bytes are held for it alone while it waits.
        """
        result: asyncio.Future[T] = self._loop.create_future()
        job = _Job(tenant, function, size, result)
        self._queue.append(job, tenant)
        self._waiting_bytes[tenant] += size
        self._begin()
        try:
            return await result
        finally:
            if self._queue.remove(job):
                self._subtract_bytes(job)

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself, and its result is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for running in self._running:
            running.cancel()

    def _begin(self) -> None:
        while (job := self._next()) is not None:
            self._queue.pop(job)
            self._subtract_bytes(job)
            self._in_use[job.tenant] += 1
            running = self._loop.run_in_executor(self._executor, job.function)
            self._running.add(running)
            running.add_done_callback(partial(self._end, job))

    def _next(self) -> _Job | None:
        """The job that is to begin now, if a thread is free for one."""
        if self._in_use.total() >= self._count:
            return None
        return next((job for job in self._queue.heads() if self._in_use[job.tenant] < self._most), None)

    def _subtract_bytes(self, job: _Job) -> None:
        self._waiting_bytes[job.tenant] -= job.size
        if not self._waiting_bytes[job.tenant]:
            del self._waiting_bytes[job.tenant]

    def _end(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if running.cancelled():
            job.result.cancel()
            return
        error = running.exception()
        if job.result.done():
            # Nobody waits for it any more.
            pass
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._in_use[job.tenant] -= 1
        if not self._in_use[job.tenant]:
            del self._in_use[job.tenant]
        self._begin()
