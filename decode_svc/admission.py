"""Admission: the choice of the reservation or fork that gets the next slot of the batch, and pages. Pure.

    admit ── malformed ─▶ InvalidRequest; larger than the worker ─▶ ReservationTooLarge
       │──── no slot is free in time ─▶ Overloaded: try again
       │──── too few pages are free, or the batch or a claim needs them ─▶ OutOfPages
       └───▶ DecodeAttempt, which counts as one sequence, however many choices it has
    start_forks ─▶ sequences of further choices; call it whenever a slot or pages may have come free

**Slots** (`SlotForecast`).

- A reservation is granted only if there are then at most slots + lookahead sequences, in any state.
- `lookahead` is the number of completions per second times the seconds from a reservation until its sequence is ready:
  so many sequences end in the meantime (Little's law). It is at most a quarter of the slots.
- Further choices of a request are forks. Reservations and forks take turns (decision 10):

  1. Forks leave some slots free for new requests.
  2. After a refusal, forks take no slot for REFUSED_PRIORITY_S seconds.
  3. After a grant while forks are pending, the next slot is a fork's; this overrides the other two.

**Pages** (`Admission`). A fork that lacks pages waits, and blocks no other sequence. Contexts that wait for forks may
use at most half of the pages. A single such context may use more. The oldest attempt and the attempt with the fewest
pending choices take turns. Every fork ends; decision 10 has the proof.

After a preemption, the pages that the batch needs for its next steps do not count as free (`BatchPages.kept_pages`).

**Claims** (`Claims`) keep small reservations from starving large ones. A reservation that is refused because pages are
missing leaves a claim. Half of the pages that are free then, and half of the pages that come free later, are set aside
for the oldest claim. Each session has at most one claim, and so have all pending forks together. Decision 11 has the
bound on the wait.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from baton.engine.contract import Engine
from baton.errors import InvalidRequest, OutOfPages, Overloaded
from baton.kv.cached_blocks import SLICE_NODES
from baton.rates import DecayingAverage, DecayingSum
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.reservation import ReservationSize, size_reservation
from decode_svc.scheduler import BatchPages, DecodeSequence

T = TypeVar("T")

CONTEXTS_DIVISOR = 2
"""Contexts that are kept for further choices use at most 1 / CONTEXTS_DIVISOR of the pages."""

SPAN_S = 10.0
"""Seconds after which a completion counts with a weight of 1/e."""

MIN_RETRY_S, MAX_RETRY_S, USUAL_RETRY_S = 0.02, 5.0, 0.5

FORK_HEADROOM_DIVISOR, FORK_HEADROOM_S = 8, 0.5
"""Forks leave 1 / FORK_HEADROOM_DIVISOR of the slots free, or as many slots as were reserved in the last
FORK_HEADROOM_S seconds if that is more."""

REFUSED_PRIORITY_S, GRANTED_PRIORITY_S = 1.0, 0.1
"""For REFUSED_PRIORITY_S seconds after a refusal, forks take no free slot, so that the refused reservation can come
back. Each grant in that time shortens the rest to GRANTED_PRIORITY_S seconds."""

CLAIM_S, CLAIM_RENEW_S = 3.0, 1.0
"""Seconds after which a claim ends if it is not renewed, and after which its owner is told to ask again."""

Claimant = tuple[int, AttemptKey | None]
"""A session and its attempt."""

FORKS: Claimant = (-1, None)
"""The claimant of all pending forks."""

_LEAD_WEIGHT = 0.1


class SlotForecast:
    """Measures how fast slots come free; times are seconds on the caller's clock."""

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._began = now
        self._ends, self._grants = DecayingSum(SPAN_S), DecayingSum(SPAN_S)
        self._lead_s = DecayingAverage(_LEAD_WEIGHT)
        self._fork_owed = False
        """Whether the next free slot is for a fork, because a reservation took the last one."""
        self.forks_wait_until = -math.inf
        """Time before which free slots are for a reservation that was just refused, unless a fork is owed one."""

    def record_end(self, now: float, count: int = 1) -> None:
        """Record that `count` sequences have ended."""
        self._ends.add(count, now)

    def record_ready(self, lead_s: float) -> None:
        """Record that a sequence was ready to run `lead_s` seconds after its reservation."""
        self._lead_s.add(lead_s)

    def rate(self, now: float) -> float:
        """Recent completions per second."""
        return self._ends.value(now) / self._span_s(now)

    def fork_headroom(self, now: float) -> int:
        """Number of slots that forks leave free."""
        wanted = int(FORK_HEADROOM_S * self._grants.value(now) / self._span_s(now))
        return min(max(self._slots // FORK_HEADROOM_DIVISOR, wanted), self._slots // 2)

    def lookahead(self, now: float) -> int:
        """Number of sequences that may be reserved beyond the slots, because slots will come free in time.

        It is completions per second × seconds until a reservation is ready, and at most a quarter of the slots.
        """
        return min(int(self.rate(now) * self._lead_s.value), self._slots // 4)

    def check(self, held: int, now: float) -> None:
        """Raise Overloaded, with the seconds after which to retry, if one more sequence would wait for a slot."""
        ahead = self.lookahead(now)
        beyond = held + self._fork_owed + 1 - self._slots - ahead
        if beyond > 0:
            self.forks_wait_until = now + REFUSED_PRIORITY_S
            owed = ", one of them promised to a choice that waits" if self._fork_owed else ""
            raise Overloaded(
                f"{held} sequences are held for {self._slots} slots, of which {ahead} will be free in time{owed}; "
                "one more would wait",
                self.retry_after(now, beyond),
            )

    def record_grant(self, now: float, *, pending: bool) -> None:
        """Record that a reservation was granted; if forks are `pending`, the next slot belongs to a fork."""
        self._grants.add(1, now)
        if now < self.forks_wait_until:
            self.forks_wait_until = now + GRANTED_PRIORITY_S
        self._fork_owed = pending

    def may_fork(self, held: int, now: float) -> bool:
        """Whether a fork may start now, given that `held` sequences exist."""
        if self._fork_owed or held >= self._slots:
            return held < self._slots
        return now >= self.forks_wait_until and held + self.fork_headroom(now) < self._slots

    def wake_at(self, held: int, now: float) -> float:
        """Time at which a fork may start without any other event; infinite if there is none."""
        if now < self.forks_wait_until:
            return self.forks_wait_until
        # The headroom for frequent reservations shrinks with time.
        least = self._slots // FORK_HEADROOM_DIVISOR
        shrinks = held + least < self._slots <= held + self.fork_headroom(now)
        return now + FORK_HEADROOM_S if shrinks else math.inf

    def record_fork(self) -> None:
        """Record that forks had their turn: one has started, the next one lacks pages, or none is pending."""
        self._fork_owed = False

    def retry_after(self, now: float, wanted: int = 1) -> float:
        """Seconds in which `wanted` sequences will probably end."""
        rate = self.rate(now)
        seconds = wanted / rate if rate > 0 else USUAL_RETRY_S
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def _span_s(self, now: float) -> float:
        """Seconds that the weights stand for; less at first, because only the time since the start counts."""
        return SPAN_S * -math.expm1(-max(now - self._began, 1.0) / SPAN_S)


@dataclass(slots=True)
class _Claim:
    claimant: Claimant
    pages: int
    renewed_at: float


class Claims:
    """All claims on a worker's pages; times are seconds on the caller's clock.

    `record_free` must be called with the number of free pages before each question.
    """

    def __init__(self) -> None:
        self._claims: dict[int, _Claim] = {}
        self._first: _Claim | None = None
        # Twice the pages set aside for the first claim, and the number of free pages when that was computed.
        self._set_aside_doubled = self._free = 0

    def record_free(self, free: int, now: float) -> None:
        """Record that `free` pages are free: half of those that came free since the last call are set aside.

        Claims that were not renewed in time end here.
        """
        for session_number, claim in list(self._claims.items()):
            if now >= claim.renewed_at + CLAIM_S:
                del self._claims[session_number]
        first = next(iter(self._claims.values()), None)
        if first is not self._first:
            self._first, self._set_aside_doubled, self._free = first, 0, 0
        if first is not None:
            self._set_aside_doubled = min(max(self._set_aside_doubled + free - self._free, 0), 2 * first.pages)
            self._free = free

    def pages_set_aside(self, claimant: Claimant | None = None) -> int:
        """Number of pages that were set aside, at the last `record_free`, for claimants other than this one."""
        return 0 if self._first is None or self._first.claimant == claimant else -(-self._set_aside_doubled // 2)

    def add(self, claimant: Claimant, pages: int, now: float) -> None:
        """Record that `pages` pages were not free; renews the claim, or makes one if the session has none."""
        claim = self._claims.get(claimant[0])
        if claim is None or now >= claim.renewed_at + CLAIM_S:
            self._claims.pop(claimant[0], None)
            self._claims[claimant[0]] = _Claim(claimant, pages, now)
        elif claim.claimant == claimant:
            claim.pages, claim.renewed_at = pages, now

    def renew(self, claimant: Claimant, now: float) -> None:
        """Record that the claimant asked again, whatever the answer is."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant and now < claim.renewed_at + CLAIM_S:
            claim.renewed_at = now

    def remove_granted(self, claimant: Claimant, free: int) -> None:
        """Remove the claim of a claimant that got its pages, or has none; `free` pages are left."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant:
            del self._claims[claimant[0]]
        self._free = free

    def cancel(self, claimant: Claimant) -> bool:
        """Remove the claim of a claimant that does not ask again; returns whether it had one."""
        claim = self._claims.get(claimant[0])
        if claim is None or claim.claimant != claimant:
            return False
        del self._claims[claimant[0]]
        return True

    def drop_session(self, session_number: int) -> None:
        """Remove the claim of a session that has ended."""
        self._claims.pop(session_number, None)


@dataclass(slots=True)
class ForkResult:
    """Results of `Admission.start_forks`: sequences for the batch, and attempts whose fork the engine refused."""

    started: list[DecodeSequence] = field(default_factory=list)
    failed: list[tuple[DecodeAttempt, Exception]] = field(default_factory=list)


class Admission:
    """Decides for one worker; times are seconds on the caller's clock.

    `reserve_tokens` is the most outputs of a choice for which pages are reserved. `reclaim` frees pages that no request
    holds, and returns False if there were none.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        reserve_tokens: int,
        forecast: SlotForecast,
        batch_pages: BatchPages,
        reclaim: abc.Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._attempts = attempts
        self._reserve_tokens = reserve_tokens
        self.forecast = forecast
        self._batch_pages = batch_pages
        self._reclaim = reclaim
        self.claims = Claims()
        self._context_claims = Claims()
        self._oldest_leads = True
        """Whether the oldest attempt, not the one with the fewest pending choices, has the next turn to fork."""

    def evict_for(self, session_number: int, reservation: Reserve, now: float) -> bool:
        """Evict a slice of the cached blocks that a long context replaces; False if `admit` should be called now.

        Nothing is evicted for a reservation that would be refused.
        """
        if self._engine.spec.pages_for(reservation.context_tokens) <= SLICE_NODES:
            return False
        try:
            size = self._check(session_number, reservation, now)
        except (InvalidRequest, OutOfPages, Overloaded):
            return False
        return self._engine.evict_for(size.tokens, reservation.pinnable_digests, reservation.context_tokens)

    def admit(self, session_number: int, reservation: Reserve, now: float, limit_s: float = math.inf) -> DecodeAttempt:
        """Take the pages of a reservation.

        Raises ReservationTooLarge if it can never be granted, Overloaded or OutOfPages if it can't be granted now,
        InvalidRequest if it is malformed.
        """
        size, claimant = self._check(session_number, reservation, now), (session_number, reservation.key)
        try:
            attempt = self._with_reclaim(
                lambda: self._attempts.take_pages(session_number, reservation, size, now, limit_s)
            )
        except OutOfPages:
            self._claim(claimant, size.pages, now)
            raise
        self.claims.remove_granted(claimant, self._free())
        self._context_claims.remove_granted(claimant, self._free_context_pages)
        self.forecast.record_grant(now, pending=bool(self._attempts.pending))
        return attempt

    def _check(self, session_number: int, reservation: Reserve, now: float) -> ReservationSize:
        """Raise what `admit` raises before it takes pages; returns the size of the reservation."""
        claimant = session_number, reservation.key
        if (live := self._attempts.get(*claimant)) is not None:
            raise InvalidRequest("reserve.key", f"attempt {live.key} is {live.lifecycle.state.value} already")
        size = size_reservation(self._engine.spec, reservation, self._reserve_tokens)
        self.claims.renew(claimant, now)
        self.claims.record_free(self._free(), now)
        self._context_claims.renew(claimant, now)
        if reservation.choices > 1:
            # Check this before the slots, because a refusal there leaves a free slot to this reservation.
            self._check_contexts(claimant, self._engine.spec.pages_for(reservation.context_tokens), now)
        self.forecast.check(self._attempts.held_sequences, now)
        try:
            self._check_claims(claimant, size.pages)
        except OutOfPages:
            self._claim(claimant, size.pages, now)
            raise
        return size

    def _claim(self, claimant: Claimant, pages: int, now: float) -> None:
        """Claim pages, and set half of the free ones aside if there is no other claim."""
        self.claims.add(claimant, pages, now)
        self.claims.record_free(self._free(), now)

    def cancel_claim(self, claimant: Claimant) -> bool:
        """Remove the claims of a refused attempt that does not ask again; returns whether it had any."""
        pages, contexts = self.claims.cancel(claimant), self._context_claims.cancel(claimant)
        return pages or contexts

    def drop_session(self, session_number: int) -> None:
        """Remove the claims of a session that has ended."""
        self.claims.drop_session(session_number)
        self._context_claims.drop_session(session_number)

    def start_forks(self, now: float) -> ForkResult:
        """Start the forks whose turn it is.

        The caller must give each sequence a slot, and end each attempt that failed.
        """
        forked = ForkResult()
        while turns := self._fork_order():
            if not self._may_fork(now):
                return forked
            started = self._fork(turns, forked, now)
            # Its turn is over, even if pages are missing.
            self.forecast.record_fork()
            if not started:
                return forked
        self.forecast.record_fork()
        return forked

    def free_context_tokens(self) -> int:
        """Size, in tokens, of the largest context for which a request without a claim could reserve pages now."""
        pages = self._free() - self.claims.pages_set_aside()
        return max(pages * self._engine.spec.page_size - self._reserve_tokens, 0)

    def wake_at(self, now: float) -> float:
        """Time at which the caller must call `start_forks` even if nothing happens; infinite if it need not."""
        return self.forecast.wake_at(self._attempts.held_sequences, now) if self._attempts.pending else math.inf

    def _may_fork(self, now: float) -> bool:
        return self.forecast.may_fork(self._attempts.held_sequences, now)

    def _fork_order(self) -> abc.Sequence[DecodeAttempt]:
        """Attempts with pending choices, in the order of their turns.

        The oldest attempt and the one with the fewest such choices take turns at the front. So contexts are freed one
        after the other, and neither requests with few choices nor requests with many wait for all others.
        """
        oldest = self._attempts.pending
        return oldest if self._oldest_leads else sorted(oldest, key=lambda attempt: attempt.pending_choices)

    def _fork(self, turns: abc.Sequence[DecodeAttempt], forked: ForkResult, now: float) -> bool:
        """Fork the first attempt that has the pages. If there is none, claim pages and return False."""
        makes_progress = any(attempt.makes_progress for attempt in self._attempts)
        for attempt in turns:
            try:
                if makes_progress:
                    self.claims.record_free(self._free(), now)
                    self._check_claims(FORKS, self._attempts.fork_pages(attempt))
                forked.started.append(self._with_reclaim(partial(self._attempts.fork, attempt)))
            except OutOfPages:
                continue
            except Exception as error:
                forked.failed.append((attempt, error))
                return False
            self._oldest_leads = not self._oldest_leads
            self.claims.remove_granted(FORKS, self._free())
            return True
        self._claim(FORKS, self._fork_claim(turns), now)
        return False

    def _fork_claim(self, turns: abc.Sequence[DecodeAttempt]) -> int:
        """Number of pages to claim: of the first fork in `turns` that fits in the pool beside all kept contexts.

        If none fits, of the smallest fork.
        """
        needs = [self._attempts.fork_pages(attempt) for attempt in turns]
        room = self._engine.spec.pages - self._attempts.pending_context_pages
        return next((need for need in needs if need <= room), min(needs))

    def _check_claims(self, claimant: Claimant, need: int) -> None:
        """Raise OutOfPages if these pages are kept for the batch or another claim. Counts shared pages too."""
        free, kept_for_batch = self._free(), self._batch_pages.kept_pages
        set_aside = self.claims.pages_set_aside(claimant)
        if (set_aside or kept_for_batch) and need > free - set_aside:
            stats = self._engine.stats()
            batch = f", {kept_for_batch} are kept for sequences that run" if kept_for_batch else ""
            claim = f", and {set_aside} are kept for a larger request that waits" if set_aside else ""
            raise OutOfPages(need, stats.free + stats.cached, stats.total, batch + claim)

    def _check_contexts(self, claimant: Claimant, pages: int, now: float) -> None:
        """Raise OutOfPages, and make a claim, if kept contexts would have more than their share of the pages."""
        # A context larger than the share is kept only while no other one is.
        most, free = self._max_context_pages, self._free_context_pages
        need = min(pages, most)
        self._context_claims.record_free(free, now)
        set_aside = self._context_claims.pages_set_aside(claimant)
        if need > free - set_aside:
            self._context_claims.add(claimant, need, now)
            raise OutOfPages(pages, free - set_aside, most, " for contexts whose further choices wait")

    @property
    def _max_context_pages(self) -> int:
        return self._engine.spec.pages // CONTEXTS_DIVISOR

    @property
    def _free_context_pages(self) -> int:
        return max(self._max_context_pages - self._attempts.expected_context_pages, 0)

    def _free(self) -> int:
        """Number of free and cached pages that the batch does not need."""
        stats = self._engine.stats()
        return max(stats.free + stats.cached - self._batch_pages.kept_pages, 0)

    def _with_reclaim(self, take: abc.Callable[[], T]) -> T:
        """Call `take`; if pages are missing, free those that no request holds and call it again."""
        try:
            return take()
        except OutOfPages:
            if not self._reclaim():
                raise
        return take()
