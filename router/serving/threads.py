"""Threads of a router for work that would hold up the event loop: tokenizing, hashing, making large messages.

    run ──▶ one queue for each tenant ──▶ 2 to 4 threads, of which one tenant may use all but one

The threads take jobs from the queues of the tenants round-robin. If one tenant floods its queue, the first job of
another tenant starts at once; if several tenants do, it waits for at most one job of each. A job that has begun can't
be stopped: a tenant whose client has left occupies its threads until its jobs have ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baton.errors import Overloaded
from baton.process.cores import usable
from baton.process.executors import RunOnThread
from router.placement.queue import FairQueue

_MIN_THREADS, _MAX_THREADS = 2, 4

_RETRY_S = 1.0
"""Seconds after which a client that was refused should try again."""

WAITING_BYTES = 64 << 20
"""Most bytes of one tenant's requests that wait for a thread; a single request may be larger."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    tenant: str
    function: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


class TenantThreads:
    """A few threads that tenants share fairly. Use it on the event loop only."""

    def __init__(self, capacity: int, count: int | None = None) -> None:
        """Start `count` threads; at most `capacity` requests of one tenant may wait for one."""
        self._count = max(_MIN_THREADS, min(usable(), _MAX_THREADS)) if count is None else count
        self._most = max(1, self._count - 1)
        """Threads that one tenant may use at a time."""
        self._capacity = capacity
        self._queue: FairQueue[_Job] = FairQueue()
        self._in_use: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._executor = ThreadPoolExecutor(self._count, "router")
        self._start_threads()
        self._running: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()

    def _start_threads(self) -> None:
        """Start all threads now, because the process may have reached its limit of threads later."""
        all_run = threading.Barrier(self._count)
        try:
            for _ in range(self._count):
                self._executor.submit(all_run.wait)
        except RuntimeError:
            all_run.abort()
            raise

    def check(self, tenant: str, size: int) -> None:
        """Raise Overloaded if a request of `size` bytes may not wait, because too many of the tenant's requests do."""
        if (count := self._queue.count(tenant)) >= self._capacity:
            problem = f"{count} requests wait to be tokenized, {self._capacity} are allowed"
            raise Overloaded(f"queue_capacity: {problem}; try again later", _RETRY_S, reason="tokenizer_queue")
        if (waiting := self._waiting_bytes[tenant]) and waiting + size > WAITING_BYTES:
            problem = f"requests of {waiting} bytes wait to be tokenized, and {size} more exceed {WAITING_BYTES}"
            raise Overloaded(f"waiting_bytes: {problem}; try again later", _RETRY_S, reason="tokenizer_queue")

    def for_tenant(self, tenant: str) -> RunOnThread:
        """The function that runs a tenant's work on these threads."""
        return partial(self.run, tenant)

    async def run(self, tenant: str, function: Callable[[], T], size: int = 0) -> T:
        """Run `function` on a thread and return its result; raises its exception.

        It waits in the tenant's queue first, and is not run if the caller is cancelled there. `size` is the number of
        bytes that it holds while it waits.
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
        """Start no more jobs. Running jobs end by themselves, and their results are dropped."""
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
        """The next job to start; None if no thread is free for one."""
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
            # The caller was cancelled.
            pass
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._in_use[job.tenant] -= 1
        if not self._in_use[job.tenant]:
            del self._in_use[job.tenant]
        self._begin()
