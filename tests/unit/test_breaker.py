"""The circuit breaker on a clock of our own."""

from baton.breaker import Breaker
from tests.clock import Clock


def test_one_try_a_pause_and_the_pause_doubles() -> None:
    clock = Clock()
    breaker = Breaker(first_s=1.0, most_s=3.0, clock=clock)
    assert breaker.closed
    assert breaker.allow()
    breaker.record_failure()
    assert not breaker.closed
    for pause in (1.0, 2.0, 3.0, 3.0):
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.02
        assert breaker.allow()
        assert not breaker.allow(), "one try is under way"
        breaker.record_failure()
        assert not breaker.allow()


def test_success_closes() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    breaker.record_failure()
    clock.now += 1.1
    assert breaker.allow()
    breaker.record_success()
    assert breaker.closed
    assert all(breaker.allow() for _ in range(3))


def test_failures_of_calls_already_under_way_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    breaker = Breaker(first_s=1.0, clock=clock)
    for _ in range(10):
        breaker.record_failure()
    clock.now += 1.01
    assert breaker.allow()


def test_a_try_that_never_reports_is_followed_by_another() -> None:
    clock = Clock()
    breaker = Breaker(first_s=1.0, clock=clock)
    breaker.record_failure()
    clock.now += 1.01
    assert breaker.allow()
    clock.now += 1.01
    assert breaker.allow()
