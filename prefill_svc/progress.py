"""Progress of a prompt: the rate of its computation and the time left, estimated from its latest chunks. Pure."""

from __future__ import annotations

from collections import deque

from baton.request import PrefillProgress

INTERVAL_S = 0.1
"""Shortest time in seconds between two reports; all chunks between them count as one chunk."""

_LATEST = 32
"""Number of latest chunks from which the rate is measured."""


class PrefillEstimate:
    """Estimates the rate and the time left of one prompt of `total` tokens."""

    def __init__(self, total: int) -> None:
        self._total = total
        # Ends of the latest chunks: the number of tokens done, and the time in seconds.
        self._ends: deque[tuple[int, float]] = deque(maxlen=_LATEST + 1)

    def record(self, done: int, now: float) -> PrefillProgress | None:
        """Record that `done` tokens are done at `now`, in seconds; the first call gives the number of cached tokens.

        Returns the progress to report, or None if the last report is younger than INTERVAL_S and the prompt is not
        complete. The progress has no rate and no time left before the first chunk was timed. The time left assumes the
        present rate; it is too short for a long prompt, whose later tokens take longer.
        """
        if not self._ends:
            self._ends.append((done, now))
        before, since = self._ends[-1]
        if before < done < self._total and now < since + INTERVAL_S:
            return None
        if done > before:
            self._ends.append((done, now))
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        if end <= start:
            return PrefillProgress(done, self._total)
        rate = (last - first) / (end - start)
        return PrefillProgress(done, self._total, tokens_per_second=rate, seconds_left=(self._total - done) / rate)
