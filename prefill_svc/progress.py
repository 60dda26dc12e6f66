"""Progress of a prompt: the rate of its computation and the time left, estimated from its chunks. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.request import PrefillProgress

INTERVAL_S = 0.1
"""Shortest time between two reports; all chunks in between count as one."""

_LATEST = 32
"""Chunks that tell how busy the worker is now."""


@dataclass(frozen=True, slots=True)
class _TimedChunk:
    """Tokens `start` to `end`, computed in `seconds`."""

    start: int
    end: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


class _Fit:
    """Seconds of a token at position 0, and how many more each position adds: least squares over all chunks."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._positions = self._squares = self._rise = 0.0

    def add(self, chunk: _TimedChunk) -> None:
        self._tokens += chunk.tokens
        self._seconds += chunk.seconds
        self._positions += chunk.tokens * chunk.middle
        self._squares += chunk.tokens * chunk.middle**2
        self._rise += chunk.seconds * chunk.middle

    def solve(self) -> tuple[float, float]:
        """Neither is less than 0, whatever the noise."""
        center, mean_s = self._positions / self._tokens, self._seconds / self._tokens
        spread = self._squares - self._positions * center
        slope = max((self._rise - center * self._seconds) / spread, 0.0) if spread > 0 else 0.0
        if (base := mean_s - slope * center) >= 0:
            return base, slope
        return 0.0, self._rise / self._squares


class PrefillEstimate:
    """Follows one prompt of `total` tokens from its first `record` on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._fit = _Fit()
        self._latest: deque[_TimedChunk] = deque(maxlen=_LATEST)
        self._last: tuple[int, float] | None = None

    def record(self, done: int, now: float) -> PrefillProgress | None:
        """Record that `done` tokens are done at `now` (seconds), the first time those found in a cache.

        Returns the progress to report, or None if the last one is younger than INTERVAL_S and this is not the end. It
        has no rate and no time left as long as no token is known to take time.
        """
        if self._last is None:
            self._last = done, now
        before, since = self._last
        if before < done < self._total and now < since + INTERVAL_S:
            return None
        if done > before:
            chunk = _TimedChunk(before, done, now - since)
            self._fit.add(chunk)
            self._latest.append(chunk)
            self._last = done, now
        latest_s = sum(chunk.seconds for chunk in self._latest)
        if latest_s <= 0:
            return PrefillProgress(done, self._total)
        base, slope = self._fit.solve()
        busy = latest_s / sum(chunk.tokens * (base + slope * chunk.middle) for chunk in self._latest)
        rest = self._total - done
        return PrefillProgress(
            done,
            self._total,
            tokens_per_second=1 / (busy * (base + slope * done)),
            seconds_left=busy * rest * (base + slope * (done + rest / 2)),
        )
