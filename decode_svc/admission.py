"""How many sequences a worker takes on: those in its slots, and those that will find one when they are ready. Pure.

A sequence that is prefilled and then waits for a slot makes its reader wait between the first and the second token, so
a reservation is granted only while the sequences held, wherever they are, and the new ones are no more than

    slots + ahead        ahead = completions per second · seconds from reservation to readiness

By Little's law `ahead` sequences end while a new one is prefilled and transferred. It is measured, and at most a
quarter of the slots, since a measurement may be late. A worker that holds nothing takes any request: one may have more
choices than there are slots.
"""

from __future__ import annotations

import math

from baton.errors import Overloaded

SPAN_S = 10.0
"""Completions count for the rate with a weight that falls to 1/e in this time."""

MIN_RETRY_S, MAX_RETRY_S, USUAL_RETRY_S = 0.02, 5.0, 0.5

_LEAD_WEIGHT = 0.1


class Admission:
    """Measures what becomes of sequences; times are seconds on the caller's clock."""

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._began = self._at = now
        self._weight = 0.0
        self._lead_s = 0.0

    def ended(self, now: float, count: int = 1) -> None:
        """`count` sequences have given back their places."""
        self._decay(now)
        self._weight += count

    def ready(self, lead_s: float) -> None:
        """A sequence was ready to run `lead_s` seconds after its reservation."""
        self._lead_s = lead_s if not self._lead_s else self._lead_s + _LEAD_WEIGHT * (lead_s - self._lead_s)

    def rate(self, now: float) -> float:
        """Completions per second of late."""
        self._decay(now)
        # A span that has not been lived through yet counts as far as it has.
        return self._weight / (SPAN_S * -math.expm1(-max(now - self._began, 1.0) / SPAN_S))

    def ahead(self, now: float) -> int:
        """Sequences beyond the slots that will find one in time."""
        return min(int(self.rate(now) * self._lead_s), self._slots // 4)

    def check(self, held: int, choices: int, now: float) -> None:
        """Raise Overloaded, with a time to retry after, when `choices` more sequences would wait for slots."""
        ahead = self.ahead(now)
        beyond = held + choices - self._slots - ahead
        if held and beyond > 0:
            raise Overloaded(
                f"{held} sequences are held for {self._slots} slots, of which {ahead} will be free in time; "
                f"{choices} more would wait",
                self.retry_after(now, beyond),
            )

    def retry_after(self, now: float, wanted: int = 1) -> float:
        """Seconds in which `wanted` sequences are likely to end."""
        rate = self.rate(now)
        seconds = wanted / rate if rate > 0 else USUAL_RETRY_S
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def _decay(self, now: float) -> None:
        self._weight *= math.exp((self._at - now) / SPAN_S)
        self._at = now
