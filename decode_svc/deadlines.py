"""Deadlines of attempts: one timer for each attempt, set for the state that it is in.

A timer that fires does not end the attempt at once. It queues the check behind all events that have already reached the
event loop. So a result that came in time counts, even if it is processed late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from decode_svc.sequence import DecodeAttempt


class Deadlines:
    """Calls `overdue` for an attempt that stayed in its state for too long; used on the asyncio loop only."""

    def __init__(self, overdue: Callable[[DecodeAttempt], object]) -> None:
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        self._timers: dict[DecodeAttempt, asyncio.Handle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, attempt: DecodeAttempt) -> None:
        """Watch the attempt's current deadline, in place of the one before."""
        self.drop(attempt)
        if not math.isinf(attempt.life.deadline):
            self._timers[attempt] = self._loop.call_at(attempt.life.deadline, self._on_timer, attempt)

    def drop(self, attempt: DecodeAttempt) -> None:
        """Stop watching the attempt."""
        if (timer := self._timers.pop(attempt, None)) is not None:
            timer.cancel()

    def _on_timer(self, attempt: DecodeAttempt) -> None:
        self._timers[attempt] = self._loop.call_soon(self._check, attempt)

    def _check(self, attempt: DecodeAttempt) -> None:
        if attempt.life.is_overdue(self._loop.time()):
            self.drop(attempt)
            self._overdue(attempt)
        else:
            self.set(attempt)
