"""How fast a prompt is computed, and when it will be done. Pure; times are passed in.

Attention makes each token take longer than the one before: one at position p takes about base + slope · p seconds.
So the time of a prompt is quadratic in its length. Base and slope are fitted to the latest chunks by least squares; the
weight of a chunk is its tokens. Times are those that pass: what other prompts take in between is part of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from baton.request import PrefillProgress

INTERVAL_S = 0.1
"""Shortest time between two reports; what is computed in between counts as one chunk."""

_CHUNKS = 32
"""Chunks of the fit: enough to tell the slope from noise, and few enough to follow when the worker gets busier."""


@dataclass(frozen=True, slots=True)
class _Chunk:
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


class PrefillEstimate:
    """Follows one prompt of `total` tokens from its first `record` on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._chunks: deque[_Chunk] = deque(maxlen=_CHUNKS)
        self._last: tuple[int, float] | None = None

    def record(self, done: int, now: float) -> PrefillProgress | None:
        """Record that `done` tokens are done at `now` (seconds), the first time those found in a cache.

        Returns the progress to report, or None if the last one is younger than INTERVAL_S and this is not the end.
        """
        if self._last is not None:
            before, since = self._last
            if done < self._total and now < since + INTERVAL_S:
                return None
            self._chunks.append(_Chunk(before, done, now - since))
        self._last = done, now
        if not self._chunks or not any(chunk.seconds for chunk in self._chunks):
            return PrefillProgress(done, self._total)
        base, slope = fit(self._chunks)
        rest = self._total - done
        return PrefillProgress(
            done,
            self._total,
            tokens_per_second=1 / (base + slope * done),
            seconds_left=rest * (base + slope * (done + rest / 2)),
        )


def fit(chunks: Collection[_Chunk]) -> tuple[float, float]:
    """Seconds of a token at position 0, and how many more each position adds; noise never makes that less than 0."""
    tokens = sum(chunk.tokens for chunk in chunks)
    mean_s = sum(chunk.seconds for chunk in chunks) / tokens
    center = sum(chunk.tokens * chunk.middle for chunk in chunks) / tokens
    spread = sum(chunk.tokens * (chunk.middle - center) ** 2 for chunk in chunks)
    rise = sum((chunk.middle - center) * chunk.seconds for chunk in chunks)
    slope = max(rise / spread, 0.0) if spread else 0.0
    return mean_s - slope * center, slope
