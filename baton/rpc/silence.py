"""Heartbeats, and the detection of a stream on which no message came for too long.

After a process was stopped, or its event loop was blocked, all its timers fire at once, before it has read the messages
that came meanwhile. So a check that runs late does not end the stream, but waits once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HEARTBEAT_S = 1.0
"""Longest time between two messages of a live peer."""

SILENCE_S = 5.0
"""A peer that sent nothing for so long is dead, stopped or cut off."""

LATE_S = 0.5
"""A timer that fires so much after its time tells that this process was stopped or busy, and nothing of its peers."""


class SilenceTimer:
    """Calls `on_silence` once if `reset` is not called for `limit_s` seconds; use as a context manager."""

    def __init__(self, limit_s: float, on_silence: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.expired = False
        """Whether the stream was silent for too long."""
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._checked_at = 0.0
        self._expires_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> SilenceTimer:
        self.reset()
        self._arm(self._expires_at)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching the stream."""
        if self._timer is not None:
            self._timer.cancel()

    def ended_call(self) -> bool:
        """Whether a CancelledError of this task comes from `on_silence`, and not from who cancels the task."""
        # A caller that had the task in a variable would be part of a cycle: the task keeps the error, this its
        # traceback, and the traceback the variable. All that the call holds would wait for the garbage collector.
        task = asyncio.current_task()
        return self.expired and not (task is not None and task.cancelling())

    def reset(self) -> None:
        """Start again, because a message came."""
        self._expires_at = self._loop.time() + self.limit_s

    def _arm(self, due: float) -> None:
        self._checked_at = due
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._expires_at:
            self._arm(self._expires_at)
        elif now > self._checked_at + LATE_S:
            self._arm(now + min(LATE_S, self.limit_s))
        else:
            self.expired = True
            self._on_silence()
