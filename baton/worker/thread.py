"""The engine thread: the one thread on which a worker's forward passes run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from baton import executors
from baton.executors import WORK

P = ParamSpec("P")
T = TypeVar("T")


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
        """Run the calls of `run_preempting` that wait; for calls on the engine thread, where others may come between.

        What they raise goes to their own futures.
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
        await executors.run(WORK, self._executor.shutdown, cancel_futures=True)
