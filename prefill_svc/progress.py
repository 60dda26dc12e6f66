"""Progress of a prompt: the rate of its computation and the time left, estimated from its chunks. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.request import PrefillProgress

INTERVAL_S = 0.1
"""Shortest time in seconds between two reports; all chunks between them count as one chunk."""

_LATEST = 32
"""Number of latest chunks from which the present speed of the worker is measured."""


@dataclass(frozen=True, slots=True)
class _TimedChunk:
    """A chunk of tokens `[start, end)` that was computed in `seconds`."""

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
    """Linear fit, by least squares over all chunks, of the time of a token as a function of its position."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._positions = self._squares = self._rise = 0.0

    def add(self, chunk: _TimedChunk) -> None:
        self._tokens += chunk.tokens
        self._seconds += chunk.seconds
        self._positions += chunk.tokens * chunk.middle
        self._squares += chunk.tokens * chunk.middle**2
        self._rise += chunk.seconds * chunk.middle

    def solve(self) -> tuple[float, float]:
        """Seconds of a token at position 0, and the seconds that each further position adds; neither is negative."""
        center, mean_s = self._positions / self._tokens, self._seconds / self._tokens
        spread = self._squares - self._positions * center
        slope = max((self._rise - center * self._seconds) / spread, 0.0) if spread > 0 else 0.0
        if (base := mean_s - slope * center) >= 0:
            return base, slope
        return 0.0, self._rise / self._squares


class PrefillEstimate:
    """Estimates the rate and the time left of one prompt of `total` tokens."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._fit = _Fit()
        self._latest: deque[_TimedChunk] = deque(maxlen=_LATEST)
        self._last: tuple[int, float] | None = None

    def record(self, done: int, now: float) -> PrefillProgress | None:
        """Record that `done` tokens are done at `now`, in seconds; the first call gives the number of cached tokens.

        Returns the progress to report, or None if the last report is younger than INTERVAL_S and the prompt is not
        complete. The progress has no rate and no time left before the first chunk was timed.
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
