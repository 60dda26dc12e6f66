"""The queue under arbitrary arrivals, returns, departures and deadlines of several tenants.

Every entry leaves exactly once; whose turn it is, is in its tenant's order; a tenant that waits is passed over at most
once by each other one, whatever comes back; no tenant takes more than its share, and the whole queue is bounded.
"""

import itertools
import math
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import DeadlineExceeded, Overloaded
from router.placement.scheduler import RequestQueue
from tests.effort import machine_test

TENANTS = st.sampled_from("abcd")
PATIENCE = st.sampled_from([0.0, 1.0, 3.0, math.inf])


@dataclass(eq=False)
class Entry:
    """One request: in the queue, out for a try, or gone."""

    number: int
    tenant: str
    deadline: float
    returned: bool = False


class RequestQueueMachine(RuleBasedStateMachine):
    """The queue beside lists of what waits in it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count()
        self.capacity = 7
        self.queue: RequestQueue[Entry] = RequestQueue(self.capacity)
        self.queues: dict[str, list[Entry]] = {}
        self.out: list[Entry] = []
        self.left: set[Entry] = set()
        self.passed: dict[str, dict[str, int]] = {}
        self.accepted = 0
        self.first: Entry | None = None

    def waiting(self, tenant: str) -> list[Entry]:
        return self.queues.get(tenant, [])

    @rule(tenant=TENANTS, patience=PATIENCE)
    def arrive(self, tenant: str, patience: float) -> None:
        entry = Entry(next(self.numbers), tenant, self.now + patience)
        others = sum(1 for other, queue in self.queues.items() if queue and other != tenant)
        full = len(self.waiting(tenant)) >= max(1, self.capacity // (others + 1))
        try:
            self.queue.push(entry, tenant=tenant, deadline=entry.deadline, now=self.now)
        except DeadlineExceeded:
            assert patience == 0.0
        except Overloaded as error:
            assert full
            self._sane(error.retry_after)
        else:
            assert patience > 0.0
            assert not full
            self.accepted += 1
            self._joined(entry, -1)

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 99), again=st.booleans())
    def come_back(self, index: int, again: bool) -> None:
        entry = self.out.pop(index % len(self.out))
        if again:
            entry.returned = True
            if self.first is None:
                self.first = entry
            else:
                self._joined(entry, 0)
                # It had no turn.
                self.passed[entry.tenant] = {}
                for times in self.passed.values():
                    times[entry.tenant] = max(times.get(entry.tenant, 0) - 1, 0)
            self.queue.push_head_of_line(entry, tenant=entry.tenant, deadline=entry.deadline)
        else:
            self.queue.record_departure(self.now)
            self._gone(entry)

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 99))
    def try_again(self, index: int) -> None:
        """Another attempt at a request that was served, and failed."""
        entry = self.out.pop(index % len(self.out))
        entry.returned = True
        self._joined(entry, 0)
        self.queue.push_front_of_tenant(entry, tenant=entry.tenant, deadline=entry.deadline)

    def _sane(self, retry_after: float | None) -> None:
        assert retry_after is not None
        assert 0.1 <= retry_after <= 60.0

    def _joined(self, entry: Entry, at: int) -> None:
        queue = self.queues.setdefault(entry.tenant, [])
        if not queue:
            self.passed[entry.tenant] = {}
        queue.insert(len(queue) if at else 0, entry)

    @rule()
    def serve(self) -> None:
        entry = next(self.queue.candidates(self.now), None)
        self._drop_what_expired_at_a_head()
        assert self.queue.head_of_line is self.first
        if entry is None:
            assert not any(self.queues.values()), "somebody waits, and nobody is served"
            return
        self.queue.pop(entry)
        assert entry.deadline > self.now
        if self.first is not None:
            assert entry is self.first
            self.first = None
            self.out.append(entry)
            return
        assert self.queues[entry.tenant].pop(0) is entry, "not in the order of arrival"
        self._served(entry)

    @rule(index=st.integers(0, 99))
    def serve_one_that_finds_room(self, index: int) -> None:
        candidates = list(self.queue.candidates(self.now))
        self._drop_what_expired_at_a_head()
        assert set(candidates) == {entry for entry in self.queue if entry.deadline > self.now}
        if others := [entry for entry in candidates if entry is not self.first]:
            entry = others[index % len(others)]
            self.queue.pop(entry)
            self.queues[entry.tenant].remove(entry)
            self.out.append(entry)
            # It is a turn of its tenant's; nobody else could have had it.
            self.passed[entry.tenant] = {}

    def _served(self, entry: Entry) -> None:
        self.out.append(entry)
        self.passed[entry.tenant] = {}
        for tenant, queue in self.queues.items():
            if queue and tenant != entry.tenant:
                times = self.passed[tenant]
                times[entry.tenant] = times.get(entry.tenant, 0) + 1
                assert times[entry.tenant] <= 1, f"{entry.tenant} had two turns while {tenant} waited"

    def _drop_what_expired_at_a_head(self) -> None:
        inside = set(self.queue)
        if self.first is not None and self.first not in inside:
            assert self.first.deadline <= self.now
            self._gone(self.first)
            self.first = None
        for queue in self.queues.values():
            for entry in [entry for entry in queue if entry not in inside and entry.deadline <= self.now]:
                queue.remove(entry)
                self._gone(entry)

    @rule(tenant=TENANTS, index=st.integers(0, 99))
    def leave(self, tenant: str, index: int) -> None:
        if queue := self.waiting(tenant):
            entry = queue.pop(index % len(queue))
            assert self.queue.remove(entry)
            assert not self.queue.remove(entry)
            self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        assert entry not in self.left
        self.left.add(entry)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_holds_what_came_and_did_not_leave(self) -> None:
        waiting = {entry for queue in self.queues.values() for entry in queue} | {self.first} - {None}
        assert set(self.queue) == waiting
        assert len(self.queue) == len(waiting)

    @invariant()
    def its_estimates_are_sane(self) -> None:
        self._sane(self.queue.retry_after())
        for tenant in "abcd":
            assert 0.0 <= self.queue.expected_wait_s(tenant, self.now) < math.inf

    @invariant()
    def it_is_bounded(self) -> None:
        tenants = sum(1 for queue in self.queues.values() if queue)
        bound = sum(max(1, self.capacity // place) for place in range(1, tenants + 1))
        returned = sum(entry.returned for queue in self.queues.values() for entry in queue)
        assert len(self.queue) - returned - (self.first is not None) <= bound

    def teardown(self) -> None:
        for _ in range(len(self.queue) + 1):
            self.serve()
        assert len(self.queue) == 0
        assert len(self.left | set(self.out)) == len(self.left) + len(self.out) == self.accepted
        assert not self.queue.tenants


TestRequestQueue = machine_test(RequestQueueMachine, 150, 50)
