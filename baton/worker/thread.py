"""The engine thread: the one thread on which a worker's forward passes run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs calls one after the other on its own thread; used from the asyncio loop only."""

    def __init__(self, name: str = "engine") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue `fn(*args, **kwargs)`; the future gets its result or its exception.

        Cancelling the future removes a call that has not begun. A call that has begun runs to its end.
        """
        return asyncio.wrap_future(self._executor.submit(fn, *args, **kwargs))

    async def close(self) -> None:
        """Remove the calls that have not begun, and wait for the one that runs."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
