"""Turns on a clock that the test turns: no loop, no workers."""

import math

import pytest

from baton.errors import Overloaded
from baton.lifecycle import Lifecycle, State
from router.placement.fleet import DecodeView, FleetView, PrefillView
from router.placement.policy import NOTHING_EXCLUDED, PlacementQuery
from router.placement.prefix_directory import PrefixDirectory
from router.placement.scheduler import PlacementRequest, PlacementScheduler, Waiter
from tests.unit.router.dispatching import KV

FLEET = FleetView([PrefillView("p", KV)], [DecodeView("d", KV, free_slots=1)])


def waiter(name: str, now: float, *, deadline: float = math.inf, again: bool = False) -> Waiter:
    life = Lifecycle(State.QUEUED, now, request_deadline=deadline)
    return Waiter(PlacementRequest(name, int(again), "", life, PlacementQuery(8), 8, 4, (0,), again), now)


def test_what_cant_be_in_time_or_would_wait_too_long_is_refused_at_once() -> None:
    scheduler, now = PlacementScheduler(PrefixDirectory(), capacity=20, prefill_limit=1, max_wait_s=25), 0.0
    for number in range(10):
        scheduler.push(waiter(str(number), now), FLEET, now)
    while (turn := scheduler.next_turn(FLEET, NOTHING_EXCLUDED, now, set())) is not None:
        scheduler.begin(turn.waiter)
        scheduler.grant(turn.waiter, now)
        scheduler.end(turn.waiter)
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
    turn = scheduler.next_turn(FLEET, NOTHING_EXCLUDED, now, set())
    assert (turn.waiter, len(scheduler)) == (replay, 4)
