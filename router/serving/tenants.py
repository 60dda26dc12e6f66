"""Callers, and the limits of each tenant: open streams, and threads.

    authorization: Bearer KEY ──▶ Caller (tenant, its limit, whether an admin) or Unauthenticated

Without a file of keys everybody is the one tenant "". A tenant has a queue of its own, a salt of the prefix cache, and
a number of open streams. Tokenize and Detokenize count as streams too. GetModel does not: it takes no longer than a
refusal.

Threads are for what would hold up the event loop: tokenizing, hashing, making large messages. They are the router's
own, so that texts of tenants delay nothing else.

    run ──▶ a queue for each tenant, which take turns ──▶ 2 to 4 threads, of which one tenant may use all but one

So another tenant's first piece of work starts at once beside one flood, and beside several after at most one piece of
each. Work that has begun can't be stopped: a tenant whose client left still occupies its threads until it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baton.config.watched import watch_file
from baton.errors import ConfigError, Overloaded, Unauthenticated
from baton.keys import MAX_KEY_LENGTH, ApiKey, digest, parse
from baton.process.cores import usable
from baton.process.executors import RunOnThread
from router.placement.scheduler import FairQueue

HEADER = "authorization"
_SCHEME = "bearer"
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a call; `max_streams` None means no limit."""

    tenant: str = ""
    max_streams: int | None = None
    admin: bool = False


ANONYMOUS = Caller(admin=True)
"""The caller where no keys are asked for."""


class Tenants:
    """Knows callers by their keys, and counts the streams of each tenant; lives on the event loop."""

    def __init__(self, path: str = "", fleet_secret: str = "") -> None:
        """`path` is the file of keys, empty for none; it is read again when it changes.

        Raises ConfigError naming what is wrong, which is so when there are several tenants and no fleet secret.
        """

        def keys(data: bytes) -> tuple[ApiKey, ...]:
            found = parse(data)
            if len(tenants := {key.tenant for key in found}) > 1 and not fleet_secret:
                problem = f"BATON_FLEET_SECRET must be set to keep the caches of {len(tenants)} tenants apart"
                raise ConfigError(problem)
            return found

        self._keys = watch_file(path, "api_keys", keys) if path else None
        self._streams: Counter[str] = Counter()

    def caller(self, authorization: Sequence[str]) -> Caller:
        """The tenant whose key the header's values contain. Raises Unauthenticated."""
        if self._keys is None:
            return ANONYMOUS
        seen = digest(_key(authorization))
        found: ApiKey | None = None
        for key in self._keys.value():
            # All are looked at, so that the time taken does not tell which one it was.
            if hmac.compare_digest(key.sha256, seen):
                found = key
        if found is None:
            raise Unauthenticated("unknown API key")
        return Caller(found.tenant, found.max_streams, found.admin)

    @contextlib.contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """Count a stream of the caller's tenant until the block ends. Raises Overloaded beyond the tenant's limit.

        A call is a stream before its message is received, and again while it is served: large messages count too.
        """
        tenant, limit = caller.tenant, caller.max_streams
        if limit is not None and self._streams[tenant] >= limit:
            problem = f"{self._streams[tenant]} streams of tenant {tenant} are open, {limit} may be"
            raise Overloaded(f"max_streams: {problem}", _RETRY_S)
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]


def _key(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(f"an API key is needed, as metadata {HEADER}: Bearer KEY")
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip()
    if len(authorization) > 1 or scheme.lower() != _SCHEME or not 0 < len(key) <= MAX_KEY_LENGTH:
        raise Unauthenticated(f"the metadata {HEADER} must be one Bearer KEY of at most {MAX_KEY_LENGTH} characters")
    return key


_MIN_THREADS, _MAX_THREADS = 2, 4

WAITING_BYTES = 64 << 20
"""Bytes of one tenant's requests that may wait for a thread; a single request may be larger."""

T = TypeVar("T")


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
        """Start all threads, since the process may be at a limit of threads when there is work for them."""
        all_run = threading.Barrier(self._count)
        try:
            for _ in range(self._count):
                self._executor.submit(all_run.wait)
        except RuntimeError:
            all_run.abort()
            raise

    def check(self, tenant: str, size: int) -> None:
        """Raise Overloaded if a new request of the tenant, of `size` bytes, may not wait."""
        if (count := self._queue.count(tenant)) >= self._capacity:
            problem = f"{count} requests wait to be tokenized, {self._capacity} may"
            raise Overloaded(f"queue_capacity: {problem}; try again later", _RETRY_S)
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
