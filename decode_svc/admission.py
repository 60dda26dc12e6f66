"""Admission: whose turn for a place in the batch and for pages it is: a reservation's, or a fork's. Pure.

    reserve ── malformed, or larger than the worker ─▶ Refused
       │────── the batch lacks pages, all places are taken, pages are missing ─▶ Overloaded, try again
       │                       a claim keeps pages for who lacks them (`claims`)
       │────── it has several choices, and contexts that are kept for forks have half of the pages ─▶ Overloaded
       └─────▶ Attempt, which counts as one sequence, however many choices it has
    forks ───▶ sequences of further choices, as places and pages come free; to be asked for whenever that may be so

**Places** (`SlotForecast`). A sequence that is prefilled and then waits for a slot makes its reader wait between the
first and the second token, so a reservation is granted only while the sequences held, wherever they are, and the new
one are no more than

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

**Pages** (`Admission`). Of several attempts the oldest and the one with the fewest pending choices lead alternately
(`Attempts.pending`). A fork that lacks pages waits, and keeps nobody from a place.

A context is kept until the last choice of its request is forked, long after the first ones have ended. Contexts that
are kept have half of the pages at most, or there is only one; so they leave room for others, whatever the number of
requests with many choices. Who waits for a part of that half has a claim on it.

Why all forks end. A pending fork waits for a place, for the batch to have room for what is paused, or for pages.
Places come free, since all that runs ends, and forks get every second one. For the rest there is a rule: when nothing
progresses, that is when all sequences are paused and nothing is on its way here, a fork may start though the batch
lacks pages. There is always one that can: no pages are in use then but those of the contexts that are kept, and the
attempt that was granted last among these was granted one choice's pages beside all these contexts, its own page that
forks can't share included. So in the end no context is kept, and the oldest paused sequence has the pool.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from baton.engine.contract import Engine
from baton.errors import OutOfPages, Overloaded
from baton.rates import DecayingAverage
from decode_svc.attempts import Attempts
from decode_svc.claims import FORKS, NOBODY, Claimant, Claims, ContextsKept, PagesKept
from decode_svc.messages import Reserve
from decode_svc.sequence import Attempt, Sequence

T = TypeVar("T")

CONTEXTS_SHARE = 2
"""One in so many pages may be kept in contexts whose further choices are still to be forked."""

SPAN_S = 10.0
"""Completions count for the rate with a weight that falls to 1/e in this time."""

MIN_RETRY_S, MAX_RETRY_S, USUAL_RETRY_S = 0.02, 5.0, 0.5

KEEP, KEEP_S = 8, 0.5
"""One slot in so many is not for forks, or as many as are wanted by others in so many seconds."""

OFFER_S, FOLLOW_S = 1.0, 0.1
"""Seconds for which free places are left for reservations: after a refusal, and after the grant that follows it."""

_LEAD_WEIGHT = 0.1


class SlotForecast:
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


@dataclass(slots=True)
class Forked:
    """What came of the forks whose turn it was: sequences for the batch, and attempts that the engine has failed."""

    started: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Attempt, Exception]] = field(default_factory=list)


class Batch(Protocol):
    """What is known of the generation batch."""

    @property
    def short_of_pages(self) -> bool:
        """Whether it lacks pages."""

    @property
    def paused(self) -> int:
        """Sequences that left it for want of pages, and wait to come back."""


class Admission:
    """Decides for one worker; times are seconds on the caller's clock.

    `reclaim` gives back pages that are held for no request; False if there were none.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        forecast: SlotForecast,
        batch: Batch,
        reclaim: abc.Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._attempts = attempts
        self.forecast = forecast
        self._batch = batch
        self._reclaim = reclaim
        self.claims = Claims()
        self._context_claims = Claims()

    def reserve(self, session: int, request: Reserve, now: float, limit_s: float = math.inf) -> Attempt:
        """The attempt with its pages. Raises Refused for what can never be, Overloaded for what can't be now."""
        need, claimant = self._attempts.check(session, request).pages, (session, request.key)
        self.claims.renew(claimant, now)
        self._context_claims.renew(claimant, now)
        if self._batch.short_of_pages:
            stats = self._engine.stats()
            raise Overloaded(
                f"the batch lacks pages, {stats.free + stats.cached} of {stats.total} are free; "
                f"{self._batch.paused} sequences are paused"
            )
        if request.choices > 1:
            # Before a place is asked for, which would be left free for it.
            self._check_contexts(claimant, self._engine.spec.pages_for(request.context_tokens), now)
        self.forecast.check(self._attempts.sequences, now)
        try:
            self._check_kept(claimant, need, now)
            attempt = self._with_reclaim(lambda: self._attempts.reserve(session, request, now, limit_s))
        except OutOfPages:
            self.claims.want(claimant, need, now)
            raise
        self.claims.granted(claimant, self._free())
        self._context_claims.granted(claimant, self._free_for_contexts)
        self.forecast.granted(now, pending=bool(self._attempts.pending))
        return attempt

    def drop(self, session: int) -> None:
        """The session has ended, and claims nothing any more."""
        self.claims.drop(session)
        self._context_claims.drop(session)

    def forks(self, now: float) -> Forked:
        """Start the forks whose turn it is; each sequence is to be given a slot, and what failed is to be ended."""
        forked = Forked()
        while turns := self._attempts.pending:
            if not self._may_fork(now):
                return forked
            started = self._fork(turns, forked, now)
            # Its turn is over, also where pages are missing.
            self.forecast.forked()
            if not started:
                return forked
        self.forecast.forked()
        return forked

    def room(self, now: float) -> int:
        """Tokens of the largest context that a request without a claim could have now."""
        free = self._free()
        return self._attempts.room(free - self.claims.kept(NOBODY, free, now))

    def wake_at(self, now: float) -> float:
        """When `forks` is to be called though nothing happens; infinite if that is not needed."""
        return self.forecast.wake_at(self._attempts.sequences, now) if self._attempts.pending else math.inf

    @property
    def _moving(self) -> bool:
        return any(attempt.progresses for attempt in self._attempts)

    def _may_fork(self, now: float) -> bool:
        if self._moving:
            return not self._batch.short_of_pages and self.forecast.may_fork(self._attempts.sequences, now)
        # Paused sequences have no place in the batch.
        return self.forecast.may_fork(0, now)

    def _fork(self, turns: abc.Sequence[Attempt], forked: Forked, now: float) -> bool:
        """Fork the first that has the pages; False if there is none, and then they are claimed."""
        moving = self._moving
        for attempt in turns:
            try:
                if moving:
                    self._check_kept(FORKS, self._attempts.fork_pages(attempt), now)
                forked.started.append(self._with_reclaim(partial(self._attempts.fork, attempt)))
            except OutOfPages:
                continue
            except Exception as error:
                forked.failed.append((attempt, error))
                return False
            self.claims.granted(FORKS, self._free())
            return True
        self.claims.want(FORKS, self._fork_claim(turns), now)
        return False

    def _fork_claim(self, turns: abc.Sequence[Attempt]) -> int:
        """Pages of the first fork that finds room beside all contexts that are kept; of the smallest if none does."""
        needs = [self._attempts.fork_pages(attempt) for attempt in turns]
        room = self._engine.spec.pages - self._attempts.context_pages
        return next((need for need in needs if need <= room), min(needs))

    def _check_kept(self, claimant: Claimant, need: int, now: float) -> None:
        """Raise OutOfPages where these pages are set aside for another claim; all are counted, shared ones too."""
        free = self._free()
        if (kept := self.claims.kept(claimant, free, now)) and need > free - kept:
            raise PagesKept(need, free, self._engine.spec.pages, kept)

    def _check_contexts(self, claimant: Claimant, pages: int, now: float) -> None:
        """Raise ContextsKept, and leave a claim, where contexts to be kept would have more than their share."""
        # One that is larger than the share is kept alone.
        most, free = self._most_for_contexts, self._free_for_contexts
        need = min(pages, most)
        kept = self._context_claims.kept(claimant, free, now)
        if need > free - kept:
            self._context_claims.want(claimant, need, now)
            raise ContextsKept(pages, free - kept, most)

    @property
    def _most_for_contexts(self) -> int:
        return self._engine.spec.pages // CONTEXTS_SHARE

    @property
    def _free_for_contexts(self) -> int:
        return max(self._most_for_contexts - self._attempts.kept_pages, 0)

    def _free(self) -> int:
        stats = self._engine.stats()
        return stats.free + stats.cached

    def _with_reclaim(self, take: abc.Callable[[], T]) -> T:
        """What `take` yields, if need be with the pages that are held for no request."""
        try:
            return take()
        except OutOfPages:
            if not self._reclaim():
                raise
        return take()
