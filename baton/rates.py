"""Averages in which older samples count less. Pure; times are passed in."""

from __future__ import annotations

import math

DECAY = 0.8

UNKNOWN_PREFILL_RATE = 1000.0
"""Assumed rate of a prefill worker in tokens/s, before one is measured."""


class DecayingRate:
    """Units per second over recent samples; a sample counts DECAY times as much as the sample after it.

    It is the sum of units divided by the sum of seconds, so a sample counts in proportion to its duration.
    """

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Add a sample of `units` units in `seconds` seconds."""
        self._units = DECAY * self._units + units
        self._seconds = DECAY * self._seconds + seconds

    @property
    def value(self) -> float:
        """Units per second; 0 while unknown."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class DecayingAverage:
    """An exponentially weighted mean: each sample moves it by `weight` of the difference; the first sample sets it."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._value: float | None = None

    def add(self, sample: float) -> None:
        """Move the mean towards a sample."""
        self._value = sample if self._value is None else self._value + self._weight * (sample - self._value)

    @property
    def value(self) -> float:
        """The mean; 0 without samples."""
        return self._value or 0.0


class DecayingSum:
    """A sum whose parts fade to 1/e in `time_s`; times are seconds on the caller's clock."""

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self._sum = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add a part."""
        self._sum, self._at = self.value(now) + amount, now

    def value(self, now: float) -> float:
        """The sum at a time that is not before the last addition."""
        return self._sum * math.exp((self._at - now) / self._time_s)
