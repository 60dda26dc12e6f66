"""Sends requests and records every event and its own delays; ends in bounded time, whatever the server does.

An open loop sends each request when it is due, whether or not earlier ones have ended. With a cap it waits, for at
most `timeout_s`, until fewer requests than that are in flight; this wait is not part of the lateness. A closed loop has
`concurrency` users; each one sends the next request when its last one has ended. After a failure a user waits for the
time that the server asks for, or RETRY_S, so that it does not flood a server that refuses at once. The server or
`timeout_s` ends every request. When the time of a run is over, it waits for the open requests: for at most `timeout_s`,
or twice that with a cap.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.targets import RETRY_S, Target
from baton.bench.load.workload import Job

MAX_OPEN = 16384
"""Largest number of open requests. If more are due in an open loop, they count as failed: the server is far behind."""

MAX_PAUSE_S = 10.0
"""Longest time that a user of a closed loop waits because the server asks for it."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """End of a run: after `requests` requests or `seconds` seconds, whichever comes first; None means no limit.

    `concurrency` is that of a closed loop, None for an open one, whose jobs have times. `max_concurrency` limits the
    requests in flight of an open loop.
    """

    concurrency: int | None = None
    requests: int | None = None
    seconds: float | None = None
    timeout_s: float = 300.0
    max_concurrency: int | None = None


class Cap:
    """Lets at most `most` requests run at the same time; the others wait in the order of their arrival."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[asyncio.Future[float]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def enter(self) -> float:
        """Wait for a place; the caller must `leave` it. Returns the time at which it was free (`time.perf_counter`).

        The time from then until the caller continues belongs to the event loop, not to the cap.
        """
        if self._free:
            self._free -= 1
            return time.perf_counter()
        place: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():
                # It was given just before.
                self.leave()
            with contextlib.suppress(ValueError):
                self._waiting.remove(place)
            raise

    def leave(self) -> None:
        """Give the place to the request that has waited longest."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(time.perf_counter())
                return
        self._free += 1


@dataclass(slots=True)
class LoadRun:
    """The results of a run so far; `began` and `ended` are seconds of `time.perf_counter`."""

    plan: LoadPlan
    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    interrupted: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    endings: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    _task: asyncio.Task[None] | None = None
    _cap: Cap | None = None

    @property
    def waiting(self) -> int:
        """Requests that are due and wait for the cap."""
        return self._cap.waiting if self._cap else 0

    @property
    def open(self) -> int:
        """Requests in flight."""
        return len(self.outcomes) - sum(self.endings.values())

    @property
    def progress(self) -> float:
        """The fraction of the plan that is done, in [0, 1]; 0 for a plan without end."""
        done = [0.0]
        if self.plan.requests:
            done.append((len(self.outcomes) - self.open) / self.plan.requests)
        if self.plan.seconds and self.began:
            done.append((time.perf_counter() - self.began) / self.plan.seconds)
        return min(1.0, max(done))

    def interrupt(self) -> None:
        """End the run now; requests that are open count as interrupted."""
        self.interrupted = True
        if self._task is not None:
            self._task.cancel()

    async def send_all(self, target: Target, jobs: Iterator[Job]) -> None:
        """Send `jobs` as planned; returns when all have ended, or soon after `interrupt`."""
        self.began, cpu = time.perf_counter(), time.process_time()
        self._cap = Cap(self.plan.max_concurrency) if self.plan.max_concurrency else None
        self._task = asyncio.create_task(self._send(target, self._limit_jobs(jobs)))
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
        finally:
            # A user whose last request failed may have paused for another, which was no part of the load.
            self.ended = max((each.ended for each in self.outcomes), default=time.perf_counter())
            self.cpu_s = time.process_time() - cpu

    async def _send(self, target: Target, jobs: Iterator[Job]) -> None:
        async with asyncio.TaskGroup() as group:
            if self.plan.concurrency is None:
                await self._open_loop(target, jobs, group)
            else:
                for _ in range(self.plan.concurrency):
                    group.create_task(self._user(target, jobs))

    async def _open_loop(self, target: Target, jobs: Iterator[Job], group: asyncio.TaskGroup) -> None:
        for job in jobs:
            due = self.began + (job.at_s or 0.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(
                self._send_capped(target, job, due, self._cap) if self._cap else self._ask(target, job, due)
            )

    async def _send_capped(self, target: Target, job: Job, due: float, cap: Cap) -> None:
        """Send a request when `cap` lets it through."""
        if self.open + cap.waiting >= MAX_OPEN:
            await self._ask(target, job, due, unsent=f"{MAX_OPEN} requests were open or waited for the cap")
            return
        came = time.perf_counter()
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                free = await cap.enter()
        except TimeoutError:
            unsent = f"waited {self.plan.timeout_s:g} s for the cap of {self.plan.max_concurrency}"
            await self._ask(target, job, due, time.perf_counter() - came, unsent)
            return
        try:
            await self._ask(target, job, due, free - came)
        finally:
            cap.leave()

    async def _user(self, target: Target, jobs: Iterator[Job]) -> None:
        due = self.began
        for job in jobs:
            if (pause := await self._ask(target, job, due)) > 0:
                await asyncio.sleep(min(pause, self._seconds_left()))
            due = time.perf_counter()

    def _seconds_left(self) -> float:
        """Seconds in which requests may still be sent."""
        if self.plan.seconds is None:
            return math.inf
        return max(0.0, self.began + self.plan.seconds - time.perf_counter())

    def _limit_jobs(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """The jobs up to the end of the plan."""
        plan = self.plan
        for number, job in enumerate(jobs):
            if number == plan.requests:
                return
            at_s = time.perf_counter() - self.began if job.at_s is None else job.at_s
            if plan.seconds is not None and at_s >= plan.seconds:
                return
            yield job

    async def _ask(self, target: Target, job: Job, due: float, capped: float = 0.0, unsent: str = "") -> float:
        """Send a request and record its outcome. Returns the seconds for which its user should wait afterwards.

        It has waited for the cap for `capped` seconds. `unsent` is the reason if it can't be sent.
        """
        if self.open >= MAX_OPEN:
            unsent = f"{MAX_OPEN} requests were open"
        pause = 0.0
        outcome = Outcome.of(job, due, capped)
        self.outcomes.append(outcome)
        try:
            if unsent:
                raise RequestFailed("not sent", unsent)
            async with asyncio.timeout(self.plan.timeout_s):
                await target.send(job, outcome)
            outcome.ending = Ending.FINISHED
        except RequestFailed as error:
            outcome.ending, outcome.kind, outcome.message = error.ending, error.kind, str(error)
            pause = RETRY_S if error.retry_after is None else max(RETRY_S, min(error.retry_after, MAX_PAUSE_S))
        except TimeoutError:
            outcome.ending, outcome.kind = Ending.FAILED, "timeout"
            outcome.message = f"not ended within {self.plan.timeout_s:g} s, after {outcome.tokens} tokens"
        finally:
            outcome.ended = time.perf_counter()
            self.endings[outcome.ending] += 1
        return pause
