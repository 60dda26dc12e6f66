"""A worker as a process: start, say where it listens, serve until told to stop, drain.

On SIGTERM or SIGINT the worker drains and the process ends with status 0; a second signal cuts the drain
short. When the worker itself fails, the process says why and ends with status 1; so it does when the worker
can't stop within STOP_S, because its engine thread hangs: a thread can't be ended otherwise. Signal handlers are
set here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any, Protocol

from baton.worker.listeners import Addresses

STOP_S = 15.0
_NUMBERS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


class WorkerApp(Protocol):
    """A running worker."""

    @property
    def addresses(self) -> Addresses:
        """Where it listens."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the worker can't go on."""

    async def drain(self) -> None:
        """Refuse new work and return when the accepted work is done, or its grace period is over."""


async def serve(app: contextlib.AbstractAsyncContextManager[WorkerApp], role: str) -> int:
    """Run `app` until a signal or its failure; the exit status."""
    with _signals() as stop:
        return await _serve(app, role, stop)


async def _serve(app: contextlib.AbstractAsyncContextManager[WorkerApp], role: str, stop: asyncio.Queue[str]) -> int:
    with contextlib.ExitStack() as stopping:
        async with app as worker:
            where = worker.addresses
            line = f"listening control={where.control} kv={where.kv} ops={where.ops}"
            _log.info("%s %s", role, line)
            print(line, flush=True)
            name = await _first(stop, worker.failed)
            try:
                if name is None:
                    _log.error("%s failed: %s", role, worker.failed.exception())
                    return 1
                _log.info("%s draining after %s", role, name)
                await _drain(worker, stop)
            finally:
                limit = asyncio.get_running_loop().call_later(STOP_S, _give_up, role)
                stopping.callback(limit.cancel)
    return 0


def _give_up(role: str) -> None:
    _log.error("%s does not stop within %g s: its engine hangs", role, STOP_S)
    os._exit(1)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[str]]:
    """The names of the signals that come."""
    stop: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in _NUMBERS:
        loop.add_signal_handler(number, stop.put_nowait, number.name)
    try:
        yield stop
    finally:
        for number in _NUMBERS:
            loop.remove_signal_handler(number)


async def _first(stop: asyncio.Queue[str], failed: asyncio.Future[None]) -> str | None:
    """The signal that came, or None when the worker failed first."""
    signalled = asyncio.ensure_future(stop.get())
    waiting: list[asyncio.Future[Any]] = [signalled, failed]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return None


async def _drain(worker: WorkerApp, stop: asyncio.Queue[str]) -> None:
    draining = asyncio.ensure_future(worker.drain())
    again = asyncio.ensure_future(stop.get())
    waiting: list[asyncio.Future[Any]] = [draining, again]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    results = await asyncio.gather(draining, again, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]
