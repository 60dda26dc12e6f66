"""The engine thread: the one thread on which a worker's forward passes run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs calls one after the other on a thread of its own; made and used on the asyncio loop."""

    def __init__(self, name: str = "engine") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue `fn(*args, **kwargs)`; the future yields what it returns or raises.

        Cancelling the future withdraws a call that has not begun; one that has begun runs to its end.
        """
        return asyncio.wrap_future(self._executor.submit(fn, *args, **kwargs))

    async def close(self) -> None:
        """Withdraw the calls that have not begun, and wait for the one that has."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
