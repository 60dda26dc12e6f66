"""The queue of requests for workers: who asks decode workers for pages next. Pure; the caller passes times in seconds.

    PlacementRequest ── push ──▶ Waiter ── next_to_register ──▶ registered: it asks decode workers ── granted ──▶ remove

Order: the tenant with the fewest requests at prefill workers comes first; among equals, the one that was served least
recently. Requests that are tried again after a failure go before the others of their tenant, the oldest first. Each
tenant with waiters may fill an equal part of the queue's capacity, so that a flood fills only the part of its own
tenant; the whole queue holds at most capacity × (1 + 1/2 + 1/3 + ...) first attempts.

A reservation for which a decode worker lacks room waits at that worker. So waiters need not ask again, and few of them
are registered: a waiter is *hidden* while registered ones *wait* that would be granted no later, because neither their
context nor their length with all outputs is larger. The first waiter of the queue is registered in any case, and so are
all replays. So a flood of large contexts registers one of them, small contexts behind it go on, and while these pass,
the first one is in line at the workers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.errors import DeadlineExceeded, Overloaded
from baton.lifecycle import Lifecycle
from baton.request import CachePolicy
from router.placement.policy import FleetView, can_serve
from router.placement.prefix_directory import Digests
from router.workers.failures import AvoidedWorker

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Distinct items of several tenants, in order for each tenant; tenants are served round-robin."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, tuple[OrderedDict[T, None], OrderedDict[T, None]]] = OrderedDict()
        """By tenant: the items that go first, and the others."""
        self._tenants: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._tenants))

    @property
    def tenants(self) -> Collection[str]:
        """Tenants that have items."""
        return self._queues.keys()

    def count(self, tenant: str) -> int:
        """Number of items of a tenant."""
        return sum(map(len, self._queues.get(tenant, ())))

    def append(self, item: T, tenant: str, *, first: bool = False) -> None:
        """Add to the end of the tenant's queue, or to the end of its items that go first."""
        before, after = self._queues.setdefault(tenant, (OrderedDict(), OrderedDict()))
        (before if first else after)[item] = None
        self._tenants[item] = tenant

    def pop(self, item: T) -> None:
        """Remove an item, and put its tenant behind the others."""
        tenant = self._tenants[item]
        self.remove(item)
        if tenant in self._queues:
            self._queues.move_to_end(tenant)

    def remove(self, item: T) -> bool:
        """Remove an item; False if it was not in the queue."""
        tenant = self._tenants.pop(item, None)
        if tenant is None:
            return False
        for part in self._queues[tenant]:
            part.pop(item, None)
        if not any(self._queues[tenant]):
            del self._queues[tenant]
        return True

    def heads(self) -> list[T]:
        """The first item of each tenant, in the order of the tenants."""
        return [next(itertools.chain(*queue)) for queue in self._queues.values()]

    def round_robin(self, load: Callable[[str], float]) -> Iterator[T]:
        """The first item of each tenant, then the second of each, and so on; the queue must not change meanwhile.

        Tenants with a lower `load` come first; tenants of equal load stay in order. The tenants are sorted once; an
        item costs the same however many there are.
        """
        queues = [itertools.chain(*self._queues[tenant]) for tenant in sorted(self._queues, key=load)]
        while queues:
            items = [(queue, item) for queue in queues for item in itertools.islice(queue, 1)]
            yield from (item for _, item in items)
            queues = [queue for queue, _ in items]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The request of one attempt for workers.

    `is_retry` is set for an attempt that goes before new requests, because its request was accepted before;
    `needs_decode` if the attempt needs a decode worker. The state of `lifecycle` changes from QUEUED to RESERVING when
    decode workers are asked. `digests` are the hashes of the context's blocks, and are empty for a request that must
    not read the prefix cache.
    """

    request_id: str
    attempt_number: int
    tenant: str
    lifecycle: Lifecycle
    context_tokens: int
    max_new_tokens: int
    choices: tuple[int, ...]
    is_retry: bool
    needs_decode: bool = True
    digests: Digests = field(default_factory=dict)
    salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    avoided_workers: frozenset[AvoidedWorker] = frozenset()
    """Workers that failed the request in earlier attempts."""
    avoided_pairs: frozenset[tuple[str, str]] = frozenset()
    """Addresses of (prefill, decode) pairs that failed it."""
    in_place_only: frozenset[str] = frozenset()
    """Addresses of mixed workers that should not prefill for another worker."""

    @property
    def deadline(self) -> float:
        """The deadline of the request, in seconds on the event loop's clock; infinite if it has none."""
        return self.lifecycle.request_deadline

    @property
    def length(self) -> int:
        """Number of tokens of context and output together."""
        return self.context_tokens + self.max_new_tokens


@dataclass(eq=False)
class Waiter:
    """A request in the queue."""

    request: PlacementRequest
    waits: bool = False
    """Whether it is registered, and decode workers lack room for it, as far as is known."""


W = TypeVar("W", bound=Waiter)

_MAX_SCANNED = 256
"""Most waiters that one search looks at, besides the first one of each tenant and those that are registered."""

_MIN_INTERVALS, _MAX_INTERVALS = 8, 64
"""Number of intervals between departures needed to know the pace of the queue, and number of the latest that count."""

_STANDSTILL_S = 3.0
"""Seconds without a departure that are a standstill, if they are more than three usual intervals."""

_FIRST_GUESS_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0


class PlacementQueue(Generic[W]):
    """Waiters of all tenants in order, and the pace at which they leave.

    `capacity` is the most first attempts of a single tenant. A prefill worker with `prefill_limit` requests of this
    router gets no more; the limit is doubled for a tenant with less than its share. If the expected wait exceeds
    `max_wait_s`, new requests are refused; 0 means no limit.
    """

    def __init__(self, *, capacity: int, prefill_limit: int, max_wait_s: float = 0.0) -> None:
        self._capacity = capacity
        self._prefill_limit = prefill_limit
        self._max_wait_s = max_wait_s
        self._queue: FairQueue[W] = FairQueue()
        self.registered: set[W] = set()
        """Waiters that ask decode workers now; the caller adds each one."""
        self._at_prefill: Counter[str] = Counter()
        """Number of requests at prefill workers, by tenant."""
        self._intervals: deque[float] = deque(maxlen=_MAX_INTERVALS)
        """Seconds between departures of late, in which the queue was never empty."""
        self._last_departure: float | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[W]:
        return iter(self._queue)

    @property
    def waits_for_decode(self) -> bool:
        """Whether decode workers lack room for a waiter, so that the queue does not wait for prefill workers."""
        return any(waiter.waits for waiter in self.registered)

    # Joining.

    def check_capacity(self, tenant: str) -> None:
        """Raise Overloaded, with the seconds until a retry, if the tenant's part of the queue is full."""
        waiting, tenants = self._queue.count(tenant), self._queue.tenants
        share = max(1, self._capacity // (len(tenants) + (tenant not in tenants)))
        if waiting >= share:
            problem = f"{waiting} requests are waiting, the limit is {share}; try again later"
            raise Overloaded(problem, self.retry_after(), reason="queue_full")

    def push(self, waiter: W, fleet: FleetView, now: float) -> None:
        """Add a waiter: a retry before the first attempts of its tenant, another one to the end.

        Raises Overloaded if the queue is full or the expected wait too long, DeadlineExceeded after the deadline; a
        retry is refused in no case.
        """
        request = waiter.request
        if not len(self._queue):
            # The time for which the queue was empty is no standstill.
            self._last_departure = None
        if request.is_retry:
            self._queue.append(waiter, request.tenant, first=True)
            return
        if request.deadline <= now:
            raise DeadlineExceeded("the deadline had passed when the request came")
        if can_serve(fleet, needs_decode=request.needs_decode):
            # The pace of the queue does not tell when a worker will come.
            self._check_wait(request, now)
        self.check_capacity(request.tenant)
        self._queue.append(waiter, request.tenant)

    def _check_wait(self, request: PlacementRequest, now: float) -> None:
        left_s, wait_s = request.deadline - now, self.expected_wait_s(request.tenant, now)
        if wait_s and self.waits_for_decode and not (is_hidden := self._hiding())(request):
            # It overtakes the others, and waits only for those that overtake them too.
            fresh = (each for each in self._queue if each not in self.registered)
            before = sum(not is_hidden(each.request) for each in itertools.islice(fresh, _MAX_SCANNED))
            wait_s = min(wait_s, before * self._interval)
        if 0 < left_s < wait_s:
            problem = f"the deadline is in {left_s:.1f} s, the queue is expected to take {wait_s:.1f} s"
            raise Overloaded(problem, self.retry_after(), reason="deadline")
        if 0 < self._max_wait_s < wait_s:
            problem = f"the queue is expected to take {wait_s:.1f} s, {self._max_wait_s:g} s are allowed"
            raise Overloaded(problem, max(wait_s - self._max_wait_s, _MIN_RETRY_S), reason="queue_wait")

    # Order.

    def next_to_register(self, fleet: FleetView, now: float, passed: Container[W]) -> W | None:
        """The next waiter that may ask decode workers; None if there is none. Waiters in `passed` are left out.

        One call sorts the tenants, and looks at one waiter for each and `_MAX_SCANNED` more, at most, besides those
        that are registered.
        """
        order: Iterator[W] = self._queue.round_robin(self._at_prefill.__getitem__)
        if not can_serve(fleet, needs_decode=True):
            # Waiters that need decode workers must not keep others from prefill workers.
            order = (each for each in order if not each.request.needs_decode)
        fresh = ((at, each) for at, each in enumerate(order) if each not in self.registered and each not in passed)
        is_hidden = self._hiding()
        for at, waiter in itertools.islice(fresh, len(self._queue.tenants) + _MAX_SCANNED):
            if waiter.request.deadline > now and (at == 0 or not is_hidden(waiter.request)):
                return waiter
        return None

    def _hiding(self) -> Callable[[PlacementRequest], bool]:
        """A function that tells whether the waiters that wait now hide a request."""
        hiding = [each.request for each in self.registered if each.waits]
        least = _least_sizes(hiding)
        # A worker with room for a context may lack room for it with several choices.
        least_single = _least_sizes([each for each in hiding if len(each.choices) == 1])

        def is_hidden(request: PlacementRequest) -> bool:
            context, length = least if len(request.choices) > 1 else least_single
            may_hide = request.needs_decode and not request.is_retry
            return may_hide and request.context_tokens >= context and request.length >= length

        return is_hidden

    def prefill_limit(self, tenant: str, fleet: FleetView) -> int:
        """Number of requests of this router at which a prefill worker gets no more requests of this tenant.

        The number is doubled for a tenant with less than its share of the places at prefill workers. So it need not
        wait until long prompts of another tenant have ended, and a worker computes its shortest prompt first.
        """
        limit, tenants = self._prefill_limit, len(self._at_prefill.keys() | self._queue.tenants)
        share = limit * len(fleet.usable_prefills) // max(tenants, 1)
        return 2 * limit if tenants > 1 and self._at_prefill[tenant] < max(share, 1) else limit

    def begin_prefill(self, tenant: str) -> None:
        """Count one request more of the tenant at prefill workers."""
        self._at_prefill[tenant] += 1

    def end_prefill(self, tenant: str) -> None:
        """Count one request fewer of the tenant at prefill workers."""
        self._at_prefill[tenant] -= 1
        if not self._at_prefill[tenant]:
            del self._at_prefill[tenant]

    # Leaving.

    def remove(self, waiter: W) -> bool:
        """Remove a waiter that gives up; False if it was not in the queue."""
        self.registered.discard(waiter)
        return self._queue.remove(waiter)

    def pop(self, waiter: W, now: float) -> None:
        """Remove a waiter that is placed, and put its tenant behind the others. Departures make the pace."""
        self.registered.discard(waiter)
        self._queue.pop(waiter)
        if self._last_departure is not None:
            # One standstill of a quick queue does not make it a slow one; several do.
            most = max(_STANDSTILL_S, 3 * self._interval) if self._intervals else math.inf
            self._intervals.append(min(now - self._last_departure, most))
        self._last_departure = now if len(self._queue) else None

    @property
    def _interval(self) -> float:
        """Mean seconds between two recent departures; 0 while unknown."""
        return sum(self._intervals) / max(len(self._intervals), 1)

    def retry_after(self) -> float:
        """Seconds until a client should retry: those until the queue is empty at its recent pace, within limits."""
        estimate = len(self) * self._interval if self._intervals else _FIRST_GUESS_S
        return min(max(estimate, _MIN_RETRY_S), _MAX_RETRY_S)

    def expected_wait_s(self, tenant: str, now: float) -> float:
        """Expected wait in seconds of a tenant's next waiter, from recent departures; 0 if unknown.

        A request whose deadline is sooner is refused, so the estimate must never be too long. Therefore it is 0 until
        enough departures were measured, and leaves out the request's own time: its prompt may be cached.
        """
        own = self._queue.count(tenant)
        # Until the new waiter is reached, no other tenant is served more often than this one.
        before = own + sum(min(self._queue.count(name), own + 1) for name in self._queue.tenants if name != tenant)
        if not before or len(self._intervals) < _MIN_INTERVALS:
            return 0.0
        standstill = 0.0 if self._last_departure is None else now - self._last_departure
        return before * self._interval + max(standstill - self._interval, 0.0)


def _least_sizes(requests: Collection[PlacementRequest]) -> tuple[float, float]:
    """The smallest context and the smallest length of requests, in tokens; infinite without requests."""
    context = min((each.context_tokens for each in requests), default=math.inf)
    return context, min((each.length for each in requests), default=math.inf)
