"""Threads of a process, apart by what they wait for: slow work of one kind holds up no other.

    asyncio's default executor   look-ups of host names, and nothing else: a resolver may take as long as it likes
    COPIES                       copies of KV between pages, frames and blocks; each call takes milliseconds
    WORK                         all else that is too long for an event loop: hashing, audits, files, long messages

A test finds calls that would use the default executor. Services that need an order or a share of threads have executors
of their own (`baton.worker.thread`, `router.serving.tenants`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAX_LOOKUPS = 64

COPIES = ThreadPoolExecutor(thread_name_prefix="copies")
WORK = ThreadPoolExecutor(thread_name_prefix="work")


class LookupThreads(ThreadPoolExecutor):
    """Threads for look-ups of names. Closing them does not wait: nobody knows when a look-up ends."""

    def __init__(self) -> None:
        super().__init__(_MAX_LOOKUPS, thread_name_prefix="names")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Drop the look-ups that have not begun; a process ends without those that have (`os._exit`)."""
        super().shutdown(wait=False, cancel_futures=True)


def run(executor: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call a function on a thread of `executor`; the future has its result or its exception."""
    return asyncio.get_running_loop().run_in_executor(executor, partial(function, *args, **kwargs))
