"""A service that tells how long its event loop and the lock of its page pool are held; `bench.event_loop` starts it.

    python -m bench.holds router|prefill|decode [flags of the service]

A line on standard input asks for the longest holds since the last question; the answer is a line of JSON. A timer of
the event loop is due every half millisecond: `loop` is the time by which it is late, in which the loop may also wait
for a thread that has the interpreter's lock. `lock` is the time from taking the pool's lock to its release, with the
pool's method that had it, and `callback` that of one callback of the loop, with its name.

`wall_ms` is a whole time. When other programs use the cores, they are part of it. `held_ms` is that of the loop without
the time that its thread waited for a core, and not more than the CPU time of the process; that of the lock is the CPU
time of the thread that had it.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

from baton.config.decode import DecodeConfig
from baton.config.prefill import PrefillConfig
from baton.config.router import RouterConfig
from baton.process import App, Running
from baton.process import main as run_service

TICK_S = 0.0005
SERVICES: dict[str, Any] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}


class Longest:
    """The longest hold since the last question, by wall clock and without waits, and who had it."""

    def __init__(self) -> None:
        self._wall_s = self._held_s = 0.0
        self._who = ""

    def add(self, wall_s: float, held_s: float, who: Callable[[], str] = str) -> None:
        """Count a hold."""
        self._wall_s = max(self._wall_s, wall_s)
        if held_s > self._held_s:
            self._held_s, self._who = held_s, who()

    def take(self) -> dict[str, Any]:
        """Report, and begin anew."""
        report = {"wall_ms": round(1e3 * self._wall_s, 2), "held_ms": round(1e3 * self._held_s, 2), "in": self._who}
        self._wall_s, self._held_s, self._who = 0.0, 0.0, ""
        return report


class WatchedLock:
    """A lock that counts how long it is held."""

    def __init__(self, longest: Longest) -> None:
        self._lock = threading.Lock()
        self._longest = longest
        self._since = self._cpu = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since, self._cpu = time.monotonic(), time.thread_time()

    def __exit__(self, *exc: object) -> None:
        wall, held = time.monotonic() - self._since, time.thread_time() - self._cpu
        self._lock.release()
        frame = sys._getframe(1)
        self._longest.add(wall, min(wall, held), lambda: _method(frame))


def _method(frame: FrameType | None) -> str:
    """The pool's method that a frame belongs to."""
    name = ""
    while frame is not None and frame.f_code.co_filename.endswith(("pool.py", "contextlib.py")):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


class LoopTimer:
    """A timer of the event loop, and by how much it was late at most."""

    def __init__(self, longest: Longest) -> None:
        self._longest = longest
        self._loop = asyncio.get_running_loop()
        self._stat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._start()

    def _start(self) -> None:
        self._waited, self._cpu = self._read_waited(), time.process_time()
        self._due = self._loop.time() + TICK_S
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = self._loop.time() - self._due
        self._longest.add(late, min(late - (self._read_waited() - self._waited), time.process_time() - self._cpu))
        self._start()

    def _read_waited(self) -> float:
        """Seconds that this thread was ready to run and had no core (Documentation/scheduler/sched-stats.rst)."""
        return int(os.pread(self._stat, 128, 0).split()[1]) / 1e9


def watch_callbacks(longest: Longest) -> None:
    """Count how long each callback of the event loop runs."""
    run: Callable[[Any], None] = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        callback = handle._callback
        began = time.monotonic()
        run(handle)
        took = time.monotonic() - began
        longest.add(took, took, lambda: _name(callback))

    asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]


def _name(callback: Any) -> str:
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        names, at = [], task.get_coro()
        while at is not None and hasattr(at, "cr_code"):
            names.append(f"{at.cr_code.co_name}:{at.cr_frame.f_lineno if at.cr_frame else 0}")  # type: ignore[union-attr]
            at = at.cr_await  # type: ignore[union-attr]
        return " > ".join(names)
    return str(getattr(callback, "__qualname__", callback))


def watched(start: Callable[[Any], Running]) -> Callable[[Any], Running]:
    """As `start`, for a service that answers on standard input."""

    @contextlib.asynccontextmanager
    async def run(config: Any) -> AsyncIterator[App]:
        loop, lock, callbacks = Longest(), Longest(), Longest()
        from baton.kv import pool

        # Not by a hook of the product: `threading` as this one module sees it.
        class Threading:
            Lock = staticmethod(lambda: WatchedLock(lock))

        pool.threading = Threading  # type: ignore[assignment, attr-defined]
        watch_callbacks(callbacks)
        async with start(config) as app:
            LoopTimer(loop)

            def answer() -> None:
                if sys.stdin.readline():
                    print(
                        json.dumps({"loop": loop.take(), "lock": lock.take(), "callback": callbacks.take()}), flush=True
                    )
                else:
                    asyncio.get_running_loop().remove_reader(sys.stdin)

            asyncio.get_running_loop().add_reader(sys.stdin, answer)
            yield app

    return run


def main() -> None:
    """Run the service that the first argument names."""
    name = sys.argv.pop(1)
    if name == "router":
        from router.__main__ import start
    elif name == "prefill":
        from prefill_svc.__main__ import start  # type: ignore[assignment]
    else:
        from decode_svc.__main__ import start  # type: ignore[assignment]
    run_service(name, "bench.holds", SERVICES[name], watched(start))


if __name__ == "__main__":
    main()
