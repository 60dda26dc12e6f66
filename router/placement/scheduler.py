"""The queue of requests for workers: the order in which they are placed, and on which workers. Pure.

    PlacementRequest ── push ──▶ Waiter ── next_turn ──▶ Turn ── decode workers are asked ──▶ grant
                                    ▲                               │
                                    └──────── Refusal ◀─────────────┘

A waiter is a request in the queue. Its *turn* is the time from the selection of its workers to the answer of the
decode workers: it has left the queue, and counts at the selected prefill worker.

Order: the tenant with the fewest requests at workers comes first; among equals, the tenant that was served least
recently. Each tenant with waiters may fill an equal part of the queue's capacity, so that a flood fills only the part
of its own tenant; the whole queue holds at most capacity × (1 + 1/2 + 1/3 + ...) waiters. A waiter past its deadline
gets no turn. A request that is tried again after a failure goes before the others of its tenant.

A waiter gets its turn only when a prefill worker has room for it. After a refusal by decode workers, `refusals.py` has
the rule for which waiters may reserve. The caller gives the time (in seconds) and the fleet with each call.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from baton.errors import DeadlineExceeded, Overloaded
from baton.rates import DecayingSum
from router.fair_queue import FairQueue
from router.placement.policy import (
    FleetView,
    OpenBreakers,
    SelectionCriteria,
    WorkerSelection,
    can_serve,
    compatible_decode_addresses,
    select_workers,
)
from router.placement.prefix_directory import PrefixDirectory
from router.placement.refusals import RefusalGate
from router.placement.waiter import PlacementRequest, Refusal, Waiter

T = TypeVar("T", bound=Hashable)

_MAX_SCANNED = 64
"""Most waiters that one search for a turn looks at, besides the first one of each tenant."""

_MAX_SKIPPED = 8
"""Most waiters that one search passes over because no prefill worker has room for them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiter and the workers to ask for it; `selection` is None if it is too large for every decode worker."""

    waiter: Waiter
    criteria: SelectionCriteria
    selection: WorkerSelection | None = None


def selection_criteria(
    request: PlacementRequest, too_small_reasons: Mapping[str, str], fleet: FleetView, prefixes: PrefixDirectory
) -> SelectionCriteria:
    """The placement criteria of a request, for the fleet and the known prefixes as they are now.

    `too_small_reasons` has the reason of each decode worker that can never hold the request, by address.
    """
    views = (
        (each, fleet.prefill.get(each.address) or fleet.decode.get(each.address)) for each in request.avoided_workers
    )
    return SelectionCriteria(
        request.context_tokens,
        request.needs_decode,
        avoided_workers=frozenset(each.address for each, view in views if view is not None and each.applies(view)),
        avoided_pairs=request.avoided_pairs,
        too_small_workers=frozenset(too_small_reasons),
        prefill_match=prefixes.match_prefill(request.digests),
        decode_match=prefixes.match_decode(request.digests),
    )


class PlacementScheduler:
    """The queue of requests and the rules for their turns; times are seconds on the caller's clock.

    `capacity` is the most requests in the queue of a single tenant. A prefill worker with `prefill_limit` requests of
    this router gets no more; the limit is doubled for a tenant with less than its share. If the expected wait exceeds
    `max_wait_s`, new requests are refused; 0 means no limit.
    """

    def __init__(self, prefixes: PrefixDirectory, *, capacity: int, prefill_limit: int, max_wait_s: float) -> None:
        self._prefixes = prefixes
        self._prefill_limit = prefill_limit
        self._max_wait_s = max_wait_s
        self._in_flight: Counter[str] = Counter()
        """Number of requests at prefill workers, by tenant."""
        self._queue: RequestQueue[Waiter] = RequestQueue(capacity, lambda tenant: self._in_flight[tenant])
        self._gate = RefusalGate()
        self._no_workers_since: float | None = None

    @property
    def fleet_epoch(self) -> int:
        """Number of the current epoch; in each one, refused waiters may reserve again."""
        return self._gate.fleet_epoch

    @property
    def waits_for_decode(self) -> bool:
        """Whether the queue waits for decode workers, which have refused its first request, and not for prefill."""
        return self._gate.head_of_line_waits

    def __len__(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._queue)

    def check_capacity(self, tenant: str) -> None:
        """Raise Overloaded if the queue is full for the tenant."""
        self._queue.check_capacity(tenant)

    def push(self, waiter: Waiter, fleet: FleetView, now: float) -> None:
        """Add a waiter to the queue.

        Raises Overloaded if the queue is full or the expected wait too long, DeadlineExceeded after the deadline.
        """
        request = waiter.request
        if request.is_retry:
            self._queue.push_front_of_tenant(waiter, tenant=request.tenant, deadline=request.deadline)
            return
        if can_serve(fleet, needs_decode=request.needs_decode):
            # The pace of the queue does not tell when a worker will come.
            self._check_wait(request, now)
        self._queue.push(waiter, tenant=request.tenant, deadline=request.deadline, now=now)

    def next_turn(
        self, fleet: FleetView, breakers: OpenBreakers, now: float, without_prefill_room: set[Waiter]
    ) -> Turn | None:
        """The next turn; None if no waiter can use one.

        The caller must call `begin_turn` or `remove` with its waiter. Waiters for which no prefill worker has room
        are added to `without_prefill_room`, and left out. One call sorts the tenants, and looks at one waiter for each
        and `_MAX_SCANNED` more, at most.
        """
        tenants = len(self._in_flight.keys() | self._queue.tenants)
        for waiter in self._candidates(fleet, now, tenants + _MAX_SCANNED):
            if waiter in without_prefill_room:
                continue
            self.forget_departed(waiter, fleet)
            if self.is_too_large(waiter, fleet):
                return Turn(waiter, self._criteria(waiter, fleet))
            if fleet.has_capacity(limit := self._tenant_prefill_limit(waiter.request.tenant, tenants, fleet)):
                criteria = self._criteria(waiter, fleet)
                selection = select_workers(fleet, criteria, prefill_limit=limit, open_breakers=breakers)
                if selection is not None:
                    return Turn(waiter, criteria, selection)
            # Waiters behind it may still find a prefill worker that it can't use.
            without_prefill_room.add(waiter)
            if len(without_prefill_room) > _MAX_SKIPPED:
                return None
        return None

    def begin_turn(self, waiter: Waiter) -> None:
        """Take the waiter out of the queue and count it at a prefill worker. The caller must call `end_turn`."""
        self._queue.pop(waiter)
        self._in_flight[waiter.request.tenant] += 1
        if waiter.request.needs_decode:
            self._gate.begin_reserving(waiter)

    def end_turn(self, waiter: Waiter) -> None:
        """End the waiter's turn, whether it got a placement or not."""
        self._gate.end_reserving(waiter)

    def release_prefill(self, tenant: str) -> None:
        """Count one request fewer of the tenant at prefill workers."""
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]

    def record_grant(self, waiter: Waiter, now: float) -> None:
        """Record that the waiter got its placement."""
        self._queue.record_departure(now)
        if waiter.request.needs_decode:
            self._gate.record_grant(waiter)
            self._queue.worker_retry_after_s = 0.0

    def record_refusal(self, waiter: Waiter, refusal: Refusal, now: float) -> None:
        """Return a refused waiter to the queue. It reserves again in a later epoch: each status begins one."""
        waiter.refusal = refusal
        # Others may have more workers to use than a restricted waiter, or only one choice.
        all_refuse = not (refusal.refused_for_choices or refusal.excluded_workers)
        self.requeue(waiter, now, as_head=all_refuse)
        self._gate.record_refusal(waiter, now)
        if all_refuse:
            self._queue.worker_retry_after_s = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else 0.0

    def requeue(self, waiter: Waiter, now: float, *, as_head: bool) -> None:
        """Return a waiter to the front: of the whole queue if `as_head`, else of its tenant's queue."""
        push = self._queue.push_head_of_line if as_head else self._queue.push_front_of_tenant
        push(waiter, tenant=waiter.request.tenant, deadline=waiter.request.deadline)
        if waiter is self._queue.head_of_line:
            self._gate.record_head_of_line(waiter, now)

    def remove(self, waiter: Waiter) -> bool:
        """Remove the waiter from the queue; False if it was not in it."""
        return self._queue.remove(waiter)

    def forget(self, waiter: Waiter) -> None:
        """Delete all that is known of a waiter that will not return to the queue."""
        self._gate.forget(waiter)

    def begin_epoch(self) -> None:
        """Let refused waiters reserve again."""
        self._gate.begin_epoch()

    def is_too_large(self, waiter: Waiter, fleet: FleetView) -> bool:
        """Whether the request is too large for every decode worker that is there."""
        too_small_reasons = waiter.refusal.too_small_reasons
        return (
            bool(too_small_reasons)
            and bool(matching := compatible_decode_addresses(fleet))
            and too_small_reasons.keys() >= matching
        )

    def forget_departed(self, waiter: Waiter, fleet: FleetView) -> None:
        """Delete the answers of decode workers that have left: a larger one may come at the address."""
        if waiter.refusal.too_small_reasons:
            matching = compatible_decode_addresses(fleet)
            too_small_reasons = {
                name: reason for name, reason in waiter.refusal.too_small_reasons.items() if name in matching
            }
            waiter.refusal = replace(waiter.refusal, too_small_reasons=too_small_reasons)

    @property
    def lacks_workers(self) -> bool:
        """Whether requests wait while no pair of workers can serve, as of the last `record_fleet`."""
        return self._no_workers_since is not None

    def record_fleet(self, fleet: FleetView, now: float) -> None:
        """Record since when requests wait while no pair of workers can serve."""
        if not len(self._queue) or can_serve(fleet, needs_decode=True):
            self._no_workers_since = None
        elif self._no_workers_since is None:
            self._no_workers_since = now

    def overdue(self, fleet: FleetView, now: float, worker_wait_s: float) -> tuple[list[Waiter], float]:
        """Waiters that have waited `worker_wait_s` seconds while no workers can serve them.

        Also returns the time when the next waiter will have waited so long; infinite if there is none.
        """
        late, next_at = [], math.inf
        if self._no_workers_since is not None:
            for waiter in self._queue:
                until = max(self._no_workers_since, waiter.queued_at) + worker_wait_s
                if until > now:
                    next_at = min(next_at, until)
                elif not can_serve(fleet, needs_decode=waiter.request.needs_decode):
                    late.append(waiter)
        return late, next_at

    def _check_wait(self, request: PlacementRequest, now: float) -> None:
        left_s, wait_s = request.deadline - now, self._queue.expected_wait_s(request.tenant, now)
        if 0 < left_s < wait_s:
            problem = f"the deadline is in {left_s:.1f} s, the queue is expected to take {wait_s:.1f} s"
            raise Overloaded(problem, self._queue.retry_after(), reason="deadline")
        if 0 < self._max_wait_s < wait_s:
            problem = f"the queue is expected to take {wait_s:.1f} s, {self._max_wait_s:g} s are allowed"
            raise Overloaded(problem, max(wait_s - self._max_wait_s, _MIN_RETRY_S), reason="queue_wait")

    def _candidates(self, fleet: FleetView, now: float, most: int) -> Iterator[Waiter]:
        """Waiters among the first `most` that may have a turn now, in order."""
        restricted = self._gate.restricted_waiter
        if (
            restricted is not None
            and restricted in self._queue
            and restricted.request.deadline > now
            and self._gate.restricted_may_reserve(self._queue.head_of_line)
        ):
            yield restricted
        # Waiters that need decode workers must not hide waiters that need none.
        can_decode = can_serve(fleet, needs_decode=True)
        waiting = self._queue.candidates(now)
        if not can_decode:
            waiting = (waiter for waiter in waiting if not waiter.request.needs_decode)
        for waiter in itertools.islice(waiting, most):
            if not waiter.request.needs_decode or self._gate.may_reserve(
                waiter, self._queue.head_of_line, fleet.isolated
            ):
                yield waiter

    def _criteria(self, waiter: Waiter, fleet: FleetView) -> SelectionCriteria:
        return selection_criteria(waiter.request, waiter.refusal.too_small_reasons, fleet, self._prefixes)

    def _tenant_prefill_limit(self, tenant: str, tenants: int, fleet: FleetView) -> int:
        """Number of requests of this router at which a prefill worker gets no more requests of this tenant.

        The number is doubled for a tenant with less than its share of the places at prefill workers. So it need not
        wait until long prompts of another tenant have ended, and a worker computes its shortest prompt first.
        """
        limit = self._prefill_limit
        share = limit * fleet.usable_prefills // tenants
        return 2 * limit if tenants > 1 and self._in_flight[tenant] < max(share, 1) else limit


_SPAN_S = 3.0
"""Seconds in which the weight of a departure in the measured pace falls to 1/e."""

_MAX_INTERVAL_RATIO = 3.0
"""An interval between departures counts as at most this multiple of the usual interval, or as `_SPAN_S` if longer."""

_MIN_DEPARTURES = 8
"""Number of departures needed to know the pace of the queue: workers are cold at the first ones."""

_FIRST_GUESS_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0


class RequestQueue(Generic[T]):
    """Waiters of all tenants in order, and the pace at which they leave; times are seconds on the caller's clock.

    `in_flight` returns the number of requests that a tenant has at workers.
    """

    def __init__(self, capacity: int, in_flight: Callable[[str], int] = lambda _: 0) -> None:
        self._capacity = capacity
        self._in_flight = in_flight
        self._queue: FairQueue[T] = FairQueue()
        self._deadlines: dict[T, float] = {}
        self._head_of_line: tuple[T, str] | None = None
        self._busy_s, self._departures = DecayingSum(_SPAN_S), DecayingSum(_SPAN_S)
        self._busy_clock = 0.0
        """Seconds of all busy periods together: the clock of the two decaying sums."""
        self._counted = 0
        self.worker_retry_after_s = 0.0
        """Least seconds until a client should retry, as told by the workers; 0 if they told none."""
        self._last_departure: float | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._deadlines))

    def __contains__(self, waiter: object) -> bool:
        return waiter in self._deadlines

    @property
    def tenants(self) -> Collection[str]:
        """Tenants that have waiters."""
        return {*self._queue.tenants, *(() if self._head_of_line is None else (self._head_of_line[1],))}

    @property
    def head_of_line(self) -> T | None:
        """The waiter that all workers refused and that goes before the whole queue; None if there is none."""
        return None if self._head_of_line is None else self._head_of_line[0]

    def check_capacity(self, tenant: str) -> None:
        """Raise Overloaded, with the seconds until a retry, if the tenant's part of the queue is full."""
        waiting, tenants = self._queue.count(tenant), self._queue.tenants
        share = max(1, self._capacity // (len(tenants) + (tenant not in tenants)))
        if waiting >= share:
            problem = f"{waiting} requests are waiting, the limit is {share}; try again later"
            raise Overloaded(problem, self.retry_after(), reason="queue_full")

    def push(self, waiter: T, *, tenant: str, deadline: float = math.inf, now: float) -> None:
        """Add to the end of the tenant's queue.

        Raises Overloaded if the tenant's part of the queue is full, DeadlineExceeded if `deadline` has passed.
        """
        if deadline <= now:
            raise DeadlineExceeded("the deadline had passed when the request came")
        self.check_capacity(tenant)
        if not self._deadlines:
            # The time for which the queue was empty is no standstill.
            self._last_departure = None
        self._queue.append(waiter, tenant)
        self._deadlines[waiter] = deadline

    def push_front_of_tenant(self, waiter: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Add to the front of the tenant's queue, even if its part is full. The order of the tenants stays."""
        self._queue.prepend(waiter, tenant)
        self._deadlines[waiter] = deadline

    def push_head_of_line(self, waiter: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Add to the front of the whole queue.

        If a waiter is there already, add to the front of the tenant's queue, and put this tenant before the others.
        """
        if self._head_of_line is None:
            self._head_of_line, self._deadlines[waiter] = (waiter, tenant), deadline
        else:
            self.push_front_of_tenant(waiter, tenant=tenant, deadline=deadline)
            self._queue.advance(tenant)

    def candidates(self, now: float) -> Iterator[T]:
        """All waiters in order; the queue must not change meanwhile.

        The head of line comes first, then the first waiter of each tenant, then the second of each, and so on.
        So waiters of one tenant that find no workers do not hide another tenant's. Waiters past their deadline are left
        out.
        """
        self._drop_late(now)
        if self._head_of_line is not None:
            yield self._head_of_line[0]
        deadlines = self._deadlines
        yield from self._queue.round_robin(self._in_flight, lambda waiter: deadlines[waiter] > now)

    def pop(self, waiter: T) -> None:
        """Remove a waiter, and put its tenant behind the other tenants unless it was `head_of_line`."""
        if waiter == self.head_of_line:
            self.remove(waiter)
        else:
            self._queue.pop(waiter)
            del self._deadlines[waiter]

    def remove(self, waiter: T) -> bool:
        """Remove a waiter; False if it was not in the queue."""
        if self._deadlines.pop(waiter, None) is None:
            return False
        if self._head_of_line is not None and self._head_of_line[0] == waiter:
            self._head_of_line = None
        else:
            self._queue.remove(waiter)
        return True

    def record_departure(self, now: float) -> None:
        """Count a waiter that has left the queue for good; departures make the pace."""
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
        """Mean seconds between two recent departures; 0 while unknown."""
        now = self._busy_clock
        return self._busy_s.value(now) / self._departures.value(now) if self._counted else 0.0

    def retry_after(self) -> float:
        """Seconds until a client should retry: those until the queue is empty at its recent pace, within limits."""
        estimate = len(self) * self._interval if self._interval else _FIRST_GUESS_S
        return min(max(estimate, self.worker_retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def expected_wait_s(self, tenant: str, now: float) -> float:
        """Expected wait in seconds of a tenant's next waiter, from recent departures; 0 if unknown.

        A request whose deadline is sooner is refused, so the estimate must never be too long. Therefore it is 0 until
        enough departures were measured, and leaves out the request's own time: its prompt may be cached.
        """
        own = self._queue.count(tenant)
        # Until the new waiter is reached, no other tenant is served more often than this one.
        others = sum(min(self._queue.count(name), own + 1) for name in self._queue.tenants if name != tenant)
        before = own + others + (self._head_of_line is not None)
        if not before or self._counted < _MIN_DEPARTURES:
            return 0.0
        standstill = 0.0 if self._last_departure is None else now - self._last_departure
        return before * self._interval + max(standstill - self._interval, 0.0)

    def _drop_late(self, now: float) -> None:
        if self._head_of_line is not None and self._deadlines[self._head_of_line[0]] <= now:
            self.remove(self._head_of_line[0])
        while late := [waiter for waiter in self._queue.heads() if self._deadlines[waiter] <= now]:
            for waiter in late:
                self.remove(waiter)
