"""Health means progress: a worker is NOT_SERVING if its engine has work but makes no progress.

    progress ──(limit_s without any)──▶ stalled: NOT_SERVING ──(HANG_LOOKS more looks without any)──▶ hung: replaced

A hang is counted in looks, not in seconds: a process that was stopped for an hour is not hung when it goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_CHECKS_PER_LIMIT = 4
HANG_LOOKS = 2 * _CHECKS_PER_LIMIT
"""Looks in a row that find a stall, after which the engine counts as hung."""


class Progress:
    """Time of the engine's last progress; the engine thread records it after each layer and each step.

    In between, another number of `heartbeat` (`Engine.heartbeat`) than at the last look counts as progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, heartbeat: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self._heartbeat = heartbeat
        self._recorded_at: float | None = None
        self._seen, self._seen_at = 0, -math.inf

    def record(self) -> None:
        """Record that there is work, and that it has just made progress."""
        self._recorded_at = self._clock()

    def set_idle(self) -> None:
        """Record that there is no work."""
        self._recorded_at = None

    def stalled_s(self) -> float:
        """Seconds since the last progress was recorded or seen; 0 without work. Call it from one thread."""
        recorded_at = self._recorded_at
        if recorded_at is None:
            return 0.0
        now, number = self._clock(), self._heartbeat()
        if number != self._seen:
            self._seen, self._seen_at = number, now
        return now - max(recorded_at, self._seen_at)


async def watch_progress(progress: Progress, limit_s: float, report: Callable[[bool], object]) -> None:
    """Call `report(False)` after `limit_s` seconds without progress, and `report(True)` when there is progress again.

    Runs until cancelled, or until the engine hangs: after about 3 times `limit_s`. Looks four times in each `limit_s`,
    so a stall is reported after at most 1.5 times that.
    """
    looks = 0
    while looks < HANG_LOOKS:
        await asyncio.sleep(limit_s / _CHECKS_PER_LIMIT)
        stalled = progress.stalled_s() >= limit_s
        if stalled != bool(looks):
            report(not stalled)
        looks = looks + 1 if stalled else 0
