"""Threads of a process, in groups for each kind of slow work, so that one kind does not delay another.

    asyncio's default executor   look-ups of host names, and nothing else: a resolver may take as long as it likes
    COPIES                       copies of KV between pages, frames and blocks; each call takes milliseconds
    WORK                         all else that is too long for an event loop: hashing, audits, files, long messages
    EngineThread                 a worker's forward passes, one after the other

A test finds calls that would use the default executor. Services that need a share of threads have executors of their
own (`router.serving.threads`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAX_LOOKUPS = 64

COPIES = ThreadPoolExecutor(thread_name_prefix="copies")
WORK = ThreadPoolExecutor(thread_name_prefix="work")


class LookupThreads(ThreadPoolExecutor):
    """Threads for look-ups of host names. `shutdown` does not wait, because a look-up may take very long."""

    def __init__(self) -> None:
        super().__init__(_MAX_LOOKUPS, thread_name_prefix="names")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop the look-ups that have not begun; a process ends without those that have (`os._exit`)."""
        super().shutdown(wait=False, cancel_futures=True)


def run(executor: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call a function on a thread of `executor`; the future has its result or its exception."""
    return asyncio.get_running_loop().run_in_executor(executor, partial(function, *args, **kwargs))


async def wait_to_end(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended or failed. Its result or error is not raised here; ask `work` for it.

    If the waiting task is cancelled meanwhile, CancelledError is raised after the end. A task may be cancelled again
    while it waits: by its caller, and by `asyncio.timeout`.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        # Otherwise asyncio logs an error that no caller asks for.
        work.exception()
    if cancelled is not None:
        raise cancelled


class RunOnThread(Protocol):
    """Runs a function on a thread for one tenant."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """The result of the function; raises its exception."""


class EngineThread:
    """Runs calls one after the other on its own thread; used from the asyncio loop only, but for `preemption_point`."""

    def __init__(self, name: str = "engine") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._preempting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue `fn(*args, **kwargs)`; the future gets its result or its exception.

        Cancelling the future removes a call that has not begun. A call that has begun runs to its end.
        """
        return asyncio.wrap_future(self._executor.submit(fn, *args, **kwargs))

    def run_preempting(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As `run`, but if the call that runs reaches a `preemption_point`, `fn` runs there."""
        future: Future[T] = Future()
        self._preempting.append((future, partial(fn, *args, **kwargs)))
        # That call may end without another one.
        self._executor.submit(self.preemption_point)
        return asyncio.wrap_future(future)

    def preemption_point(self) -> None:
        """Run the waiting calls of `run_preempting`. Long calls on the engine thread call this where others may run.

        Their exceptions go to their own futures.
        """
        while self._preempting:
            future, call = self._preempting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    async def close(self) -> None:
        """Remove the calls that have not begun, and wait for the one that runs."""
        # The engine thread may take some meanwhile.
        for future, _ in tuple(self._preempting):
            future.cancel()
        await run(WORK, self._executor.shutdown, cancel_futures=True)
