"""The queue of requests for workers: whose turn it is, and at which workers. Time and the fleet are arguments. Pure.

    PlacementRequest ── push ──▶ Waiter ── next_turn ──▶ Turn ── asks decode workers ──▶ grant
                                    ▲                               │
                                    └───── refuse: Refusal ◀────────┘

Order: the tenant that has the fewest requests at workers is next; tenants with equally many take turns. A
tenant may hold its share of the capacity, which is an equal part for each tenant that waits. So a flood fills the
flooder's share alone, and the whole queue holds at most capacity × (1 + 1/2 + 1/3 + ...) entries. An entry past its
deadline gets no turn. A request that is tried again after a failure goes before the others of its tenant.

Turns: an entry gets its turn only when a prefill worker has room for it, and its workers are selected then.

Refusals: an entry that all decode workers refused goes to the head of the whole queue, one entry at a time. It waits
until a worker has changed, or for as long as a worker has said, and asks again before all others; workers set pages
aside for it only as long as it asks again. Entries behind it may ask meanwhile, one at a time, if their context fits
the room that the refusal named, so that a full fleet is asked about once per change. If one is refused although it
fits, the room counts as half of its context at most until the next change.

Some entries can use only some of the decode workers: others are too small, have failed them, or are isolated. A refusal
of such a *restricted* entry stops nobody who can ask more workers. The first restricted entry asks again after a change
too. Of this one and the head of the queue, the one that has waited longer asks first, so that neither takes all places
from the other. The refusal of a restricted entry holds for entries that can ask no other workers than it can.

A refusal for lack of room for several choices stops only entries that have several choices too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from baton.errors import DeadlineExceeded, Overloaded
from baton.lifecycle import Lifecycle
from baton.rates import DecayingSum
from baton.request import CachePolicy
from router.placement.policy import (
    Excluded,
    FleetView,
    PlacementQuery,
    Selection,
    can_serve,
    matching_decodes,
    select_workers,
)
from router.placement.prefix_directory import Digests, PrefixDirectory
from router.workers.failures import AvoidedWorker

T = TypeVar("T", bound=Hashable)

_ASK_AGAIN_S = 1.0
"""After a refusal without a hint: a change may go unnoticed, and the queue must not stand for ever."""

_MIN_ASK_AGAIN_S, _MAX_ASK_AGAIN_S = 0.05, 5.0

_MAX_SCANNED = 64
"""Entries that are looked at for one that finds room, beside the first of each tenant."""

_MAX_SKIPPED = 8
"""Entries without room at any prefill worker that are passed over in one go."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The need of one attempt. `is_retry` is set when the request was accepted before and goes to the head.

    `life` goes from QUEUED to RESERVING when decode workers are asked, and back when all refuse. `digests` are empty
    for a request that must not read the prefix cache.
    """

    request_id: str
    attempt: int
    tenant: str
    life: Lifecycle
    query: PlacementQuery
    context_tokens: int
    max_new_tokens: int
    choices: tuple[int, ...]
    is_retry: bool
    digests: Digests = field(default_factory=dict)
    salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    avoided: frozenset[AvoidedWorker] = frozenset()
    """Workers at which the request failed before."""

    @property
    def deadline(self) -> float:
        """The request's own, on the event loop's clock."""
        return self.life.request_deadline


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusals of a request by decode workers; `too_small` has the reasons of workers that can never hold it."""

    too_small: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float = math.inf
    reservable_tokens: int = 0
    """The largest context that another request could have now."""
    unusable: frozenset[str] = frozenset()
    """Decode workers that are there and that the request could not ask. The refusal holds for entries that can ask no
    others either."""
    for_choices: bool = False
    """Whether workers have room for the context, but not for all choices."""


@dataclass(eq=False, slots=True)
class Waiter:
    """An entry of the queue: a request that waits since a time on the caller's clock."""

    request: PlacementRequest
    since: float
    refusal: Refusal = field(default_factory=Refusal)
    """The latest one."""
    asked_at: int = 0
    """The number of updates when its latest turn began."""
    passed_first: bool = False
    """Whether the first of the queue, refused since the latest update, was passed over for this turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The next entry; `selection` is None if the request is too large for every decode worker."""

    waiter: Waiter
    query: PlacementQuery
    selection: Selection | None = None


def make_query(
    request: PlacementRequest, too_small: Mapping[str, str], fleet: FleetView, prefixes: PrefixDirectory
) -> PlacementQuery:
    """The query of a request: its workers that are too small, are avoided, or hold its prefixes now."""
    if not too_small and not request.digests and not request.avoided:
        return request.query
    views = ((each, fleet.prefill.get(each.worker) or fleet.decode.get(each.worker)) for each in request.avoided)
    return replace(
        request.query,
        avoid=frozenset(each.worker for each, view in views if view is not None and each.applies(view)),
        too_small=frozenset(too_small),
        prefill_match=prefixes.match_prefill(request.digests),
        decode_match=prefixes.match_decode(request.digests),
    )


class PlacementScheduler:
    """The requests that wait for workers; times are seconds on the caller's clock."""

    def __init__(self, prefixes: PrefixDirectory, *, capacity: int, prefill_limit: int, max_wait_s: float) -> None:
        self._prefixes = prefixes
        self._prefill_limit = prefill_limit
        self._max_wait_s = max_wait_s
        self._in_flight: Counter[str] = Counter()
        """Requests at prefill workers, by tenant."""
        self._queue: RequestQueue[Waiter] = RequestQueue(capacity, lambda tenant: self._in_flight[tenant])
        self._gate = RefusalGate()
        self._gone_since: float | None = None

    @property
    def updates(self) -> int:
        """Number of changes of workers so far."""
        return self._gate.updates

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._queue)

    def check(self, tenant: str) -> None:
        """Raise Overloaded if the queue is full for the tenant."""
        self._queue.check(tenant)

    def push(self, waiter: Waiter, fleet: FleetView, now: float) -> None:
        """Add an entry. Raises Overloaded if the queue is full or too slow, DeadlineExceeded after the deadline."""
        request = waiter.request
        if request.is_retry:
            self._queue.push_front(waiter, tenant=request.tenant, deadline=request.deadline)
            return
        if can_serve(fleet, decodes=request.query.decodes):
            # The pace of the queue does not tell when a worker will come.
            self._check_wait(request, now)
        self._queue.push(waiter, tenant=request.tenant, deadline=request.deadline, now=now)

    def next_turn(self, fleet: FleetView, excluded: Excluded, now: float, without_room: set[Waiter]) -> Turn | None:
        """The next entry; None when no entry can use a turn. Entries that find no room join `without_room`.

        The caller begins the turn, or removes the request. One pass over the queue, whose work is linear in the number
        of tenants that wait.
        """
        tenants = len(self._in_flight.keys() | self._queue.tenants)
        for waiter in self._candidates(fleet, now, tenants + _MAX_SCANNED):
            if waiter in without_room:
                continue
            if self.is_too_large(waiter, fleet):
                return Turn(waiter, waiter.request.query)
            if fleet.has_capacity(limit := self._limit(waiter.request.tenant, tenants, fleet)):
                query = make_query(waiter.request, waiter.refusal.too_small, fleet, self._prefixes)
                selection = select_workers(fleet, query, prefill_limit=limit, excluded=excluded)
                if selection is not None:
                    return Turn(waiter, query, selection)
            # Others may go on: there is no prefill worker that it could use.
            without_room.add(waiter)
            if len(without_room) > _MAX_SKIPPED:
                return None
        return None

    def begin_turn(self, waiter: Waiter) -> None:
        """An entry has its turn: it leaves the queue and is at a prefill worker."""
        self._queue.pop(waiter)
        self._in_flight[waiter.request.tenant] += 1
        if waiter.request.query.decodes:
            self._gate.begin_turn(waiter)

    def end_turn(self, waiter: Waiter) -> None:
        """A turn is over, with a placement or without."""
        self._gate.end_turn(waiter)

    def release_prefill(self, tenant: str) -> None:
        """A request of the tenant is no longer at a prefill worker."""
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]

    def grant(self, waiter: Waiter, now: float) -> None:
        """A turn has brought a placement."""
        self._queue.record_departure(now)
        if waiter.request.query.decodes:
            self._gate.record_grant(waiter)
            self._queue.hint_s = 0.0

    def refuse(self, waiter: Waiter, refusal: Refusal, now: float) -> float:
        """Return a refused entry to the queue; seconds until it should ask again even if no worker changes."""
        waiter.refusal = refusal
        hint = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else 0.0
        # Others may have more workers to ask than a restricted entry, or only one choice.
        all_refuse = not (refusal.for_choices or refusal.unusable)
        self.push_again(waiter, now, first=all_refuse)
        self._gate.record_refusal(waiter, now)
        if all_refuse:
            self._queue.hint_s = hint
        return min(max(hint or _ASK_AGAIN_S, _MIN_ASK_AGAIN_S), _MAX_ASK_AGAIN_S)

    def push_again(self, waiter: Waiter, now: float, *, first: bool) -> None:
        """Return an entry to the head of its tenant's queue, or to that of the whole queue."""
        push = self._queue.push_first if first else self._queue.push_front
        push(waiter, tenant=waiter.request.tenant, deadline=waiter.request.deadline)
        if waiter is self._queue.first:
            self._gate.record_first(waiter, now)

    def remove(self, waiter: Waiter) -> bool:
        """Leave the queue; False if the request was not in it."""
        return self._queue.remove(waiter)

    def forget(self, waiter: Waiter) -> None:
        """The entry does not return."""
        self._gate.forget(waiter)

    def record_update(self) -> None:
        """A worker has changed, and may have room now."""
        self._gate.record_update()

    def is_too_large(self, waiter: Waiter, fleet: FleetView) -> bool:
        """Whether the request is too large for every decode worker that is there."""
        if not waiter.refusal.too_small:
            return False
        matching = matching_decodes(fleet)
        # A worker that comes back under a name may be larger than the one that left.
        too_small = {name: reason for name, reason in waiter.refusal.too_small.items() if name in matching}
        waiter.refusal = replace(waiter.refusal, too_small=too_small)
        return bool(too_small) and too_small.keys() >= matching

    def lacks_fleet(self, fleet: FleetView, now: float) -> bool:
        """Whether requests wait for a fleet that is gone."""
        if not len(self._queue) or can_serve(fleet, decodes=True):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        return self._gone_since is not None

    def overdue(self, fleet: FleetView, now: float, worker_wait_s: float) -> tuple[list[Waiter], float]:
        """Entries that have waited long enough for a fleet that is gone, and the time of the next one (inf: none)."""
        late, next_at = [], math.inf
        if self.lacks_fleet(fleet, now) and self._gone_since is not None:
            for waiter in self._queue:
                until = max(self._gone_since, waiter.since) + worker_wait_s
                if until > now:
                    next_at = min(next_at, until)
                elif not can_serve(fleet, decodes=waiter.request.query.decodes):
                    late.append(waiter)
        return late, next_at

    def _check_wait(self, request: PlacementRequest, now: float) -> None:
        left_s, wait_s = request.deadline - now, self._queue.expected_wait_s(request.tenant, now)
        if 0 < left_s < wait_s:
            problem = f"the deadline is in {left_s:.1f} s, the queue is expected to take {wait_s:.1f} s"
            raise Overloaded(problem, self._queue.retry_after())
        if 0 < self._max_wait_s < wait_s:
            problem = f"the queue is expected to take {wait_s:.1f} s, {self._max_wait_s:g} s are allowed"
            raise Overloaded(problem, max(wait_s - self._max_wait_s, _MIN_RETRY_S))

    def _candidates(self, fleet: FleetView, now: float, most: int) -> Iterator[Waiter]:
        """Entries among the first `most` that may use a turn, in the order of their turns."""
        restricted = self._gate.restricted
        if (
            restricted is not None
            and restricted in self._queue
            and restricted.request.deadline > now
            and self._gate.restricted_may_ask(self._queue.first)
        ):
            yield restricted
        # Entries that decode wait for decode workers, and must not hide those that do not decode.
        decodes = can_serve(fleet, decodes=True)
        waiting = self._queue.candidates(now)
        if not decodes:
            waiting = (waiter for waiter in waiting if not waiter.request.query.decodes)
        for waiter in itertools.islice(waiting, most):
            if not waiter.request.query.decodes or self._gate.may_ask(waiter, self._queue.first, fleet.isolated):
                yield waiter

    def _limit(self, tenant: str, tenants: int, fleet: FleetView) -> int:
        """Requests that a prefill worker may have before it gets the tenant's next one.

        Twice as many for a tenant that has less than its share of what prefill workers take, so that it need not wait
        for the long prompts of another that has it all; a worker computes the shortest of its prompts first.
        """
        limit = self._prefill_limit
        share = limit * len(fleet.prefill) // tenants
        return 2 * limit if tenants > 1 and self._in_flight[tenant] < max(share, 1) else limit


class RefusalGate:
    """Entries that may ask decode workers, after workers have refused one of them."""

    def __init__(self) -> None:
        self.updates = 0
        """Number of changes of workers so far."""
        self.restricted: Waiter | None = None
        """The restricted entry that was refused first."""
        self._refused_at: int | None = None
        """The number of updates when all workers refused the first of the queue."""
        self._room = 0
        """Tokens of context that they have room for."""
        self._asking: Waiter | None = None
        """The entry that asks since that refusal, one at a time."""
        self._blocked: set[Waiter] = set()
        """Entries that were refused since the latest update, for a reason of their own."""
        self._choices_blocked = False
        self._restricted_asks = False
        self._restricted_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """The latest refusal of a restricted entry: updates then, workers that it could not ask, and the room."""
        self._first_since: dict[Waiter, float] = {}
        """Times since when entries are the first of the queue, or the first restricted one."""

    def record_update(self) -> None:
        """A worker has changed, and may have room now."""
        self.updates += 1
        self._blocked.clear()
        self._choices_blocked = False

    def record_first(self, entry: Waiter, now: float) -> None:
        """An entry is the first of the queue now."""
        self._first_since.setdefault(entry, now)

    def may_ask(self, entry: Waiter, first: Waiter | None, isolated: frozenset[str]) -> bool:
        """Whether an entry may ask, where all workers refused `first`, and the isolated ones are closed to it."""
        several = len(entry.request.choices) > 1
        if entry in self._blocked or (several and self._choices_blocked) or self._is_known(entry, isolated):
            return False
        return self._finds_room(entry, first)

    def restricted_may_ask(self, first: Waiter | None) -> bool:
        """Whether the first restricted entry may ask before the head of the queue.

        The head can use any placement, and would take the only ones that the restricted entry can use.
        """
        entry = self.restricted
        if entry is None or entry in self._blocked:
            return False
        if first is not None and self._first_since[first] < self._first_since[entry]:
            return False
        return self._finds_room(entry, None)

    def begin_turn(self, entry: Waiter) -> None:
        """An entry has its turn, and is to end it."""
        if self._refused_at is not None:
            self._asking = entry
        self._restricted_asks = self._restricted_asks or entry is self.restricted
        entry.asked_at, entry.passed_first = self.updates, self._refused_at == self.updates

    def end_turn(self, entry: Waiter) -> None:
        """The entry's turn is over, with a placement or without."""
        if self._asking is entry:
            self._asking = None
        if self.restricted is entry:
            self._restricted_asks = False

    def forget(self, entry: Waiter) -> None:
        """The entry does not return."""
        self._forget_restricted(entry)
        self._first_since.pop(entry, None)
        self._blocked.discard(entry)

    def record_grant(self, entry: Waiter) -> None:
        """Workers have reserved pages."""
        if entry.passed_first:
            self._room -= entry.request.context_tokens
        else:
            self._refused_at, self._room = None, 0

    def record_refusal(self, entry: Waiter, now: float) -> None:
        """Workers have refused the entry, for the reasons in `entry.refusal`."""
        refusal, room = entry.refusal, entry.refusal.reservable_tokens
        if refusal.for_choices or refusal.unusable:
            if entry.asked_at == self.updates:
                self._blocked.add(entry)
                self._choices_blocked = self._choices_blocked or refusal.for_choices
            if not refusal.for_choices:
                self._restricted_refusal = entry.asked_at, refusal.unusable, room
                if self.restricted is None:
                    self.restricted = entry
                    self._first_since.setdefault(entry, now)
            return
        self._forget_restricted(entry)
        if entry.passed_first:
            self._room = min(room, entry.request.context_tokens // 2)
        else:
            self._refused_at, self._room = entry.asked_at, room

    def _forget_restricted(self, entry: Waiter) -> None:
        if self.restricted is entry:
            self.restricted, self._restricted_asks = None, False

    def _finds_room(self, entry: Waiter, first: Waiter | None) -> bool:
        if self._refused_at is None:
            return True
        if self._asking is not None:
            return False
        if first in (None, entry) and self._refused_at != self.updates:
            return True
        return entry is not first and entry.request.context_tokens <= self._room

    def _is_known(self, entry: Waiter, isolated: frozenset[str]) -> bool:
        """Whether all workers that it could ask refuse now, or are just being asked, by a restricted entry."""
        updates, unusable, room = self._restricted_refusal
        known = self._restricted_asks or updates == self.updates
        too_large = entry.request.context_tokens > room
        return known and too_large and unusable <= isolated.union(entry.refusal.too_small)


_SPAN_S = 3.0
"""Departures, and the time that they took, count for the pace with a weight that falls to 1/e in this time."""

_MAX_INTERVAL_RATIO = 3.0
"""An interval counts for at most so many times the usual one, or for the span."""

_MIN_DEPARTURES = 8
"""Departures of a busy queue from which on they tell its pace: the first ones are those of cold workers."""

_FIRST_GUESS_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0


class RequestQueue(Generic[T]):
    """Requests that wait for workers; times are in seconds on the caller's clock.

    `in_flight` tells how many requests a tenant has at workers.
    """

    def __init__(self, capacity: int, in_flight: Callable[[str], int] = lambda _: 0) -> None:
        self._capacity = capacity
        self._in_flight = in_flight
        self._queue: FairQueue[T] = FairQueue()
        self._deadlines: dict[T, float] = {}
        self._first: tuple[T, str] | None = None
        self._busy_s, self._departures = DecayingSum(_SPAN_S), DecayingSum(_SPAN_S)
        self._busy_clock = 0.0
        """Seconds of all busy periods, on which the two sums fade."""
        self._counted = 0
        self.hint_s = 0.0
        """Least delay of a retry, by the word of the workers that the queue waits for; 0 without."""
        self._last_departure: float | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._deadlines))

    def __contains__(self, entry: object) -> bool:
        return entry in self._deadlines

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with entries."""
        return {*self._queue.tenants, *(() if self._first is None else (self._first[1],))}

    @property
    def first(self) -> T | None:
        """The head of the whole queue: the entry that all workers refused."""
        return None if self._first is None else self._first[0]

    def check(self, tenant: str) -> None:
        """Raise Overloaded, with a delay after which a retry makes sense, if the tenant's share is full."""
        waiting, tenants = self._queue.count(tenant), self._queue.tenants
        share = max(1, self._capacity // (len(tenants) + (tenant not in tenants)))
        if waiting >= share:
            problem = f"{waiting} requests are waiting, the limit is {share}; try again later"
            raise Overloaded(problem, self.retry_after())

    def push(self, entry: T, *, tenant: str, deadline: float = math.inf, now: float) -> None:
        """Join the tenant's queue at its end. Raises Overloaded, or DeadlineExceeded when it is too late."""
        if deadline <= now:
            raise DeadlineExceeded("the deadline had passed when the request came")
        self.check(tenant)
        if not self._deadlines:
            # Requests before it may have given up, and the time since then is no standstill.
            self._last_departure = None
        self._queue.append(entry, tenant)
        self._deadlines[entry] = deadline

    def push_front(self, entry: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Join the tenant's queue at its head, even if the share is full. The order of the tenants stays."""
        self._queue.prepend(entry, tenant)
        self._deadlines[entry] = deadline

    def push_first(self, entry: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Return from a turn to the head of the whole queue; to that of the tenant's if another entry is there already.

        The tenant then has the next turn.
        """
        if self._first is None:
            self._first, self._deadlines[entry] = (entry, tenant), deadline
        else:
            self.push_front(entry, tenant=tenant, deadline=deadline)
            self._queue.advance(tenant)

    def candidates(self, now: float) -> Iterator[T]:
        """All entries in the order of their turns; the queue must not change meanwhile.

        The order is the first of each tenant, then the second of each, and so on: requests of one tenant that can't go
        on hide no other tenant's. Entries past their deadline are left out; they leave the queue at its head.
        """
        self._drop_late(now)
        if self._first is not None:
            yield self._first[0]
        deadlines = self._deadlines
        yield from self._queue.rounds(self._in_flight, lambda entry: deadlines[entry] > now)

    def pop(self, entry: T) -> None:
        """Hand an entry out; its tenant's next turn is after those of all others, unless it was the first of all."""
        if entry == self.first:
            self.remove(entry)
        else:
            self._queue.pop(entry)
            del self._deadlines[entry]

    def remove(self, entry: T) -> bool:
        """Leave the queue; False if the entry was not in it."""
        if self._deadlines.pop(entry, None) is None:
            return False
        if self._first is not None and self._first[0] == entry:
            self._first = None
        else:
            self._queue.remove(entry)
        return True

    def record_departure(self, now: float) -> None:
        """An entry that was handed out will not return: that is the queue's pace."""
        # Only intervals within a busy period tell the pace; an idle queue has none.
        if self._last_departure is not None:
            latest = now - self._last_departure
            if self._counted:
                # One standstill of a quick queue does not make it a slow one; several do.
                latest = min(latest, max(_SPAN_S, _MAX_INTERVAL_RATIO * self._interval))
            self._busy_clock += latest
            self._busy_s.add(latest, self._busy_clock)
            self._departures.add(1, self._busy_clock)
            self._counted += 1
        self._last_departure = now if self._deadlines else None

    @property
    def _interval(self) -> float:
        """Seconds between two departures of late; 0 while unknown."""
        now = self._busy_clock
        return self._busy_s.value(now) / self._departures.value(now) if self._counted else 0.0

    def retry_after(self) -> float:
        """Seconds in which the queue, at the pace of its latest departures, would be empty."""
        estimate = len(self) * self._interval if self._interval else _FIRST_GUESS_S
        return min(max(estimate, self.hint_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def expected_wait_s(self, tenant: str, now: float) -> float:
        """Seconds that a tenant's next entry would wait, at that pace and at the present standstill; 0 if unknown.

        Deadlines are refused by it, and a request that could be served must not be refused. So a pace counts only once
        it is measured, and the time of the request itself does not count: its prompt may be cached.
        """
        own = self._queue.count(tenant)
        # With turns, no other tenant is served more often than this one until this one's entry is reached.
        others = sum(min(self._queue.count(name), own + 1) for name in self._queue.tenants if name != tenant)
        before = own + others + (self._first is not None)
        if not before or self._counted < _MIN_DEPARTURES:
            return 0.0
        standstill = 0.0 if self._last_departure is None else now - self._last_departure
        return before * self._interval + max(standstill - self._interval, 0.0)

    def _drop_late(self, now: float) -> None:
        if self._first is not None and self._deadlines[self._first[0]] <= now:
            self.remove(self._first[0])
        late = [entry for entry in self._queue.heads() if self._deadlines[entry] <= now]
        while late:
            for entry in late:
                self.remove(entry)
            late = [entry for entry in self._queue.heads() if self._deadlines[entry] <= now]


class FairQueue(Generic[T]):
    """Distinct entries, each tenant's in order; tenants take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()
        self._tenants: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._tenants))

    def __contains__(self, entry: object) -> bool:
        return entry in self._tenants

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with entries."""
        return self._queues.keys()

    def count(self, tenant: str) -> int:
        """The number of entries of a tenant that wait."""
        return len(self._queues.get(tenant, ()))

    def append(self, entry: T, tenant: str) -> None:
        """Join the tenant's queue at its end."""
        self._queues.setdefault(tenant, OrderedDict())[entry] = None
        self._tenants[entry] = tenant

    def prepend(self, entry: T, tenant: str) -> None:
        """Join the tenant's queue at its head; the order of the tenants stays."""
        self.append(entry, tenant)
        self._queues[tenant].move_to_end(entry, last=False)

    def advance(self, tenant: str) -> None:
        """Make it the tenant's turn."""
        self._queues.move_to_end(tenant, last=False)

    def pop(self, entry: T) -> str:
        """Hand an entry out; its tenant's next turn is after those of all others. Returns the tenant."""
        tenant = self._tenants[entry]
        self.remove(entry)
        if tenant in self._queues:
            self._queues.move_to_end(tenant)
        return tenant

    def remove(self, entry: T) -> bool:
        """Leave the queue; False if the entry was not in it."""
        tenant = self._tenants.pop(entry, None)
        if tenant is None:
            return False
        del self._queues[tenant][entry]
        if not self._queues[tenant]:
            del self._queues[tenant]
        return True

    def heads(self) -> list[T]:
        """The first entry of each tenant, in the order of their turns."""
        return [next(iter(queue)) for queue in self._queues.values()]

    def rounds(self, rank: Callable[[str], float], fits: Callable[[T], bool]) -> Iterator[T]:
        """The first of each tenant, then the second of each, and so on; the queue must not change meanwhile.

        Tenants come by rank, and those of the same rank in the order of their turns; entries that don't fit are left
        out. The work is linear in the number of entries that are taken from it, and of tenants.
        """
        queues = [iter(self._queues[tenant]) for tenant in sorted(self._queues, key=rank)]
        while queues:
            longer = []
            for queue in queues:
                entry = next(filter(fits, queue), None)
                if entry is not None:
                    yield entry
                    longer.append(queue)
            queues = longer
