"""Circuit breakers on a clock that the test turns."""

import pytest

from router.workers.failures import MAX_PAUSE_S, AttemptBreakers, Breakers
from tests.clock import Clock


class TimedBreakers(Breakers):
    """Breakers, and what they exclude at a time."""

    def __init__(self) -> None:
        self.time = Clock()
        super().__init__(self.time)

    def at(self, now: float) -> list[tuple[str, ...]]:
        self.time.now = now
        return self.open_breakers()


def fail(breakers: TimedBreakers, prefill: str, decode: str, now: float) -> None:
    """A transfer between the two fails."""
    breakers.time.now = now
    health = breakers.begin_attempt(prefill, decode)
    health.record_fault(health.pair)
    health.end()


def begin(breakers: TimedBreakers, now: float) -> AttemptBreakers:
    breakers.time.now = now
    return breakers.begin_attempt("p", "d")


def fault(breakers: TimedBreakers, worker: str, now: float) -> None:
    breakers.time.now = now
    health = breakers.begin_attempt(worker, None)
    health.record_fault(health.prefill)
    health.end()


@pytest.fixture
def breakers() -> TimedBreakers:
    return TimedBreakers()


def test_a_worker_opens_at_the_third_fault_in_a_row(breakers: TimedBreakers) -> None:
    fault(breakers, "p", 0)
    fault(breakers, "p", 1)
    assert breakers.at(1) == []
    fault(breakers, "p", 2)
    assert breakers.at(2) == [("p",)]
    assert breakers.count_open() == (1, 0)


def test_the_faults_of_one_event_count_once(breakers: TimedBreakers) -> None:
    for sequence in range(10):
        fault(breakers, "p", 5 + 0.001 * sequence)
    assert breakers.at(5.1) == []


def test_a_pair_opens_at_once_and_the_workers_stay_usable(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    assert breakers.at(0) == [("p", "d")]


def test_half_open_lets_one_through_and_its_success_closes(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    assert breakers.at(0.99)
    assert not breakers.at(1.0)
    trial = begin(breakers, 1.0)
    assert breakers.at(1.0)
    other = begin(breakers, 1.0)
    other.end()
    assert breakers.at(1.0)
    assert breakers.at(9.0), "one trial at a time, however long it takes"
    trial.pass_trial(trial.pair)
    assert not breakers.at(9.0)
    assert breakers.count_open() == (0, 0)


def test_a_trial_that_finds_out_nothing_makes_room_for_another(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    begin(breakers, 2).end()
    assert not breakers.at(2)


def test_a_failed_trial_opens_the_breaker_again(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    fail(breakers, "p", "d", 1)
    assert breakers.at(2.9)
    assert not breakers.at(3)


def test_each_failed_trial_doubles_the_wait_up_to_a_minute() -> None:
    breakers, now, waits = TimedBreakers(), 0.0, []
    for _ in range(9):
        fail(breakers, "p", "d", now)
        wait = 0.5
        while breakers.at(now + wait):
            wait *= 2 if wait < 32 else 1.875
        waits.append(wait)
        now += wait
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert MAX_PAUSE_S == 60


def test_faults_of_attempts_begun_before_do_not_make_the_wait_longer(breakers: TimedBreakers) -> None:
    for now in (0.0, 0.2, 0.4, 0.6, 0.8):
        fail(breakers, "p", "d", now)
    assert not breakers.at(1.0)


def test_a_trial_that_went_well_is_forgotten_only_after_another_success(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    trial = begin(breakers, 1)
    trial.pass_trial(trial.pair)
    fail(breakers, "p", "d", 2)
    assert breakers.at(3.5), "the second wait is the longer one"
    breakers.record_success(("p", "d"))
    breakers.record_success(("p", "d"))
    fail(breakers, "p", "d", 10)
    assert not breakers.at(11)


def test_a_worker_that_left_returns_with_a_closed_breaker(breakers: TimedBreakers) -> None:
    fail(breakers, "p", "d", 0)
    for now in (0.2, 0.4, 0.6):
        fault(breakers, "p", now)
    breakers.retain({"p", "d"})
    assert breakers.at(0.7) == [("p", "d"), ("p",)]
    breakers.retain({"d"})
    assert breakers.at(0.7) == []
