"""An event loop in simulated time: what waits for hours ends in microseconds, and in a repeatable order."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(AssertionError):
    """Nothing is ready, nothing is scheduled, and yet something is awaited."""


class _Selector(selectors.DefaultSelector):
    """Moves the clock instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise Hung("nothing is left that could end this wait")
        if not found and timeout:
            self.loop.now += timeout
        if (timers := self.loop._scheduled) and 0 < timers[0].when() - self.loop.now < self.loop._clock_resolution:
            # It is called now. If it were early, it could set itself again for ever, as no time passes.
            self.loop.now = timers[0].when()
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer; work given to executors takes `work_s()` of it.

    As with threads, work that has begun runs to its end, though its future be cancelled.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(self, work_s: Callable[[], float] = lambda: 0.0) -> None:
        self.now = 0.0
        self.work_s = work_s
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.faults: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.faults.append(context))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run at the end of the time that the work takes."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.work_s(), work)
        return future

    def settle(self) -> None:
        """Let all run that is ready, without time passing."""
        while self._ready or (self._scheduled and self._scheduled[0].when() <= self.now):
            self.stop()
            self.run_forever()

    def advance(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))
        self.settle()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call on the loop, and let what follows from it run."""

        async def called() -> T:
            return function(*args)

        result = self.run_until_complete(called())
        self.settle()
        return result

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this loop, begun."""
        task = self.create_task(work)
        self.settle()
        return task

    def finish(self, within_s: float = 1e6) -> None:
        """Run until every task has ended by itself; raises if one does not within simulated time, or if one failed."""

        async def ended() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                _, pending = await asyncio.wait(tasks, timeout=within_s)
                if pending:
                    raise Hung(f"after {within_s} s: {sorted(map(repr, pending))}")

        self.run_until_complete(ended())
        self.settle()
        if self.faults:
            raise AssertionError(f"unhandled on the loop: {self.faults}")
