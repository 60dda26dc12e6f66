"""A service as a process: it starts, prints its addresses, serves until a signal, and drains.

    main ── settings ── start ── "listening ..." ── signal ── drain ── stop      status 0
      │        └ 2        │                            │        └ again: stop now
      └ signal: 0         └ signal: 0                  └ the service fails: 1

On SIGTERM, SIGINT or SIGHUP a service drains, and the process ends with status 0; a second signal cuts the drain
short. A signal before the service listens ends the process at once, since no client depends on it yet; the load of a
model runs on a thread that can't be stopped otherwise. If the service itself fails, the process prints why and ends
with status 1. It does the same if the service can't stop within STOP_S (FAILED_STOP_S after a failure) because one of
its threads hangs. Signal handlers are set here and nowhere else.

After the service has stopped, the process ends without unloading its modules: with torch loaded, that would take
seconds on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

from baton.config.options import Settings
from baton.config.roles import command
from baton.errors import BatonError, EngineError
from baton.process.executors import LookupThreads
from baton.process.supervisor import ready_line
from baton.telemetry.logs import writes_json

# gRPC reads it when it is imported, which is after this module. Services report faults better than gRPC's own log,
# which has a line for each connection that a peer closes.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

STOP_S = 15.0
FAILED_STOP_S = 2.0
"""Seconds from a failure to the end of the process, in which routers hear of it."""
ABANDON_S = 0.5
SWITCH_S = 0.0002
"""Seconds after which a thread that computes gives the interpreter's lock to the event loop. The loop may need it
several times in an iteration, and Python's default is 5 ms."""
_GC_THRESHOLDS = (1_000, 5, 2_000)
"""A collection of the two young generations looks at some 6,000 objects: half a millisecond, or two where other
processes have emptied the caches. With 5,000 and 10 it was 50,000 objects, in 2.3 to 8 ms. A full collection comes as
rarely as with 5,000, 10 and 200."""
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_log = logging.getLogger(__name__)


class App(Protocol):
    """A running service."""

    @property
    def listening(self) -> str:
        """Its addresses: "name=host:port" for each listener."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the service can't go on."""

    async def drain(self) -> None:
        """Refuse new work and return when the accepted work is done, or its grace period is over."""


Running: TypeAlias = contextlib.AbstractAsyncContextManager[App]
S = TypeVar("S", bound=Settings)


def main(role: str, package: str, settings: type[S], run: Callable[[S], Running]) -> NoReturn:
    """Run a service until a signal, and end the process: status 0 after a drain, 1 if it failed.

    Bad settings are printed, with status 2, and a failure of the engine at its start, with status 1. `run` may load
    things that take long: --help and bad settings are handled before it is called.
    """

    def start(config: S) -> NoReturn:
        try:
            _exit(asyncio.run(serve(run(config), role)))
        except ModuleNotFoundError as error:
            print(f"{role}: {error.name} is not installed; in the checkout: pip install '.[worker]'", file=sys.stderr)
        except BatonError as error:
            print(f"{role}: {error}", file=sys.stderr)
            if isinstance(error, EngineError):
                sys.exit(1)
        sys.exit(2)

    for number in stop_signals():
        signal.signal(number, lambda *_: os._exit(0))
    # Before torch is imported: the usual 700 objects between collections would take a tenth of the import.
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
    command(settings, role, start).main(prog_name=f"python -m {package}")


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader may have gone already.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


async def serve(app: Running, role: str) -> int:
    """Run `app` until a signal or its failure; the exit status."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(LookupThreads())
    listening: asyncio.Future[None] = loop.create_future()
    with signals() as stop:
        # One task for the whole life of the app: the task that enters a context must also leave it.
        living = asyncio.create_task(_run(app, role, stop, listening), name=role)
        await _wait_any(living, listening, stop.first)
        if stop.first.done() and not (living.done() or listening.done()):
            _log.info("%s stops after %s while it starts", role, stop.first.result())
            living.cancel()
            await asyncio.wait({living}, timeout=ABANDON_S)
            os._exit(0)
        return await living


class Signals:
    """The names of the first and the second signal, as futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[str] = loop.create_future()
        self.again: asyncio.Future[str] = loop.create_future()

    def receive(self, name: str) -> None:
        """Record a signal."""
        for future in (self.first, self.again):
            if not future.done():
                return future.set_result(name)
        return None


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a process: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup."""
    return [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Record `stop_signals`, in place of their usual effect, until the block ends."""
    found, loop, numbers = Signals(), asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, found.receive, number.name)
    try:
        yield found
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _run(app: Running, role: str, stop: Signals, listening: asyncio.Future[None]) -> int:
    with contextlib.ExitStack() as stopping:
        async with app as service:
            _freeze_garbage_collector()
            _log.info("%s listening %s", role, service.listening)
            # The line is in the log too. If the disk is full, the service runs on without it.
            with contextlib.suppress(OSError):
                print(ready_line(service.listening, as_json=writes_json()), flush=True)
            listening.set_result(None)
            try:
                await _wait_any(stop.first, service.failed)
                if not service.failed.done():
                    _log.info("%s draining after %s", role, stop.first.result())
                    await _drain(service, stop)
                if service.failed.done():
                    _log.error("%s failed: %s", role, service.failed.exception())
                    return 1
            finally:
                seconds = FAILED_STOP_S if service.failed.done() else STOP_S
                limit = asyncio.get_running_loop().call_later(seconds, _exit_hung, role, seconds)
                stopping.callback(limit.cancel)
    return 0


def _freeze_garbage_collector() -> None:
    """Exclude all objects so far from garbage collection, because they live as long as the process.

    A full collection over everything that a service has loaded delayed every stream by 50 ms and more.
    """
    gc.collect()
    gc.freeze()


def _exit_hung(role: str, seconds: float) -> None:
    _log.error("%s does not stop within %g s: one of its threads hangs", role, seconds)
    os._exit(1)


async def _drain(service: App, stop: Signals) -> None:
    """Let the service drain until a second signal comes, or it fails."""
    draining = asyncio.ensure_future(service.drain())
    await _wait_any(draining, stop.again, service.failed)
    if draining.done():
        return await draining
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    return None


async def _wait_any(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
