"""A service that tells how long its event loop and the lock of its page pool are held; `bench.worker_loops` starts it.

    python -m bench.holds router|prefill|decode [flags of the service]

A line on standard input asks for the longest holds since the last question; the answer is a line of JSON. A timer of
the event loop is due every half millisecond: `loop` is the time by which it is late, in which the loop may also wait
for a thread that has the interpreter's lock. `lock` is the time from taking the pool's lock to its release, with the
pool's method that had it.

`wall_ms` is a whole time. When other programs use the cores, they are part of it. `most_ms` is that of the loop without
the time that its thread waited for a core, and not more than the CPU time of the process's Python threads together.
`held_ms` is also without the longest time that another Python thread waited for a core meanwhile, because that thread
may have had the interpreter's lock. For the lock, both are the CPU time of the thread that held it.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any

from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, PrefillConfig
from baton.process.service import App, Running
from baton.process.service import main as run_service

TICK_S = 0.0005
SERVICES: dict[str, Any] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}


class Longest:
    """The longest hold since the last question, by wall clock and without waits, and who had it."""

    def __init__(self) -> None:
        self._wall_s = self._most_s = self._held_s = 0.0
        self._who = ""

    def add(self, wall_s: float, most_s: float, held_s: float, who: Callable[[], str] = str) -> None:
        """Count a hold."""
        self._wall_s, self._most_s = max(self._wall_s, wall_s), max(self._most_s, most_s)
        if held_s > self._held_s:
            self._held_s, self._who = held_s, who()

    def take(self) -> dict[str, Any]:
        """Report, and begin anew."""
        times = {"wall_ms": self._wall_s, "most_ms": self._most_s, "held_ms": self._held_s}
        report = {**{name: round(1e3 * seconds, 2) for name, seconds in times.items()}, "in": self._who}
        self._wall_s = self._most_s = self._held_s = 0.0
        self._who = ""
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
        self._longest.add(wall, min(wall, held), min(wall, held), lambda: _method(frame))


def _method(frame: FrameType | None) -> str:
    """The pool's method that a frame belongs to."""
    name = ""
    while frame is not None and frame.f_code.co_filename.endswith(("pool.py", "contextlib.py")):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


class LoopTimer:
    """A timer of the event loop, and by how much it was late at most.

    A hold is named after the callback of the loop that took half of it, or garbage collection. Otherwise the loop
    waited for the interpreter's lock: the name is then where other threads are when the loop has the lock again. Among
    them is the one that had it, in the call that kept it.
    """

    def __init__(self, longest: Longest) -> None:
        self._longest = longest
        self._loop = asyncio.get_running_loop()
        self._thread, self._stats = threading.get_native_id(), dict[int, int]()
        self._took, self._callback = 0.0, ""
        self._watch_callbacks()
        self._collected, self._collecting = 0.0, 0.0
        gc.callbacks.append(self._count_collection)
        self._start()

    def _count_collection(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.monotonic()
        else:
            self._collected += time.monotonic() - self._collecting

    def _watch_callbacks(self) -> None:
        run: Callable[[Any], None] = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            callback, began = handle._callback, time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > max(self._took, TICK_S) and getattr(callback, "__self__", None) is not self:
                self._took, self._callback = took, _name(callback)

        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]

    def _start(self) -> None:
        self._took, self._callback, self._collected = 0.0, "", 0.0
        self._before = self._read_threads()
        self._due = self._loop.time() + TICK_S
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = most = held = self._loop.time() - self._due
        if late > TICK_S:
            none = (0.0, 0.0)
            spent = {
                thread: (cpu - self._before.get(thread, none)[0], waited - self._before.get(thread, none)[1])
                for thread, (cpu, waited) in self._read_threads().items()
            }
            ran, waited = spent.pop(self._thread)
            others = sum(cpu for cpu, _ in spent.values())
            most = max(0.0, min(late - waited, ran + others))
            lock = late - ran - waited - max((waited for _, waited in spent.values()), default=0.0)
            held = min(most, ran + max(0.0, min(lock, others)))
        self._longest.add(late, most, held, lambda: self._name(held))
        self._start()

    def _name(self, held: float) -> str:
        if self._collected > held / 2:
            return "garbage collection"
        return self._callback if self._took > held / 2 else _other_threads()

    def _read_threads(self) -> dict[int, tuple[float, float]]:
        """Seconds of CPU time of each Python thread, and seconds in which it was ready to run but had no core.

        Other threads never have the interpreter's lock. See Documentation/scheduler/sched-stats.rst of Linux.
        """
        found = {}
        for thread in threading.enumerate():
            number = thread.native_id or 0
            # It may have ended meanwhile. The clock of a thread is clock_getcpuclockid(3)'s, by the thread's number.
            with contextlib.suppress(OSError):
                if (stat := self._stats.get(number)) is None:
                    stat = self._stats[number] = os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY)
                found[number] = time.clock_gettime(~number << 3 | 6), int(os.pread(stat, 128, 0).split()[1]) / 1e9
        return found


def _other_threads() -> str:
    """Stacks of other threads that do not wait, for a hold by the interpreter's lock."""
    found = []
    for thread, frame in sys._current_frames().items():
        names: list[str] = []
        at: FrameType | None = frame
        while at is not None and len(names) < 3:
            names.append(f"{at.f_code.co_name}:{at.f_lineno}")
            at = at.f_back
        if thread != threading.get_ident() and names[0].partition(":")[0] not in ("_worker", "wait", "select"):
            found.append("threads: " + " < ".join(names))
    return "; ".join(found)


def _name(callback: Any) -> str:
    """The callback's name; of a task, where it waits after it has run."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    names = []
    at: Any = task.get_coro()
    while hasattr(at, "cr_await"):
        names.append(f"{at.__name__}:{at.cr_frame.f_lineno if at.cr_frame else 'end'}")
        at = at.cr_await
    return " > ".join(names)


def watched(start: Callable[[Any], Running]) -> Callable[[Any], Running]:
    """As `start`, for a service that answers on standard input."""

    @contextlib.asynccontextmanager
    async def run(config: Any) -> AsyncIterator[App]:
        loop, lock = Longest(), Longest()
        from baton.kv import pool

        # Not by a hook of the product: `threading` as this one module sees it.
        class Threading:
            Lock = staticmethod(lambda: WatchedLock(lock))

        pool.threading = Threading  # type: ignore[assignment, attr-defined]
        async with start(config) as app:
            LoopTimer(loop)

            def answer() -> None:
                if sys.stdin.readline():
                    print(json.dumps({"loop": loop.take(), "lock": lock.take()}), flush=True)
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
