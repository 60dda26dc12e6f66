"""A circuit breaker: while a store does not answer, only one call in a while tries it, and the others fail at once."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Closed until a call fails; then it allows one call after each pause, which doubles with each failed call."""

    def __init__(self, first_s: float = 1.0, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._pause_s = 0.0
        self._until = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether the last call succeeded."""
        return self._pause_s == 0.0

    @property
    def due(self) -> bool:
        """Whether a call would be allowed now; does not use up the one call of a pause."""
        return self.closed or self._clock() >= self._until

    def allow(self) -> bool:
        """Whether the caller may make a call now; while the breaker is open, one call in each pause."""
        if not self.due:
            return False
        if not self.closed:
            self._until, self._trying = self._clock() + self._pause_s, True
        return True

    def record_success(self) -> None:
        """Record that a call was answered."""
        self._pause_s = 0.0

    def record_failure(self) -> None:
        """Record that a call failed. Calls that were running when the first one failed do not count."""
        if self.closed or self._trying:
            self._pause_s = min(self._most_s, self._pause_s * 2 or self._first_s)
            self._until, self._trying = self._clock() + self._pause_s, False
