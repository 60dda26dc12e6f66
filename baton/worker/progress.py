"""Health means progress: a worker is NOT_SERVING if its engine has work but makes no progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_CHECKS_PER_LIMIT = 4


class Progress:
    """When the engine thread last made progress; written by that thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded_at: float | None = None

    def record(self) -> None:
        """Record that there is work, and that it has just made progress."""
        self._recorded_at = self._clock()

    def set_idle(self) -> None:
        """Record that there is no work."""
        self._recorded_at = None

    def stalled_s(self) -> float:
        """Seconds since the last progress; 0 without work."""
        recorded_at = self._recorded_at
        return 0.0 if recorded_at is None else self._clock() - recorded_at


async def watch_progress(progress: Progress, limit_s: float, report: Callable[[bool], object]) -> None:
    """Call `report(False)` after `limit_s` seconds without progress, and `report(True)` when there is progress again.

    Runs until cancelled; checks four times in each `limit_s`.
    """
    healthy = True
    while True:
        await asyncio.sleep(limit_s / _CHECKS_PER_LIMIT)
        now = progress.stalled_s() < limit_s
        if now != healthy:
            healthy = now
            report(healthy)
