"""How many sequences a worker takes on, and whether the next place goes to a reservation or to a fork. Pure.

A sequence that is prefilled and then waits for a slot makes its reader wait between the first and the second token, so
a reservation is granted only while the sequences held, wherever they are, and the new one are no more than

    slots + ahead        ahead = completions per second · seconds from reservation to readiness

By Little's law `ahead` sequences end while a new one is prefilled and transferred. It is measured, and at most a
quarter of the slots, since a measurement may be late.

A request with many choices is one sequence here. Its further choices are forks, which take places as these come free:

- Forks leave places free for others, so that a request that comes now finds one, though many choices wait: one in
  `KEEP`, or as many as reservations were granted in `KEEP_S` of late if that is more, but never more than half.
- After a reservation was granted while forks are pending, a fork is owed the next place, whichever it is.
- While a reservation that was refused may come back, for `OFFER_S`, forks take only what they are owed. Its router asks
  again as soon as it hears of a free place; for those who wait behind it, places are left for `FOLLOW_S` after a grant.

So where both sides always want more, they take turns, and neither starves, and where one does not come, the other has
all places a moment later.
"""

from __future__ import annotations

import math

from baton.errors import Overloaded
from baton.rates import DecayingAverage

SPAN_S = 10.0
"""Completions count for the rate with a weight that falls to 1/e in this time."""

MIN_RETRY_S, MAX_RETRY_S, USUAL_RETRY_S = 0.02, 5.0, 0.5

KEEP, KEEP_S = 8, 0.5
"""One slot in so many is not for forks, or as many as are wanted by others in so many seconds."""

OFFER_S, FOLLOW_S = 1.0, 0.1
"""Seconds for which free places are left for reservations: after a refusal, and after the grant that follows it."""

_LEAD_WEIGHT = 0.1


class Admission:
    """Measures what becomes of sequences; times are seconds on the caller's clock."""

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._began = self._at = now
        self._weight = self._grants = 0.0
        self._lead_s = DecayingAverage(_LEAD_WEIGHT)
        self._owed = False
        self.offered_until = -math.inf
        """Until when forks take only what they are owed."""

    def ended(self, now: float, count: int = 1) -> None:
        """`count` sequences have given back their places."""
        self._decay(now)
        self._weight += count

    def ready(self, lead_s: float) -> None:
        """A sequence was ready to run `lead_s` seconds after its reservation."""
        self._lead_s.add(lead_s)

    def rate(self, now: float) -> float:
        """Completions per second of late."""
        self._decay(now)
        return self._weight / self._span_s(now)

    def kept(self, now: float) -> int:
        """Places that forks leave free."""
        self._decay(now)
        wanted = int(KEEP_S * self._grants / self._span_s(now))
        return min(max(self._slots // KEEP, wanted), self._slots // 2)

    def ahead(self, now: float) -> int:
        """Sequences beyond the slots that will find one in time."""
        return min(int(self.rate(now) * self._lead_s.value), self._slots // 4)

    def check(self, held: int, now: float) -> None:
        """Raise Overloaded, with a time to retry after, when one more sequence would wait for a slot."""
        ahead = self.ahead(now)
        beyond = held + self._owed + 1 - self._slots - ahead
        if beyond > 0:
            self.offered_until = now + OFFER_S
            owed = ", one of them promised to a choice that waits" if self._owed else ""
            raise Overloaded(
                f"{held} sequences are held for {self._slots} slots, of which {ahead} will be free in time{owed}; "
                "one more would wait",
                self.retry_after(now, beyond),
            )

    def granted(self, now: float, *, pending: bool) -> None:
        """A reservation was granted; the next place is a fork's if some are `pending`."""
        self._decay(now)
        self._grants += 1
        if now < self.offered_until:
            self.offered_until = now + FOLLOW_S
        self._owed = pending

    def may_fork(self, held: int, now: float) -> bool:
        """Whether a fork may start now."""
        if self._owed or held >= self._slots:
            return held < self._slots
        return now >= self.offered_until and held + self.kept(now) < self._slots

    def wake_at(self, held: int, now: float) -> float:
        """When a fork may start though nothing happens until then; infinite if there is no such time."""
        if now < self.offered_until:
            return self.offered_until
        # What is kept for reservations that came often falls with the time.
        return now + KEEP_S if held + self._slots // KEEP < self._slots <= held + self.kept(now) else math.inf

    def forked(self) -> None:
        """A fork has had its turn: it has started, lacks pages, or none is pending any more."""
        self._owed = False

    def retry_after(self, now: float, wanted: int = 1) -> float:
        """Seconds in which `wanted` sequences are likely to end."""
        rate = self.rate(now)
        seconds = wanted / rate if rate > 0 else USUAL_RETRY_S
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def _decay(self, now: float) -> None:
        fading = math.exp((self._at - now) / SPAN_S)
        self._weight *= fading
        self._grants *= fading
        self._at = now

    def _span_s(self, now: float) -> float:
        """Seconds that the weights stand for; a span that has not been lived through yet counts as far as it has."""
        return SPAN_S * -math.expm1(-max(now - self._began, 1.0) / SPAN_S)
