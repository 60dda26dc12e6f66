"""A circuit breaker: a store that is gone costs one try once in a while, not one for each request."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Closed until a failure; then lets one try through after a pause, which doubles with each failed try."""

    def __init__(self, first_s: float = 1.0, most_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._pause_s = 0.0
        self._until = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether the last try succeeded."""
        return self._pause_s == 0.0

    @property
    def due(self) -> bool:
        """Whether a call would be allowed now; takes nobody's turn."""
        return self.closed or self._clock() >= self._until

    def allow(self) -> bool:
        """Whether a call may be made now; while open, one caller in a pause is told so."""
        if not self.due:
            return False
        if not self.closed:
            self._until, self._trying = self._clock() + self._pause_s, True
        return True

    def record_success(self) -> None:
        """A call was answered."""
        self._pause_s = 0.0

    def record_failure(self) -> None:
        """A call failed. Calls that were under way when the first one failed say nothing new."""
        if self.closed or self._trying:
            self._pause_s = min(self._most_s, self._pause_s * 2 or self._first_s)
            self._until, self._trying = self._clock() + self._pause_s, False
