"""Admission: reservations and forks wait here until they get a slot of the batch, and pages. Pure.

    register ── malformed ─▶ InvalidRequest; larger than the worker ─▶ ReservationTooLarge
       └──────▶ waiting ── advance: its turn ─▶ DecodeAttempt, one sequence, however many choices it has
                  └────── cancel, clear, its deadline ─▶ gone
    advance ──▶ also sequences of further choices (forks); call it after each event that may free slots or pages

**Order.** Replays go before first attempts, sessions take turns, and within a session the oldest goes first. A
reservation or fork that lacks pages blocks no other one.

**Slots.** At most slots + lookahead sequences are held, in any state. `lookahead` is the number of completions per
second times the seconds from a grant until its sequence is ready: so many sequences end in the meantime (Little's law).
It is at most a quarter of the slots. After a grant while forks are pending, the next slot is a fork's, and then a
reservation's. If no reservation can use a slot, forks take it, but leave some slots for new requests.

**Pages.** Those that lack pages stand in a line, and the first in line has pages set aside: half of those that were
free when it came to the front, and half of those that came free later. The others may use the rest. Sessions take turns
in the line, and all forks together are one party there (decision 28 has the bound on the wait). Contexts that wait for
forks may use at most half of the pages, with a line of their own; a larger one may be kept only alone. Every fork ends;
decision 10 has the proof. Pages that the batch needs after a preemption are not free (`BatchPages.kept_pages`).

A large reservation may replace many cached blocks. They are evicted in slices, one in each call of `advance`, so that
the event loop is not held up. Meanwhile a slot is kept for it, and it stands in the line for pages.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field

from baton.engine.contract import Engine
from baton.errors import InvalidRequest, OutOfPages
from baton.kv.cached_blocks import SLICE_NODES
from baton.rates import DecayingAverage, DecayingSum
from baton.request import ReserveResult
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.reservation import ReservationSize, size_reservation
from decode_svc.scheduler import BatchPages, DecodeSequence

CONTEXTS_DIVISOR = 2
"""Contexts that are kept for further choices use at most 1 / CONTEXTS_DIVISOR of the pages."""

SPAN_S = 10.0
"""Seconds after which a completion counts with a weight of 1/e."""

FORK_HEADROOM_DIVISOR = 8
"""Forks leave 1 / FORK_HEADROOM_DIVISOR of the slots free when it is not their turn."""

Party = tuple[int, AttemptKey | None]
"""A session and its attempt."""

FORKS: Party = (-1, None)
"""All pending forks together."""

_LEAD_WEIGHT = 0.1


class SlotForecast:
    """Measures how fast slots come free; times are seconds on the caller's clock."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._ends = DecayingSum(SPAN_S)
        self._lead_s = DecayingAverage(_LEAD_WEIGHT)

    def record_end(self, now: float, count: int = 1) -> None:
        """Record that `count` sequences have ended."""
        self._ends.add(count, now)

    def record_ready(self, lead_s: float) -> None:
        """Record that a sequence was ready to run `lead_s` seconds after its reservation."""
        self._lead_s.add(lead_s)

    def lookahead(self, now: float) -> int:
        """Number of sequences that may be held beyond the slots, because slots will come free in time.

        It is smaller in the first SPAN_S seconds of a worker.
        """
        ends_per_s = self._ends.value(now) / SPAN_S
        return min(int(ends_per_s * self._lead_s.value), self.slots // 4)


class PageLine:
    """The line of parties that lack pages; each session has one place. The first one has pages set aside."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Party, int]] = {}
        """The party with the place of each session, and the pages that it lacks."""
        self._first: Party | None = None
        # Twice the pages set aside for the first party, and the number of free pages when that was computed.
        self._set_aside_doubled = self._free = 0

    @property
    def first(self) -> Party | None:
        """The first party; None if nobody lacks pages."""
        return next((party for party, _ in self._places.values()), None)

    def room(self, party: Party | None, free: int) -> int:
        """Number of pages that the party may take, if `free` pages are free: all but those set aside for another.

        Half of the pages that came free since the last call are set aside.
        """
        if (first := self.first) != self._first:
            self._first, self._set_aside_doubled, self._free = first, 0, 0
        if first is None:
            return free
        pages = self._places[first[0]][1]
        self._set_aside_doubled = min(max(self._set_aside_doubled + free - self._free, 0), 2 * pages)
        self._free = free
        return free if first == party else free - (self._set_aside_doubled + 1) // 2

    def add(self, party: Party, pages: int) -> None:
        """Give a party that lacks `pages` pages a place in the line, unless another one has that of its session."""
        if self._places.setdefault(party[0], (party, pages))[0] == party:
            self._places[party[0]] = party, pages

    def remove(self, party: Party) -> None:
        """Remove a party that does not wait any more."""
        if self._places.get(party[0], (None, 0))[0] == party:
            del self._places[party[0]]

    def record_grant(self, free: int) -> None:
        """Record that somebody has just taken pages, none of those that are set aside; `free` are left."""
        self._free = free


@dataclass(eq=False, slots=True)
class WaitingReservation:
    """A reservation that is not granted yet.

    `cancelled` are choices that its router has ended. `told` is whether its router knows that it waits. `tried` are
    the free pages and `Attempts.changes` when the engine last lacked pages for it.
    """

    session_number: int
    reservation: Reserve
    size: ReservationSize
    deadline: float
    cancelled: set[int] = field(default_factory=set)
    told: bool = False
    tried: tuple[int, int] = -1, -1

    @property
    def party(self) -> Party:
        """Its place among the waiting ones."""
        return self.session_number, self.reservation.key


@dataclass(slots=True)
class Progress:
    """Results of `Admission.advance`.

    `granted` are new attempts, `answers` are further answers to their reservations: that they wait, or a refusal.
    `forked` are sequences for the batch. `failed` are attempts whose fork the engine refused. If `evicting`, this call
    has evicted a slice of blocks for a reservation; the reservation is not told that it waits, and the caller must call
    again soon.
    """

    granted: list[DecodeAttempt] = field(default_factory=list)
    answers: list[tuple[WaitingReservation, ReserveResult]] = field(default_factory=list)
    forked: list[DecodeSequence] = field(default_factory=list)
    failed: list[tuple[DecodeAttempt, Exception]] = field(default_factory=list)
    evicting: bool = False


class Admission:
    """Decides for one worker; times are seconds on the caller's clock.

    `reserve_tokens` is the most outputs of a choice for which pages are reserved. `reclaim` frees pages that no request
    holds, and returns False if there were none. An attempt must be started within `start_limit_s` seconds of its grant.
    The last `computed_tokens` tokens of a context are never pinned, because prefill computes them into its pages.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        reserve_tokens: int,
        batch_pages: BatchPages,
        reclaim: abc.Callable[[], bool],
        *,
        start_limit_s: float = math.inf,
        computed_tokens: int = 0,
    ) -> None:
        self._engine = engine
        self._attempts = attempts
        self._reserve_tokens = reserve_tokens
        self.forecast = SlotForecast(engine.spec.slots)
        self._batch_pages = batch_pages
        self._reclaim = reclaim
        self._start_limit_s = start_limit_s
        self._computed_tokens = computed_tokens
        self._waiting: dict[int, dict[AttemptKey, WaitingReservation]] = {}
        """Waiting reservations by session, in the order of the sessions' turns."""
        self._evicting: WaitingReservation | None = None
        """The reservation for which blocks are being evicted; a slot is kept for it."""
        self._line, self._context_line = PageLine(), PageLine()
        self._max_context_pages = engine.spec.pages // CONTEXTS_DIVISOR
        self._forks_next = False
        """Whether the next slot is a fork's, because a reservation took the last one."""
        self._oldest_leads = True
        """Whether the oldest attempt, not the one with the fewest pending choices, has the next turn to fork."""

    def __len__(self) -> int:
        """Number of waiting reservations."""
        return sum(map(len, self._waiting.values()))

    def in_session(self, session_number: int) -> abc.Set[AttemptKey]:
        """Keys of the waiting reservations of a session."""
        return self._waiting.get(session_number, {}).keys()

    def register(self, session_number: int, reservation: Reserve, now: float) -> None:
        """Let a reservation wait; `advance` answers it.

        Raises ReservationTooLarge if it can never be granted, InvalidRequest if it is malformed or its key is in use.
        """
        key, live = reservation.key, self._attempts.get(session_number, reservation.key)
        if live is not None or key in self.in_session(session_number):
            state = live.lifecycle.state.value if live is not None else "waiting"
            raise InvalidRequest("reserve.key", f"attempt {key} is {state} already")
        size = size_reservation(self._engine.spec, reservation, self._reserve_tokens, self._computed_tokens)
        deadline = math.inf if reservation.deadline_s is None else now + reservation.deadline_s
        waiting = WaitingReservation(session_number, reservation, size, deadline)
        self._waiting.setdefault(session_number, {})[key] = waiting

    def cancel(self, session_number: int, key: AttemptKey, choice: int | None = None) -> None:
        """Remove a waiting reservation, or end one choice of it; does nothing if it does not wait."""
        if (waiting := self._waiting.get(session_number, {}).get(key)) is None:
            return
        if choice is not None:
            waiting.cancelled.add(choice)
        if choice is None or len(waiting.cancelled) >= waiting.reservation.choices:
            self._remove(waiting)

    def clear(self, session_number: int | None = None) -> list[WaitingReservation]:
        """Remove and return all waiting reservations, or those of one session; the caller must refuse them."""
        cleared = [each for each in self._in_turn() if session_number in (None, each.session_number)]
        for waiting in cleared:
            self._remove(waiting)
        return cleared

    def advance(self, now: float) -> Progress:
        """Give free slots and pages to the reservations and forks whose turn it is.

        The caller must give each sequence to the batch, and end each attempt that failed.
        """
        progress = Progress()
        for waiting in list(self._in_turn()):
            if now >= waiting.deadline:
                self._refuse(waiting, "its deadline has passed", progress)
        if not self._attempts.pending:
            self._line.remove(FORKS)
        slots = self.forecast.slots
        limit, headroom = slots + self.forecast.lookahead(now), slots // FORK_HEADROOM_DIVISOR
        while (
            (self._forks_next and self._fork_next(progress, limit))
            or self._grant_next(progress, limit, now)
            or self._fork_next(progress, slots - headroom)
            # If nothing runs, only copies may hold the pages for which reservations wait.
            or (self._waiting and not (progress.evicting or self._attempts.held_sequences) and self._reclaim())
        ):
            pass
        for waiting in self._in_turn():
            if not waiting.told and not (progress.evicting and waiting is self._evicting):
                waiting.told = True
                progress.answers.append((waiting, ReserveResult(False, waiting=True)))
        return progress

    def may_take_for_prompt(self, pages: int, new_pages: int) -> bool:
        """Whether a prompt for another decode worker may take its `pages` now; `new_pages` of them are not shared."""
        free = self._free()
        return new_pages <= free and self._may_take(None, pages, free)

    def record_prompt(self) -> None:
        """Record that a prompt for another decode worker has just taken its pages."""
        self._line.record_grant(self._free())

    @property
    def deadline(self) -> float:
        """The earliest deadline of a waiting reservation, at which `advance` refuses it; infinite if there is none."""
        return min((waiting.deadline for waiting in self._in_turn()), default=math.inf)

    # Reservations.

    def _in_turn(self) -> abc.Iterator[WaitingReservation]:
        """The waiting reservations in the order of their turns."""
        for is_replay in (True, False):
            for session in self._waiting.values():
                yield from (each for key, each in session.items() if (key.attempt > 0) == is_replay)

    def _grant_next(self, progress: Progress, limit: int, now: float) -> bool:
        """Grant the next reservation for which there are pages, if fewer than `limit` sequences are held.

        Returns False if there is none, no page was reclaimed, and no other pages are set aside than before.
        """
        first = self._line.first
        if not self._waiting or (free_slots := limit - self._attempts.held_sequences) <= 0:
            return False
        for waiting in self._in_turn():
            has_slot = free_slots > 1 or self._evicting in (None, waiting)
            if has_slot and self._grant(waiting, progress, now):
                return True
        return self._line.first != first

    def _grant(self, waiting: WaitingReservation, progress: Progress, now: float) -> bool:
        """Grant a reservation, or refuse it if the engine fails, or reclaim pages for it; False if it must wait on."""
        session_number, reservation, size = waiting.session_number, waiting.reservation, waiting.size
        if not (self._has_context_room(waiting) and self._has_pages(waiting)):
            self._stop_evicting(waiting)
        elif not self._evict_for(waiting, progress):
            try:
                limit_s, deadline = self._start_limit_s, waiting.deadline
                attempt = self._attempts.take_pages(session_number, reservation, size, now, limit_s, deadline)
            except OutOfPages:
                tried_free, free = waiting.tried[0], self._free()
                waiting.tried = free, self._attempts.changes
                self._line.add(waiting.party, size.pages)
                # Not again at each commit, so that copies to the shared cache can end.
                return free > tried_free and self._reclaim()
            except Exception as error:
                self._refuse(waiting, f"{type(error).__name__}: {error}", progress)
                return True
            else:
                self._remove(waiting)
                self._line.record_grant(self._free())
                self._context_line.record_grant(self._free_context_pages)
                # The next turn of its session comes after those of the others.
                if (others := self._waiting.pop(waiting.session_number, None)) is not None:
                    self._waiting[waiting.session_number] = others
                attempt.cancelled |= waiting.cancelled
                self._forks_next = bool(self._attempts.pending)
                progress.granted.append(attempt)
                return True
        return False

    def _refuse(self, waiting: WaitingReservation, reason: str, progress: Progress) -> None:
        self._remove(waiting)
        progress.answers.append((waiting, ReserveResult(False, reason)))

    def _remove(self, waiting: WaitingReservation) -> None:
        session = self._waiting[waiting.session_number]
        del session[waiting.reservation.key]
        if not session:
            del self._waiting[waiting.session_number]
        self._line.remove(waiting.party)
        self._context_line.remove(waiting.party)
        self._stop_evicting(waiting)

    def _has_context_room(self, waiting: WaitingReservation) -> bool:
        """Whether kept contexts have room for its context; if not, it gets a place in their line."""
        if waiting.reservation.choices == 1:
            return True
        # A context larger than the share of all contexts is kept only while no other one is.
        pages, free = self._engine.spec.pages_for(waiting.reservation.context_tokens), self._free_context_pages
        need = min(pages, self._max_context_pages)
        if need <= self._context_line.room(waiting.party, free):
            return True
        self._context_line.add(waiting.party, need)
        # Two reservations could each be the first in the line that the other one waits for.
        self._line.remove(waiting.party)
        return False

    def _has_pages(self, waiting: WaitingReservation) -> bool:
        """Whether its pages may be free for it; if not, it gets a place in line."""
        pages, free = waiting.size.pages, self._free()
        tried_free, tried_changes = waiting.tried
        may_share = bool(waiting.reservation.pinnable_digests) and self._attempts.changes != tried_changes
        # Only the engine knows how many pages it would share, so it is asked when its answer may be another one.
        if self._may_take(waiting.party, pages, free) and (pages <= free or free > tried_free or may_share):
            return True
        self._line.add(waiting.party, pages)
        return False

    def _may_take(self, party: Party | None, pages: int, free: int) -> bool:
        """Whether pages that are kept for the batch or set aside for others leave room for so many pages.

        Pages that are shared count too, so that a shared prefix can't keep the first in line out.
        """
        room = self._line.room(party, free)
        return (room == free and not self._batch_pages.kept_pages) or pages <= room

    def _evict_for(self, waiting: WaitingReservation, progress: Progress) -> bool:
        """Evict a slice of the cached blocks that a large reservation replaces; False if its pages may be taken now.

        Blocks are evicted for one reservation at a time: two could evict each other's prefix.
        """
        digests, size = waiting.reservation.pinnable_digests, waiting.size
        if size.pages <= SLICE_NODES:
            return False
        if not progress.evicting and self._evicting in (None, waiting):
            progress.evicting = self._engine.evict_for(size.tokens, digests, size.pinnable_tokens)
            self._evicting = waiting if progress.evicting else None
            if progress.evicting:
                self._line.add(waiting.party, size.pages)
        return progress.evicting or self._evicting is not None

    def _stop_evicting(self, waiting: WaitingReservation) -> None:
        if self._evicting is waiting:
            self._evicting = None

    # Forks.

    def _fork_next(self, progress: Progress, limit: int) -> bool:
        """Fork the first attempt that has the pages, if fewer than `limit` sequences are held, or reclaim pages for it.

        Returns False if there is no slot or page for a fork.
        """
        turns, held = self._attempts.pending, self._attempts.held_sequences
        if progress.failed or not turns or held + (self._evicting is not None) >= limit:
            return False
        # The turn is over even if pages are missing.
        self._forks_next = False
        if not self._oldest_leads:
            # So contexts are freed one after the other, and requests with few choices do not wait for all others.
            turns = sorted(turns, key=lambda attempt: attempt.pending_choices)
        free = self._free()
        # If nothing else makes progress, forks may take all pages.
        room = self._line.room(FORKS, free) if held else self._engine.spec.pages
        for attempt in turns:
            if self._attempts.fork_pages(attempt) > room:
                continue
            try:
                progress.forked.append(self._attempts.fork(attempt))
            except OutOfPages:
                continue
            except Exception as error:
                progress.failed.append((attempt, error))
                return False
            self._oldest_leads = not self._oldest_leads
            self._line.remove(FORKS)
            self._line.record_grant(self._free())
            return True
        need = self._fork_need(turns)
        self._line.add(FORKS, need)
        return need > free and self._reclaim()

    def _fork_need(self, turns: abc.Sequence[DecodeAttempt]) -> int:
        """Number of pages for which forks wait: of the first in `turns` that fits in the pool beside all kept contexts.

        If none fits, of the smallest fork.
        """
        needs = [self._attempts.fork_pages(attempt) for attempt in turns]
        room = self._engine.spec.pages - self._attempts.pending_context_pages
        return next((need for need in needs if need <= room), min(needs))

    # Pages.

    @property
    def _free_context_pages(self) -> int:
        return max(self._max_context_pages - self._attempts.expected_context_pages, 0)

    def _free(self) -> int:
        """Number of free and cached pages that the batch does not need."""
        stats = self._engine.stats()
        return max(stats.free + stats.cached - self._batch_pages.kept_pages, 0)
