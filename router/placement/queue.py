"""The router's queues: fair between tenants, and for requests also bounded and aware of deadlines. Pure.

`FairQueue` has a queue for each tenant, and tenants take turns. `RequestQueue` holds the requests that wait for
workers: the tenant that has the fewest requests at workers is next, and of those that have equally many each in turn.
A tenant may hold its share of the capacity, which is an equal part for each tenant that waits; so a flood fills the
flooder's share alone, and the whole queue holds at most capacity × (1 + 1/2 + 1/3 + ...) entries. What lies past its
deadline is never handed out.

A request that is tried again after a failure goes before the others of its tenant, and before nobody else's. One that
all workers refused is the first of all, since it has had its turn: one at a time, whichever was refused first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar

from baton.errors import DeadlineExceeded, Overloaded
from baton.rates import DecayingSum

T = TypeVar("T", bound=Hashable)

_SPAN_S = 3.0
"""Departures, and the time that they took, count for the pace with a weight that falls to 1/e in this time."""

_MAX_INTERVAL_RATIO = 3.0
"""An interval counts for at most so many times the usual one, or for the span."""

_MIN_DEPARTURES = 8
"""Departures of a busy queue from which on they tell its pace: the first ones are those of cold workers."""

_FIRST_GUESS_S = 1.0
MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0


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
        """The entries that wait."""
        return self._queues.keys()

    def count(self, tenant: str) -> int:
        """The number of entries of a tenant that wait."""
        return len(self._queues.get(tenant, ()))

    def append(self, entry: T, tenant: str) -> None:
        """Join the tenant's queue at its end."""
        self._queues.setdefault(tenant, OrderedDict())[entry] = None
        self._tenants[entry] = tenant

    def prepend(self, entry: T, tenant: str) -> None:
        """Join the tenant's queue at its head; whose turn it is stays what it was."""
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
        """The entries that wait."""
        return {*self._queue.tenants, *(() if self._first is None else (self._first[1],))}

    @property
    def first(self) -> T | None:
        """The first of all: what came back from its turn."""
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
        """Join the tenant's queue at its head: what was accepted once is not refused. Turns are what they were."""
        self._queue.prepend(entry, tenant)
        self._deadlines[entry] = deadline

    def push_first(self, entry: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Return from a turn that brought nothing: to the head of the whole queue, or where somebody else is there, of
        the tenant's, which has its turn again."""
        if self._first is None:
            self._first, self._deadlines[entry] = (entry, tenant), deadline
        else:
            self.push_front(entry, tenant=tenant, deadline=deadline)
            self._queue.advance(tenant)

    def candidates(self, now: float) -> Iterator[T]:
        """All entries, those before whose turn comes first; the queue must not change meanwhile.

        That is the first of each tenant in the order of their turns, then the second of each, and so on: however many
        of one tenant's requests can't go on, they hide nobody else's. Those past their deadline are left out, and leave
        the queue when they have come to its head.
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
        return min(max(estimate, self.hint_s, MIN_RETRY_S), _MAX_RETRY_S)

    def expected_wait_s(self, tenant: str, now: float) -> float:
        """Seconds that a tenant's next entry would wait, at that pace and at the present standstill; 0 if unknown.

        It is what the refusal of a deadline rests on, and whoever could have been served must not be refused. So a pace
        counts once it is measured, and what a request itself takes does not: its prompt may be cached, and be computed
        before those that are not.
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
