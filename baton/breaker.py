"""A circuit breaker: while a part is broken, single calls test it from time to time, and all others avoid it. Pure.

closed ── failures in a row ─▶ open ── the pause is over ─▶ half-open: one trial ── success ─▶ closed
                                ▲                                           └────── failure ─▶ open, twice as long
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Permit:
    """Permission for one call. If the breaker is open, this call is the trial."""

    __slots__ = ()


class Breaker:
    """Closed until `threshold` failures in a row; then it allows one call after each pause, which doubles on failure.

    That call is the trial. No other is allowed until the trial has succeeded, failed or been released. A success of any
    call closes the breaker, also of one that began before the failures: the part works now.

    Failures within `same_event_s` of each other count once. The pause lasts from `first_s` to `most_s` seconds; it is
    short again only after a success while the breaker is closed.
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
        self._trial: Permit | None = None

    @property
    def closed(self) -> bool:
        """Whether all calls are allowed."""
        return self._until is None

    @property
    def due(self) -> bool:
        """Whether a call would be allowed now. The question does not count as a call."""
        return self._until is None or (self._trial is None and self._clock() >= self._until)

    def request(self) -> Permit | None:
        """Ask for permission to make a call now; None if it may not be made."""
        if not self.due:
            return None
        permit = Permit()
        if not self.closed:
            self._trial = permit
        return permit

    def release(self, permit: Permit) -> None:
        """End the call with this permit. If it was the trial and has no result, another trial may begin at once."""
        if permit is self._trial:
            self._until, self._trial = self._clock(), None

    def record_success(self) -> None:
        """Record that a call succeeded, the trial or another one."""
        if self.closed:
            self._pause_s = 0.0
        self._until, self._trial, self._failures = None, None, 0

    def record_failure(self, permit: Permit | None = None) -> None:
        """Record that a call failed, with its permit if it had one.

        While the breaker is not closed, only the trial counts: other calls were running when it opened.
        """
        now, is_trial = self._clock(), permit is not None and permit is self._trial
        if not is_trial and (not self.closed or now - self._last < self._same_s):
            return
        self._last = now
        self._failures += 1
        if is_trial or self._failures >= self._threshold:
            self._pause_s = min(self._most_s, self._pause_s * 2 or self._first_s)
            self._until, self._trial = now + self._pause_s, None
