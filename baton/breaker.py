"""A circuit breaker: while something is broken, one call in a while tries it, and the others avoid it. Pure.

closed ── failures in a row ─▶ open ── the pause is over ─▶ half-open: one call ── success ─▶ closed
                                ▲                                          └────── failure ─▶ open, twice as long
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Breaker:
    """Closed until `threshold` failures in a row; then it allows one call after each pause, which doubles on failure.

    Failures within `same_event_s` of each other count once. The pause lasts from `first_s` to `most_s` seconds; only a
    success that finds the breaker closed makes it short again.
    """

    def __init__(
        self,
        first_s: float = 1.0,
        most_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        threshold: int = 1,
        same_event_s: float = 0.0,
    ) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._threshold, self._same_s = threshold, same_event_s
        self._failures = 0
        self._last = -math.inf
        self._pause_s = 0.0
        self._until: float | None = None
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether all calls are allowed."""
        return self._until is None

    @property
    def due(self) -> bool:
        """Whether a call would be allowed now; does not use up the one call of a pause."""
        return self._until is None or self._clock() >= self._until

    def allow(self) -> bool:
        """Whether the caller may make a call now; while the breaker is open, one call in each pause, the trial."""
        if not self.due:
            return False
        if not self.closed:
            self._until, self._trying = self._clock() + self._pause_s, True
        return True

    def release(self) -> None:
        """End a trial that has found out nothing; another may begin at once."""
        if self._trying:
            self._until, self._trying = self._clock(), False

    def record_success(self) -> None:
        """Record that a call succeeded."""
        if self.closed:
            self._pause_s = 0.0
        self._until, self._trying, self._failures = None, False, 0

    def record_failure(self) -> None:
        """Record that a call failed. Calls that were running when the breaker opened do not count."""
        now = self._clock()
        if now - self._last < self._same_s or not (self.closed or self._trying):
            return
        self._last = now
        self._failures += 1
        if self._trying or self._failures >= self._threshold:
            self._pause_s = min(self._most_s, self._pause_s * 2 or self._first_s)
            self._until, self._trying = now + self._pause_s, False
