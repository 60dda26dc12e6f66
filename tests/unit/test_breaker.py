"""The circuit breaker on a clock of our own."""

import pytest

from baton.breaker import Breaker, Permit
from tests.clock import Clock


def opened(clock: Clock, **settings: float) -> Breaker:
    """A breaker whose pause is over."""
    breaker = Breaker(clock=clock, **settings)
    breaker.record_failure()
    clock.now += 1.01
    return breaker


def trial(breaker: Breaker) -> Permit:
    return breaker.request() or pytest.fail("no call is allowed")


def test_one_trial_a_pause_and_the_pause_doubles() -> None:
    clock = Clock()
    breaker = Breaker(first_s=1.0, most_s=3.0, clock=clock)
    assert breaker.closed
    permit = trial(breaker)
    breaker.record_failure(permit)
    assert not breaker.closed
    for pause in (1.0, 2.0, 3.0, 3.0):
        clock.now += pause - 0.01
        assert breaker.request() is None
        clock.now += 0.02
        permit = trial(breaker)
        clock.now += 100
        assert breaker.request() is None, "one trial is under way"
        breaker.record_failure(permit)
        assert breaker.request() is None


def test_a_success_closes_the_breaker() -> None:
    breaker = opened(Clock())
    trial(breaker)
    breaker.record_success()
    assert breaker.closed
    assert all(breaker.request() for _ in range(3))


def test_failures_of_calls_already_under_way_do_not_count() -> None:
    clock = Clock()
    breaker = Breaker(first_s=1.0, clock=clock)
    early = [trial(breaker) for _ in range(10)]
    for permit in early:
        breaker.record_failure(permit)
    clock.now += 1.01
    running = trial(breaker)
    breaker.record_failure(early[0])
    breaker.release(early[1])
    assert not breaker.due, "the trial is under way"
    breaker.record_failure(running)
    clock.now += 1.99
    assert not breaker.due
    clock.now += 0.02
    assert breaker.due, "only the trial doubled the pause"


def test_a_trial_that_found_out_nothing_is_followed_by_another_at_once() -> None:
    breaker = opened(Clock())
    permit = trial(breaker)
    assert breaker.request() is None
    breaker.release(permit)
    trial(breaker)
