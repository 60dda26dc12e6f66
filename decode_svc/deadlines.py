"""The deadline of each attempt's state, kept by one timer an attempt.

A timer does not judge: it queues the judgement behind all that has reached the loop by then, so that a result which
came in time counts, however late it is looked at.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from decode_svc.sequence import Attempt


class Deadlines:
    """Calls `overdue` for an attempt that has outstayed its state; lives on the asyncio loop."""

    def __init__(self, overdue: Callable[[Attempt], object]) -> None:
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        self._timers: dict[Attempt, asyncio.Handle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, attempt: Attempt) -> None:
        """Watch the deadline that the attempt has now, instead of the one before."""
        self.drop(attempt)
        if not math.isinf(attempt.life.deadline):
            self._timers[attempt] = self._loop.call_at(attempt.life.deadline, self._passed, attempt)

    def drop(self, attempt: Attempt) -> None:
        """Watch it no more."""
        if (timer := self._timers.pop(attempt, None)) is not None:
            timer.cancel()

    def _passed(self, attempt: Attempt) -> None:
        self._timers[attempt] = self._loop.call_soon(self._judge, attempt)

    def _judge(self, attempt: Attempt) -> None:
        if attempt.life.overdue(self._loop.time()):
            self.drop(attempt)
            self._overdue(attempt)
        else:
            self.set(attempt)
