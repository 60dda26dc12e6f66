"""The waiting line: bounded, fair between tenants, aware of deadlines. Pure.

Each tenant has a queue of its own. The tenant that has the fewest requests at workers is next, and of those that have
equally many each in turn. A tenant may hold its share of the capacity, which is
an equal part for each tenant that waits; so a flood fills the flooder's share alone, and the whole line holds at most
capacity × (1 + 1/2 + 1/3 + ...) entries. What lies past its deadline is never handed out.

A request that is tried again after a failure goes before the others of its tenant, and before nobody else's. One that
all workers refused is the first of all, since it has had its turn: one at a time, whichever was refused first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar

from baton.errors import DeadlineExceeded, Overloaded

T = TypeVar("T", bound=Hashable)

_SPAN_S = 3.0
"""Departures, and the time that they took, count for the pace with a weight that falls to 1/e in this time."""

_STANDSTILL = 3.0
"""An interval counts for at most so many times the usual one, or for the span."""

_FOUNDED = 8
"""Departures of a busy line from which on they tell its pace: the first ones are those of cold workers."""

_FIRST_GUESS_S = 1.0
SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0


class WaitingLine(Generic[T]):
    """A line of distinct entries; times are in seconds on the caller's clock.

    `held` tells how many requests a tenant has at workers.
    """

    def __init__(self, capacity: int, held: Callable[[str], int] = lambda _: 0) -> None:
        self._capacity = capacity
        self._held = held
        self._queues: OrderedDict[str, OrderedDict[T, float]] = OrderedDict()
        self._tenants: dict[T, str] = {}
        self._first: tuple[T, float] | None = None
        self._busy_s = self._departures = 0.0
        self._counted = 0
        self.hint_s = 0.0
        """Least delay of a retry, as told by those whom the line waits for; 0 without."""
        self._last_departure: float | None = None

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._tenants))

    def __contains__(self, entry: object) -> bool:
        return entry in self._tenants

    @property
    def tenants(self) -> Collection[str]:
        """Those who wait."""
        first = () if self._first is None else (self._tenants[self._first[0]],)
        return self._queues.keys() | first

    def check(self, tenant: str) -> None:
        """Raise Overloaded, with a delay after which a retry makes sense, if the tenant's share is full."""
        waiting = len(self._queues.get(tenant, ()))
        share = max(1, self._capacity // (len(self._queues) + (tenant not in self._queues)))
        if waiting >= share:
            raise Overloaded(f"{waiting} requests wait, {share} may; try again later", self.retry_after())

    def push(self, entry: T, *, tenant: str, deadline: float = math.inf, now: float) -> None:
        """Join the tenant's queue at its end. Raises Overloaded, or DeadlineExceeded when it is too late."""
        if deadline <= now:
            raise DeadlineExceeded("the deadline had passed when the request came")
        self.check(tenant)
        if not self._tenants:
            # Those before it may have given up, and the time since then is no standstill.
            self._last_departure = None
        self._queue(tenant)[entry] = deadline
        self._tenants[entry] = tenant

    def push_front(self, entry: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Join the tenant's queue at its head: what was accepted once is not refused. Turns are what they were."""
        queue = self._queue(tenant)
        queue[entry] = deadline
        queue.move_to_end(entry, last=False)
        self._tenants[entry] = tenant

    def put_back(self, entry: T, *, tenant: str, deadline: float = math.inf) -> None:
        """Return from a turn that brought nothing: to the head of the line, or where somebody else is there, of the
        tenant's queue, which has its turn again."""
        if self._first is None:
            self._first, self._tenants[entry] = (entry, deadline), tenant
        else:
            self.push_front(entry, tenant=tenant, deadline=deadline)
            self._queues.move_to_end(tenant, last=False)

    @property
    def first(self) -> T | None:
        """Who came back from its turn and is the first of all."""
        return None if self._first is None else self._first[0]

    def candidates(self, now: float) -> Iterator[T]:
        """All entries, those before whose turn comes first; the line must not change meanwhile.

        That is the first of each tenant in the order of their turns, then the second of each, and so on: however many
        of one tenant's requests can't go on, they hide nobody else's. Those past their deadline are left out, and leave
        the line when they have come to its head.
        """
        self._drop_late(now)
        if self._first is not None:
            yield self._first[0]
        # Of equals, `sorted` leaves the order: the queues lie in the order of their turns.
        queues = [iter(self._queues[tenant].items()) for tenant in sorted(self._queues, key=self._held)]
        while queues:
            longer = []
            for queue in queues:
                entry = next((entry for entry, deadline in queue if deadline > now), None)
                if entry is not None:
                    yield entry
                    longer.append(queue)
            queues = longer

    def take(self, entry: T) -> None:
        """Hand an entry out; its tenant's next turn is after those of all others, unless it was the first of all."""
        tenant, first = self._tenants[entry], self.first
        self.remove(entry)
        if entry != first and tenant in self._queues:
            self._queues.move_to_end(tenant)

    def remove(self, entry: T) -> bool:
        """Leave the line; False if the entry was not in it."""
        tenant = self._tenants.pop(entry, None)
        if tenant is None:
            return False
        if self._first is not None and self._first[0] == entry:
            self._first = None
            return True
        queue = self._queues[tenant]
        del queue[entry]
        if not queue:
            del self._queues[tenant]
        return True

    def departed(self, now: float) -> None:
        """Somebody who was popped will not return: that is the line's pace."""
        # Only intervals within a busy period tell the pace; an idle line has none.
        if self._last_departure is not None:
            latest = now - self._last_departure
            if self._departures:
                # One standstill of a quick line does not make it a slow one; several do.
                latest = min(latest, max(_SPAN_S, _STANDSTILL * self._interval))
            fading = math.exp(-latest / _SPAN_S)
            self._busy_s = self._busy_s * fading + latest
            self._departures = self._departures * fading + 1
            self._counted += 1
        self._last_departure = now if self._tenants else None

    @property
    def _interval(self) -> float:
        """Seconds between two departures of late; 0 while unknown."""
        return self._busy_s / self._departures if self._departures else 0.0

    def retry_after(self) -> float:
        """Seconds in which the line, at the pace of its latest departures, would be empty."""
        estimate = len(self) * self._interval if self._interval else _FIRST_GUESS_S
        return min(max(estimate, self.hint_s, SHORTEST_RETRY_S), _LONGEST_RETRY_S)

    def wait_s(self, tenant: str, now: float) -> float:
        """Seconds that a tenant's next entry would wait, at that pace and at the present standstill; 0 if unknown.

        It is what the refusal of a deadline rests on, and whoever could have been served must not be refused. So a pace
        counts once it is founded, and what a request itself takes does not: its prompt may be cached, and be computed
        before those that are not.
        """
        own = len(self._queues.get(tenant, ()))
        # With turns, no other tenant is served more often than this one until this one's entry is reached.
        others = sum(min(len(queue), own + 1) for name, queue in self._queues.items() if name != tenant)
        before = own + others + (self._first is not None)
        if not before or self._counted < _FOUNDED:
            return 0.0
        standstill = 0.0 if self._last_departure is None else now - self._last_departure
        return before * self._interval + max(standstill - self._interval, 0.0)

    def _drop_late(self, now: float) -> None:
        if self._first is not None and self._first[1] <= now:
            self.remove(self._first[0])
        for queue in list(self._queues.values()):
            while queue:
                entry, deadline = next(iter(queue.items()))
                if deadline > now:
                    break
                self.remove(entry)

    def _queue(self, tenant: str) -> OrderedDict[T, float]:
        return self._queues.setdefault(tenant, OrderedDict())
