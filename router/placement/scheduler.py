"""The next entry of the queue, and its workers. Decisions are return values; time and the fleet are arguments. Pure.

    push ──▶ queue ── next_turn ──▶ Turn: a request and its selection ── begin ──▶ asks decode workers ──▶ grant ── end
               ▲                                                                        │
               └───────────────────────────── refuse: back to the head ◀────────────────┘

Selections are late: a request gets its turn only when a prefill worker has room for it, and the selection is made from
what is known then. After a refusal by all, the one that was refused waits for news of a worker, or until the time is
over after which a worker said that another try makes sense, and then tries before all others. Those behind it wait as
well where the workers lack slots; where they lack the pages for a large context, those whose context finds room go on
in their turns. `refusals.py` says who may ask.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from baton.errors import Overloaded
from baton.lifecycle import Lifecycle
from baton.request import CachePolicy
from router.placement.fleet import FleetView
from router.placement.policy import Excluded, PlacementQuery, Selection, can_serve, matching_decodes, select_workers
from router.placement.prefix_directory import Digests, PrefixDirectory
from router.placement.queue import MIN_RETRY_S, RequestQueue
from router.placement.refusals import Ask, RefusalGate, Try
from router.workers.failures import AvoidedWorker

_PROBE_S = 1.0
"""After a refusal without a hint: news could get lost, and the queue must not stand for ever."""

_MIN_PROBE_S, _MAX_PROBE_S = 0.05, 5.0

_MAX_SCANNED = 64
"""Of those who wait, the first of each tenant and so many more are looked at for one that would find room."""

_MAX_SKIPPED = 8
"""So many that no prefill worker has room for are passed over in one go."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The need of one attempt. `again` is set when the request was accepted before and goes to the head.

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
    again: bool
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
    """Refusals of a request by decode workers: which can never hold it and why, and when to ask again."""

    too_small: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float = math.inf
    reservable_tokens: int = 0
    """The largest context that another request could have now."""
    closed: frozenset[str] = frozenset()
    """Decode workers that are there, and that the request could not ask: to who can ask them it says nothing."""
    lacks_forks: bool = False
    """Whether it is for its choices that workers refuse it, which would have room for its context."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for a placement, since a time on the caller's clock."""

    request: PlacementRequest
    since: float
    refusal: Refusal = field(default_factory=Refusal)
    """The latest one."""
    turn: Try = field(default_factory=Try)
    """The latest one in which it asked decode workers."""

    def ask(self, kept: frozenset[str] = frozenset()) -> Ask:
        """The entry's need at decode workers."""
        request, too_small = self.request, self.refusal.too_small
        return Ask(request.context_tokens, len(request.choices), kept.union(too_small) if too_small else kept)


@dataclass(frozen=True, slots=True)
class Turn:
    """The next entry; `selection` is None for one that every decode worker says it can never hold."""

    waiter: Waiter
    query: PlacementQuery
    selection: Selection | None = None


def make_query(
    request: PlacementRequest, too_small: Mapping[str, str], fleet: FleetView, prefixes: PrefixDirectory
) -> PlacementQuery:
    """The query of an entry, with the workers that can never hold it, are avoided, or hold its prefixes now."""
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
        """By tenant, the requests that prefill workers have."""
        self._queue: RequestQueue[Waiter] = RequestQueue(capacity, lambda tenant: self._in_flight[tenant])
        self._gate: RefusalGate[Waiter] = RefusalGate()
        self._gone_since: float | None = None

    @property
    def updates(self) -> int:
        """Counts the news."""
        return self._gate.version

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._queue)

    def check(self, tenant: str) -> None:
        """Raise Overloaded if the queue is full for the tenant."""
        self._queue.check(tenant)

    def push(self, waiter: Waiter, fleet: FleetView, now: float) -> None:
        """Let a request wait. Raises Overloaded or DeadlineExceeded for what can't be in time, or has no room."""
        request = waiter.request
        if request.again:
            self._queue.push_front(waiter, tenant=request.tenant, deadline=request.deadline)
            return
        if can_serve(fleet, decodes=request.query.decodes):
            # The pace of the queue tells nothing of when a worker will come.
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
            if self.is_hopeless(waiter, fleet):
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

    def begin(self, waiter: Waiter) -> None:
        """A request has its turn, leaves the queue and is at a prefill worker."""
        self._queue.pop(waiter)
        self._in_flight[waiter.request.tenant] += 1
        if waiter.request.query.decodes:
            waiter.turn = self._gate.begin(waiter)

    def end(self, waiter: Waiter) -> None:
        """A turn is over, whatever came of it."""
        self._gate.end(waiter)

    def release_prefill(self, tenant: str) -> None:
        """A request of the tenant is no longer at a prefill worker."""
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]

    def grant(self, waiter: Waiter, now: float) -> None:
        """A turn has brought a placement."""
        self._queue.record_departure(now)
        if waiter.request.query.decodes:
            self._gate.record_grant(waiter.turn, waiter.ask())
            self._queue.hint_s = 0.0

    def refuse(self, waiter: Waiter, refusal: Refusal, now: float) -> float:
        """Return a refused request to the queue; seconds until it should try again even without news."""
        waiter.refusal, request = refusal, waiter.request
        ask = Ask(request.context_tokens, len(request.choices), refusal.closed)
        # Others may have more workers to ask than one that is narrowed, or no further choices.
        self.push_again(waiter, now, first=not (refusal.lacks_forks or refusal.closed))
        hint = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else 0.0
        if refusal.lacks_forks:
            self._gate.record_fork_refusal(waiter.turn, waiter)
        elif refusal.closed:
            self._gate.record_narrow_refusal(waiter.turn, waiter, ask, refusal.reservable_tokens, now)
        else:
            self._gate.record_refusal(waiter.turn, waiter, ask, refusal.reservable_tokens)
            self._queue.hint_s = hint
        return min(max(hint or _PROBE_S, _MIN_PROBE_S), _MAX_PROBE_S)

    def push_again(self, waiter: Waiter, now: float, *, first: bool) -> None:
        """Return a request to the head of its tenant's queue, or to the `first` place of all."""
        push = self._queue.push_first if first else self._queue.push_front
        push(waiter, tenant=waiter.request.tenant, deadline=waiter.request.deadline)
        if waiter is self._queue.first:
            self._gate.record_first(waiter, now)

    def remove(self, waiter: Waiter) -> bool:
        """Leave the queue; False if the request was not in it."""
        return self._queue.remove(waiter)

    def forget(self, waiter: Waiter) -> None:
        """The request does not return."""
        self._gate.forget(waiter)

    def record_update(self) -> None:
        """Some worker may have changed its mind."""
        self._gate.record_update()

    def is_hopeless(self, waiter: Waiter, fleet: FleetView) -> bool:
        """Whether every decode worker that is there says that it can never hold the request."""
        if not waiter.refusal.too_small:
            return False
        matching = matching_decodes(fleet)
        # A request that comes back under a name may be larger than the one that left.
        too_small = {name: reason for name, reason in waiter.refusal.too_small.items() if name in matching}
        waiter.refusal = replace(waiter.refusal, too_small=too_small)
        return bool(too_small) and too_small.keys() >= matching

    def is_stranded(self, fleet: FleetView, now: float) -> bool:
        """Whether requests wait for a fleet that is gone."""
        if not len(self._queue) or can_serve(fleet, decodes=True):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        return self._gone_since is not None

    def overdue(self, fleet: FleetView, now: float, worker_wait_s: float) -> tuple[list[Waiter], float]:
        """Entries that have waited long enough for a fleet that is gone, and the time of the next one (inf: none)."""
        late, next_at = [], math.inf
        if self.is_stranded(fleet, now) and self._gone_since is not None:
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
            raise Overloaded(problem, max(wait_s - self._max_wait_s, MIN_RETRY_S))

    def _candidates(self, fleet: FleetView, now: float, most: int) -> Iterator[Waiter]:
        """Entries among the first `most` that may use a turn, in the order of their turns."""
        kept, narrowed = fleet.isolated, self._gate.narrowed
        if (
            narrowed is not None
            and narrowed in self._queue
            and narrowed.request.deadline > now
            and self._gate.narrowed_may_try(narrowed.ask(kept), self._queue.first)
        ):
            yield narrowed
        # Whoever decodes waits for workers, and hides nobody who does not.
        decodes = can_serve(fleet, decodes=True)
        waiting = self._queue.candidates(now)
        if not decodes:
            waiting = (waiter for waiter in waiting if not waiter.request.query.decodes)
        for waiter in itertools.islice(waiting, most):
            if not waiter.request.query.decodes or self._gate.may_try(waiter, waiter.ask(kept), self._queue.first):
                yield waiter

    def _limit(self, tenant: str, tenants: int, fleet: FleetView) -> int:
        """Requests that a prefill worker may have before it gets the tenant's next one.

        Twice as many for a tenant that has less than its share of what prefill workers take, so that it need not wait
        for the long prompts of another that has it all; a worker computes the shortest of its prompts first.
        """
        limit = self._prefill_limit
        share = limit * len(fleet.prefill) // tenants
        return 2 * limit if tenants > 1 and self._in_flight[tenant] < max(share, 1) else limit
