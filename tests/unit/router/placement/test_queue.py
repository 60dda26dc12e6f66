"""The queue of requests, on a clock that the test turns: no loop, no workers."""

import math

import pytest

from baton.errors import DeadlineExceeded, Overloaded
from baton.lifecycle import Lifecycle, State
from router.placement.policy import DecodeView, FleetView, PrefillView
from router.placement.queue import PlacementQueue, PlacementRequest, Waiter
from tests.unit.router.dispatching import KV

FLEET = FleetView([PrefillView("p", KV)], [DecodeView("d", KV, free_slots=1), DecodeView("e", KV, free_slots=1)])


def waiter(
    name: str,
    now: float = 0.0,
    *,
    deadline: float = math.inf,
    again: bool = False,
    tenant: str = "",
    tokens: int = 8,
    output: int = 4,
    choices: int = 1,
    needs_decode: bool = True,
) -> Waiter:
    lifecycle = Lifecycle(State.QUEUED, now, request_deadline=deadline)
    request = PlacementRequest(
        name, int(again), tenant, lifecycle, tokens, output, tuple(range(choices)), again, needs_decode
    )
    return Waiter(request)


def queue_of(*waiters: Waiter, capacity: int = 1000, now: float = 0.0, **settings: float) -> PlacementQueue[Waiter]:
    queue: PlacementQueue[Waiter] = PlacementQueue(
        capacity=capacity, prefill_limit=2, max_wait_s=settings.get("max_wait_s", 0.0)
    )
    for each in waiters:
        queue.push(each, FLEET, now)
    return queue


def many(count: int, *, tenant: str = "", tokens: int = 8) -> list[Waiter]:
    return [waiter(f"{tenant}{number}", tenant=tenant, tokens=tokens) for number in range(count)]


def next_of(queue: PlacementQueue[Waiter], now: float = 0.0) -> Waiter | None:
    return queue.next_to_register(FLEET, now, ())


def place(queue: PlacementQueue[Waiter], now: float) -> str:
    """Place the next waiter; its name."""
    found = next_of(queue, now)
    if found is None:
        return ""
    queue.registered.add(found)
    queue.pop(found, now)
    return found.request.request_id


def registered(queue: PlacementQueue[Waiter], *, waits: bool = True) -> list[str]:
    """Register all that may be, each of which waits at once; their names."""
    names = []
    while (found := next_of(queue)) is not None:
        queue.registered.add(found)
        found.waits = waits
        names.append(found.request.request_id)
    return names


def test_requests_that_would_miss_their_deadline_or_wait_too_long_are_refused() -> None:
    queue, now = queue_of(*many(10), max_wait_s=25), 0.0
    while place(queue, now):
        now += 10
    for name in ("first", "second", "third"):
        queue.push(waiter(name, now), FLEET, now)
    with pytest.raises(Overloaded, match=r"deadline is in 5\.0 s, the queue is expected to take 30\.0 s") as refusal:
        queue.push(waiter("late", now, deadline=now + 5), FLEET, now)
    assert refusal.value.retry_after is not None
    with pytest.raises(Overloaded, match=r"expected to take 30\.0 s, 25 s are allowed") as refusal:
        queue.push(waiter("long", now), FLEET, now)
    assert refusal.value.retry_after is not None
    with pytest.raises(DeadlineExceeded):
        queue.push(waiter("past", now, deadline=now), FLEET, now)
    # A request that was accepted once is not judged again.
    replay = waiter("replay", now, deadline=now + 5, again=True)
    queue.push(replay, FLEET, now)
    assert (next_of(queue, now), len(queue)) == (replay, 4)
    assert next_of(queue, now + 5) is not replay, "its deadline has passed"


def test_the_pace_is_not_for_requests_that_overtake_those_that_wait() -> None:
    queue, now = queue_of(*many(10, tokens=9)), 0.0
    assert registered(queue) == ["0"]
    for number in range(10):
        now += 2.0
        queue.push(waiter(f"small {number}", now, tokens=8, deadline=now + 1), FLEET, now)
        assert place(queue, now) == f"small {number}"
    queue.push(waiter("no decode", now, tokens=9, needs_decode=False, deadline=now + 1), FLEET, now)
    with pytest.raises(Overloaded, match=r"deadline is in 1\.0 s, the queue is expected to take 22\.0 s"):
        queue.push(waiter("hidden", now, tokens=9, deadline=now + 1), FLEET, now)


def test_requests_that_overtake_one_that_waits_are_refused_if_many_of_them_wait() -> None:
    """For prefill workers, whose pace is one request a second."""
    queue = queue_of(*many(1, tokens=9), max_wait_s=3.0)
    assert registered(queue) == ["0"]
    for now in range(10):
        queue.push(waiter(f"small {now}", now), FLEET, now)
        assert place(queue, now) == f"small {now}"
    for number in range(4):
        queue.push(waiter(f"waits {number}", now), FLEET, now)
    with pytest.raises(Overloaded, match=r"the queue is expected to take 4\.0 s, 3 s are allowed"):
        queue.push(waiter("more", now), FLEET, now)


def test_replays_are_in_the_order_in_which_they_came() -> None:
    queue = queue_of(waiter("first"), waiter("oldest", again=True))
    for number in range(5):
        queue.push(waiter(f"replay {number}", again=True), FLEET, 0.0)
    assert [place(queue, 0.0) for _ in range(2)] == ["oldest", "replay 0"]


def test_the_share_of_a_tenant_is_of_workers_that_take_requests() -> None:
    drains = [PrefillView(f"d{number}", KV, draining=True) for number in range(3)]
    fleet = FleetView([PrefillView("p", KV), *drains], [DecodeView("d", KV)])
    queue = queue_of(*many(2, tenant="a"), *many(2, tenant="b"))
    assert queue.prefill_limit("a", fleet) == 4
    queue.begin_prefill("a")
    # Each tenant has a share of one of the two places; the workers that drain would make it four.
    assert (queue.prefill_limit("a", fleet), queue.prefill_limit("b", fleet)) == (2, 4)
    queue.end_prefill("a")
    assert queue.prefill_limit("a", fleet) == 4


def test_the_queue_waits_for_decode_while_a_registered_waiter_does() -> None:
    queue = queue_of(refused := waiter("refused"), waiter("other"))
    queue.registered.add(refused)
    assert not queue.waits_for_decode
    refused.waits = True
    assert queue.waits_for_decode
    queue.remove(refused)
    assert (len(queue), queue.waits_for_decode) == (1, False)


def hides(first: Waiter, other: Waiter) -> bool:
    queue = queue_of(first, other)
    queue.registered.add(first)
    return next_of(queue) is None


def test_a_waiter_hides_those_that_would_be_granted_no_earlier() -> None:
    for this, other, hidden in (
        ({"tokens": 8}, {"tokens": 8}, True),
        ({"tokens": 8}, {"tokens": 7}, False),
        ({"tokens": 8, "output": 9}, {"tokens": 9, "output": 7}, False),
        ({"tokens": 8, "output": 9}, {"tokens": 9, "output": 8}, True),
        ({"choices": 2}, {"choices": 1}, False),
        ({"choices": 2}, {"choices": 2}, True),
        ({"choices": 1}, {"choices": 2}, True),
    ):
        first, behind = waiter("first", **this), waiter("behind", **other)
        assert not hides(first, behind), "it has room, as far as is known"
        first.waits = True
        assert hides(first, behind) is hidden


def test_any_number_of_registered_waiters_keeps_none_behind_them_from_being_found() -> None:
    queue = queue_of(*many(1000, tenant="a"), waiter("small", tokens=1, tenant="a"), capacity=2000)
    for each in list(queue)[:1000]:
        queue.registered.add(each)
        each.waits = True
    found = next_of(queue)
    assert found is not None
    assert found.request.request_id == "small"


def test_who_is_registered_depends_on_the_context_and_the_first_of_a_tenant_that_comes_first_always_is() -> None:
    queue = queue_of(*(waiter(name, tokens=int(name)) for name in ("50", "60", "40", "45", "30", "70", "29")))
    assert registered(queue) == ["50", "40", "30", "29"]
    for name in ("replay 0", "replay 1"):
        queue.push(waiter(name, tokens=99, again=True), FLEET, 0.0)
    queue.push(waiter("no decode", tokens=99, needs_decode=False), FLEET, 0.0)
    assert registered(queue) == ["replay 0", "replay 1", "no decode"]
    queue.push(waiter("other", tokens=99, tenant="b"), FLEET, 0.0)
    assert registered(queue) == []
    # With fewer requests at prefill workers, the other tenant is first.
    queue.begin_prefill("")
    assert registered(queue) == ["other"]


def test_a_search_is_bounded_but_reaches_each_tenant() -> None:
    queue = queue_of(*many(500, tenant="a"))
    assert registered(queue) == ["a0"]
    for number in range(20):
        queue.push(waiter(f"small {number}", tokens=7 - number, tenant=f"t{number}"), FLEET, 0.0)
    assert registered(queue) == [f"small {number}" for number in range(20)]


def test_waiters_that_need_no_decode_are_found_while_there_are_no_decode_workers() -> None:
    queue = queue_of(*many(400), single := waiter("single", needs_decode=False))
    assert queue.next_to_register(FleetView([PrefillView("p", KV)]), 0.0, ()) is single


def test_retry_delay_follows_the_pace() -> None:
    queue = queue_of(*many(100))
    for number in range(50):
        place(queue, 0.5 * number)
    assert queue.retry_after() == pytest.approx(25, rel=0.01)


def test_a_queues_wait_is_its_pace_times_those_before() -> None:
    queue = queue_of(*many(15, tenant="a"))
    for number in range(10):
        assert number > 8 or queue.expected_wait_s("a", number) == 0, "the first departures tell no pace"
        place(queue, number)
    assert queue.expected_wait_s("a", 9) == pytest.approx(5)
    # Another tenant's first request is served after one of the flood.
    assert queue.expected_wait_s("b", 9) == pytest.approx(1)
    # Where nothing moves any more, the standstill counts.
    assert queue.expected_wait_s("a", 39) == pytest.approx(5 + 29)


@pytest.mark.parametrize("again", [False, True])
def test_the_time_in_which_nobody_waits_is_no_standstill(again: bool) -> None:
    queue = queue_of(*(waiters := many(12)))
    for number in range(10):
        place(queue, number)
    assert all(queue.remove(each) for each in waiters[10:])
    assert not queue.remove(waiters[10])
    queue.push(waiter("later", 3600, again=again), FLEET, 3600)
    assert queue.expected_wait_s("", 3600) == pytest.approx(1)
    assert place(queue, 3600) == "later"
    queue.push(waiter("last", 3600), FLEET, 3600)
    assert queue.expected_wait_s("", 3601) == pytest.approx(1)


def test_one_long_interval_does_not_make_a_quick_queue_slow() -> None:
    queue, now = queue_of(*many(100)), 0.0
    for number in range(50):
        now += 20.0 if number == 40 else 0.1
        place(queue, now)
    assert queue.expected_wait_s("", now) < 50


def test_waiters_that_give_up_make_no_pace() -> None:
    queue = queue_of(*(waiters := many(20)))
    for each in waiters[:15]:
        queue.remove(each)
    assert queue.expected_wait_s("", 5) == 0


def test_the_tenant_with_the_fewest_requests_at_workers_is_next() -> None:
    queue = queue_of(*many(2, tenant="flood"), *many(2, tenant="other"))
    for tenant in ("flood", "flood", "other"):
        queue.begin_prefill(tenant)
    assert [place(queue, 0.0), place(queue, 0.0)] == ["other0", "other1"]
    queue.begin_prefill("other")
    queue.push(waiter("other2", tenant="other"), FLEET, 0.0)
    assert [place(queue, 0.0) for _ in range(3)] == ["flood0", "other2", "flood1"]
