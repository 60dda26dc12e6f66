"""The queue of requests and its turns, on a clock that the test turns: no loop, no workers."""

import math
from collections.abc import Hashable
from typing import TypeVar

import pytest

from baton.errors import Overloaded
from baton.lifecycle import Lifecycle, State
from router.placement.policy import NO_OPEN_BREAKERS, DecodeView, FleetView, PrefillView
from router.placement.prefix_directory import PrefixDirectory
from router.placement.scheduler import PlacementScheduler, RequestQueue
from router.placement.waiter import PlacementRequest, Refusal, Waiter
from tests.unit.router.dispatching import KV

T = TypeVar("T", bound=Hashable)

FLEET = FleetView([PrefillView("p", KV)], [DecodeView("d", KV, free_slots=1)])


def waiter(name: str, now: float, *, deadline: float = math.inf, again: bool = False, tenant: str = "") -> Waiter:
    lifecycle = Lifecycle(State.QUEUED, now, request_deadline=deadline)
    return Waiter(PlacementRequest(name, int(again), tenant, lifecycle, 8, 4, (0,), again), now)


def test_requests_that_would_miss_their_deadline_or_wait_too_long_are_refused() -> None:
    scheduler, now = PlacementScheduler(PrefixDirectory(), capacity=20, prefill_limit=1, max_wait_s=25), 0.0
    for number in range(10):
        scheduler.push(waiter(str(number), now), FLEET, now)
    while (turn := scheduler.next_turn(FLEET, NO_OPEN_BREAKERS, now, set())) is not None:
        scheduler.begin_turn(turn.waiter)
        scheduler.record_grant(turn.waiter, now)
        scheduler.end_turn(turn.waiter)
        scheduler.release_prefill("")
        now += 10
    for name in ("first", "second", "third"):
        scheduler.push(waiter(name, now), FLEET, now)
    with pytest.raises(Overloaded, match=r"deadline is in 5\.0 s, the queue is expected to take 30\.0 s") as refusal:
        scheduler.push(waiter("late", now, deadline=now + 5), FLEET, now)
    assert refusal.value.retry_after is not None
    with pytest.raises(Overloaded, match=r"expected to take 30\.0 s, 25 s are allowed") as refusal:
        scheduler.push(waiter("long", now), FLEET, now)
    assert refusal.value.retry_after is not None
    # A request that was accepted once is not judged again.
    replay = waiter("replay", now, deadline=now + 5, again=True)
    scheduler.push(replay, FLEET, now)
    turn = scheduler.next_turn(FLEET, NO_OPEN_BREAKERS, now, set())
    assert (turn.waiter, len(scheduler)) == (replay, 4)


def test_the_share_of_a_tenant_is_of_workers_that_take_requests() -> None:
    full = PrefillView("p", KV, open_requests=2)
    drains = [PrefillView(f"d{number}", KV, draining=True) for number in range(3)]
    fleet = FleetView([full, *drains], [DecodeView("d", KV, free_slots=1)])
    scheduler = PlacementScheduler(PrefixDirectory(), capacity=20, prefill_limit=2, max_wait_s=0)
    for tenant in ("a", "b", "a", "b"):
        scheduler.push(waiter(tenant, 0.0, tenant=tenant), fleet, 0.0)
    turns = []
    while (turn := scheduler.next_turn(fleet, NO_OPEN_BREAKERS, 0.0, set())) is not None:
        scheduler.begin_turn(turn.waiter)
        turns.append(turn.waiter.request.tenant)
    # Each tenant has a share of one of the two places; the workers that drain would make it four.
    assert turns == ["a", "b"]


def test_the_queue_waits_for_prefill_once_the_refused_waiter_has_left() -> None:
    scheduler = PlacementScheduler(PrefixDirectory(), capacity=20, prefill_limit=1, max_wait_s=0)
    scheduler.push(refused := waiter("refused", 0.0), FLEET, 0.0)
    scheduler.push(waiter("other", 0.0), FLEET, 0.0)
    scheduler.begin_turn(refused)
    assert not scheduler.waits_for_decode
    scheduler.record_refusal(refused, Refusal(), 0.0)
    scheduler.end_turn(refused)
    assert scheduler.waits_for_decode
    scheduler.remove(refused)
    scheduler.forget(refused)
    assert (len(scheduler), scheduler.waits_for_decode) == (1, False)


def pop(queue: RequestQueue[T], now: float) -> T | None:
    """Hand out whose turn it is."""
    entry = next(queue.candidates(now), None)
    if entry is not None:
        queue.pop(entry)
    return entry


def drain(queue: RequestQueue[str], now: float = 0.0) -> list[str]:
    popped = []
    while (entry := pop(queue, now)) is not None:
        popped.append(entry)
    return popped


def test_retry_delay_follows_the_pace() -> None:
    queue: RequestQueue[int] = RequestQueue(1000)
    for i in range(100):
        queue.push(i, tenant="", now=0)
    for i in range(50):
        pop(queue, 0.5 * i)
        queue.record_departure(now=0.5 * i)
    assert queue.retry_after() == pytest.approx(25, rel=0.01)


def test_a_queues_wait_is_its_pace_times_those_before() -> None:
    queue: RequestQueue[str] = RequestQueue(100)
    for i in range(15):
        queue.push(f"a{i}", tenant="a", now=0)
    for i in range(10):
        assert i > 8 or queue.expected_wait_s("a", i) == 0, "the first departures tell no pace"
        pop(queue, i)
        queue.record_departure(now=i)
    assert queue.expected_wait_s("a", 9) == pytest.approx(5)
    # Another tenant's first request is served after one of the flood.
    assert queue.expected_wait_s("b", 9) == pytest.approx(1)
    # Where nothing moves any more, the standstill counts.
    assert queue.expected_wait_s("a", 39) == pytest.approx(5 + 29)


def test_the_time_in_which_nobody_waits_is_no_standstill() -> None:
    queue: RequestQueue[int] = RequestQueue(100)
    for i in range(12):
        queue.push(i, tenant="", now=0)
    for i in range(10):
        pop(queue, i)
        queue.record_departure(now=i)
    assert queue.remove(10)
    assert queue.remove(11)
    queue.push(12, tenant="", now=3600)
    assert queue.expected_wait_s("", 3600) == pytest.approx(1)
    assert pop(queue, 3600) == 12
    queue.push(13, tenant="", now=3600)
    queue.record_departure(now=3600)
    assert queue.expected_wait_s("", 3601) == pytest.approx(1)


def test_one_long_interval_does_not_make_a_quick_queue_slow() -> None:
    queue: RequestQueue[int] = RequestQueue(1000)
    for i in range(100):
        queue.push(i, tenant="", now=0)
    now = 0.0
    for i in range(50):
        now += 20.0 if i == 40 else 0.1
        pop(queue, now)
        queue.record_departure(now=now)
    assert queue.expected_wait_s("", now) < 50


def test_popping_alone_is_no_pace_since_who_is_refused_returns() -> None:
    queue: RequestQueue[str] = RequestQueue(100)
    for entry in "abc":
        queue.push(entry, tenant="", now=0)
    for now in range(5):
        assert pop(queue, now) == "a"
        queue.push_front_of_tenant("a", tenant="")
    assert queue.expected_wait_s("", 5) == 0


def test_a_workers_hint_is_the_least_delay() -> None:
    queue: RequestQueue[str] = RequestQueue(1)
    queue.worker_retry_after_s = 7.5
    queue.push("a", tenant="", now=0)
    with pytest.raises(Overloaded) as refusal:
        queue.check_capacity("")
    assert refusal.value.retry_after == 7.5


def test_the_tenant_with_the_fewest_requests_at_workers_is_next() -> None:
    held = {"flood": 2, "other": 1}
    queue = RequestQueue[str](8, lambda tenant: held[tenant])
    for entry in ("flood 0", "flood 1", "other 0", "other 1"):
        queue.push(entry, tenant=entry.split()[0], now=0.0)
    assert [pop(queue, 0.0), pop(queue, 0.0)] == ["other 0", "other 1"]
    held["other"] = 2
    queue.push("other 2", tenant="other", now=0.0)
    assert drain(queue) == ["flood 0", "other 2", "flood 1"]
