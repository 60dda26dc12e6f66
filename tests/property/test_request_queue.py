"""The queue under arbitrary arrivals, replays, grants and deadlines of several tenants.

Every waiter leaves exactly once; whose turn it is, is in its tenant's order; a tenant that waits is passed over at most
once by each other one, whatever comes back; no tenant takes more than its share, and the whole queue is bounded. A
waiter that is not registered is hidden by one that waits, and the first of the queue is registered.
"""

import itertools
import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import DeadlineExceeded, Overloaded
from baton.lifecycle import Lifecycle, State
from router.placement.policy import DecodeView, FleetView, PrefillView
from router.placement.queue import PlacementQueue, PlacementRequest, Waiter
from tests.effort import machine_test
from tests.property.fleet import KV

TENANTS = st.sampled_from("abcd")
PATIENCE = st.sampled_from([0.0, 1.0, 3.0, math.inf])
SIZES = st.sampled_from([1, 2, 3, 3, 3, 5])
OUTPUTS = st.sampled_from([1, 1, 1, 4])
FLEET = FleetView([PrefillView("p", KV)], [DecodeView("d", KV)])


def hidden(other: Waiter, registered: list[Waiter]) -> bool:
    """Whether waiters that wait at all decode workers would be granted no later than the other one."""
    theirs = other.request
    hiding = [each.request for each in registered if each.waits]
    hiding = [mine for mine in hiding if len(mine.choices) == 1 or len(theirs.choices) > 1]
    return any(mine.context_tokens <= theirs.context_tokens for mine in hiding) and any(
        mine.context_tokens + mine.max_new_tokens <= theirs.context_tokens + theirs.max_new_tokens for mine in hiding
    )


class QueueMachine(RuleBasedStateMachine):
    """The queue beside lists of what waits in it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count()
        self.capacity = 7
        self.queue: PlacementQueue[Waiter] = PlacementQueue(capacity=self.capacity, prefill_limit=1)
        self.queues: dict[str, list[Waiter]] = {}
        self.registered: list[Waiter] = []
        self.left: set[Waiter] = set()
        self.passed: dict[str, dict[str, int]] = {}
        self.accepted = 0

    def waiting(self, tenant: str) -> list[Waiter]:
        return self.queues.get(tenant, [])

    def waiter(
        self, tenant: str, tokens: int, output: int, patience: float = math.inf, *, again: bool = False
    ) -> Waiter:
        lifecycle = Lifecycle(State.QUEUED, self.now, request_deadline=self.now + patience)
        request = PlacementRequest(f"{next(self.numbers)}", 0, tenant, lifecycle, tokens, output, (0,), again)
        return Waiter(request)

    @rule(tenant=TENANTS, patience=PATIENCE, tokens=SIZES, output=OUTPUTS)
    def arrive(self, tenant: str, patience: float, tokens: int, output: int) -> None:
        waiter = self.waiter(tenant, tokens, output, patience)
        others = sum(1 for other, queue in self.queues.items() if queue and other != tenant)
        full = len(self.waiting(tenant)) >= max(1, self.capacity // (others + 1))
        try:
            self.queue.push(waiter, FLEET, self.now)
        except DeadlineExceeded:
            assert patience == 0.0
        except Overloaded as error:
            assert full or self.queue.expected_wait_s(tenant, self.now) > patience
            self._sane(error.retry_after)
        else:
            assert patience > 0.0
            assert not full
            self._joined(waiter)

    @rule(tenant=TENANTS, tokens=SIZES, output=OUTPUTS)
    def replay(self, tenant: str, tokens: int, output: int) -> None:
        """Another attempt at a request that was served, and failed."""
        waiter = self.waiter(tenant, tokens, output, again=True)
        self.queue.push(waiter, FLEET, self.now)
        self._joined(waiter)

    def _sane(self, retry_after: float | None) -> None:
        assert retry_after is not None
        assert 0.1 <= retry_after <= 60.0

    def _joined(self, waiter: Waiter) -> None:
        tenant = waiter.request.tenant
        queue = self.queues.setdefault(tenant, [])
        if not queue:
            self.passed[tenant] = {}
        replays = sum(each.request.is_retry for each in queue)
        queue.insert(replays if waiter.request.is_retry else len(queue), waiter)
        self.accepted += 1

    @rule(waits=st.booleans())
    def register(self, waits: bool) -> None:
        found = self.queue.next_to_register(FLEET, self.now, ())
        rest = [each for queue in self.queues.values() for each in queue if each not in self.registered]
        if found is None:
            for each in rest:
                if each.request.deadline > self.now:
                    assert not each.request.is_retry
                    assert hidden(each, self.registered)
            if any(self.queues.values()):
                head = next(iter(self.queue._queue.heads()))
                assert head in self.registered or head.request.deadline <= self.now
            return
        assert found in rest
        assert found.request.deadline > self.now
        same = [each for each in rest if each.request.tenant == found.request.tenant]
        for before in same[: same.index(found)]:
            may_pass = hidden(before, self.registered) or before.request.deadline <= self.now
            assert may_pass, "not in the order of its tenant"
        self.queue.registered.add(found)
        found.waits = waits
        self.registered.append(found)

    @precondition(lambda self: self.registered)
    @rule(index=st.integers(0, 99))
    def room_is_short(self, index: int) -> None:
        self.registered[index % len(self.registered)].waits = True

    @precondition(lambda self: self.registered)
    @rule(index=st.integers(0, 99))
    def grant(self, index: int) -> None:
        """Workers grant in any order."""
        waiter = self.registered.pop(index % len(self.registered))
        self.queue.pop(waiter, self.now)
        self.queues[waiter.request.tenant].remove(waiter)
        self.passed[waiter.request.tenant] = {}
        self._gone(waiter)

    @rule()
    def serve_in_order(self) -> None:
        """Without others that wait at workers, tenants take turns."""
        if self.registered:
            return
        waiter = self.queue.next_to_register(FLEET, self.now, ())
        if waiter is None:
            assert all(each.request.deadline <= self.now for queue in self.queues.values() for each in queue)
            return
        tenant = waiter.request.tenant
        live = [each for each in self.queues[tenant] if each.request.deadline > self.now]
        assert live[0] is waiter, "not in the order of arrival"
        self.queue.registered.add(waiter)
        self.queue.pop(waiter, self.now)
        self.queues[tenant].remove(waiter)
        self._gone(waiter)
        self.passed[tenant] = {}
        for other, queue in self.queues.items():
            if other != tenant and queue and queue[0].request.deadline > self.now:
                times = self.passed[other]
                times[tenant] = times.get(tenant, 0) + 1
                assert times[tenant] <= 1, f"{tenant} had two turns while {other} waited"

    @rule(tenant=TENANTS, index=st.integers(0, 99))
    def leave(self, tenant: str, index: int) -> None:
        if queue := self.waiting(tenant):
            waiter = queue.pop(index % len(queue))
            assert self.queue.remove(waiter)
            assert not self.queue.remove(waiter)
            self.registered = [each for each in self.registered if each is not waiter]
            self._gone(waiter)

    def _gone(self, waiter: Waiter) -> None:
        assert waiter not in self.left
        self.left.add(waiter)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_holds_what_came_and_did_not_leave(self) -> None:
        assert set(self.queue) == {waiter for queue in self.queues.values() for waiter in queue}
        assert len(self.queue) == sum(map(len, self.queues.values()))

    @invariant()
    def its_estimates_are_sane(self) -> None:
        self._sane(self.queue.retry_after())
        for tenant in "abcd":
            assert 0.0 <= self.queue.expected_wait_s(tenant, self.now) < math.inf

    @invariant()
    def it_is_bounded(self) -> None:
        tenants = sum(1 for queue in self.queues.values() if queue)
        bound = sum(max(1, self.capacity // place) for place in range(1, tenants + 1))
        replays = sum(each.request.is_retry for queue in self.queues.values() for each in queue)
        assert len(self.queue) - replays <= bound

    def teardown(self) -> None:
        while self.registered:
            self.grant(0)
        while self.queue.next_to_register(FLEET, self.now, ()) is not None:
            self.serve_in_order()
        for waiter in list(self.queue):
            assert waiter.request.deadline <= self.now
            self.queue.remove(waiter)
            self._gone(waiter)
        assert len(self.left) == self.accepted


TestQueue = machine_test(QueueMachine, 150, 50)
