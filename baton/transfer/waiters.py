"""Futures that wait in a set for a change. A waiter that wakes up must check its condition again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def add_waiter(waiting: set[asyncio.Future[None]]) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is in the set while the block runs."""
    waiter = asyncio.get_running_loop().create_future()
    waiting.add(waiter)
    try:
        yield waiter
    finally:
        waiting.discard(waiter)


def wake_all(waiting: set[asyncio.Future[None]]) -> None:
    """Complete every future in the set."""
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
