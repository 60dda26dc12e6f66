"""Circuit breakers on a clock that the test turns."""

from __future__ import annotations

from router.placement.policy import Excluded
from router.workers.failures import LONGEST_S, Breakers


def fail(breakers: Breakers, prefill: str, decode: str, now: float) -> None:
    """A transfer between the two fails."""
    health = breakers.begin(prefill, decode, now)
    health.record_fault(health.pair, now)
    health.end()


def fault(breakers: Breakers, worker: str, now: float) -> None:
    health = breakers.begin(worker, None, now)
    health.record_fault(health.prefill, now)
    health.end()


def test_a_worker_opens_at_the_third_fault_in_a_row() -> None:
    breakers = Breakers()
    fault(breakers, "p", 0)
    fault(breakers, "p", 1)
    assert breakers.excluded(1) == Excluded()
    fault(breakers, "p", 2)
    assert breakers.excluded(2) == Excluded(frozenset({"p"}))
    assert breakers.count_open() == (1, 0)


def test_a_success_ends_the_row() -> None:
    breakers = Breakers()
    for now in range(0, 12, 2):
        fault(breakers, "p", now)
        breakers.record_success(("p",))
    assert breakers.excluded(12) == Excluded()


def test_the_faults_of_one_event_count_once() -> None:
    breakers = Breakers()
    for sequence in range(10):
        fault(breakers, "p", 5 + 0.001 * sequence)
    assert breakers.excluded(5.1) == Excluded()


def test_a_pair_opens_at_once_and_the_workers_stay_usable() -> None:
    breakers = Breakers()
    fail(breakers, "p", "d", 0)
    assert breakers.excluded(0) == Excluded(frozenset(), frozenset({("p", "d")}))


def test_half_open_lets_one_through_and_its_success_closes() -> None:
    breakers = Breakers()
    fail(breakers, "p", "d", 0)
    assert breakers.excluded(0.99).pairs
    assert not breakers.excluded(1.0).pairs
    trial = breakers.begin("p", "d", 1.0)
    assert breakers.excluded(1.0).pairs
    other = breakers.begin("p", "d", 1.0)
    other.end()
    assert breakers.excluded(1.0).pairs
    trial.pass_trial(trial.pair)
    assert not breakers.excluded(1.0).pairs
    assert breakers.count_open() == (0, 0)


def test_a_trial_that_finds_out_nothing_makes_room_for_another() -> None:
    breakers = Breakers()
    fail(breakers, "p", "d", 0)
    breakers.begin("p", "d", 2).end()
    assert not breakers.excluded(2).pairs


def test_each_failed_trial_doubles_the_wait_up_to_a_minute() -> None:
    breakers, now, waits = Breakers(), 0.0, []
    for _ in range(9):
        fail(breakers, "p", "d", now)
        wait = 0.5
        while breakers.excluded(now + wait).pairs:
            wait *= 2 if wait < 32 else 1.875
        waits.append(wait)
        now += wait
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert LONGEST_S == 60


def test_faults_of_attempts_begun_before_do_not_make_the_wait_longer() -> None:
    breakers = Breakers()
    for now in (0.0, 0.2, 0.4, 0.6, 0.8):
        fail(breakers, "p", "d", now)
    assert not breakers.excluded(1.0).pairs


def test_a_trial_that_went_well_is_forgotten_only_after_another_success() -> None:
    breakers = Breakers()
    fail(breakers, "p", "d", 0)
    trial = breakers.begin("p", "d", 1)
    trial.pass_trial(trial.pair)
    fail(breakers, "p", "d", 2)
    assert breakers.excluded(3.5).pairs, "the second wait is the longer one"
    breakers.record_success(("p", "d"))
    breakers.record_success(("p", "d"))
    fail(breakers, "p", "d", 10)
    assert not breakers.excluded(11).pairs


def test_what_is_gone_comes_back_unblemished() -> None:
    breakers = Breakers()
    fail(breakers, "p", "d", 0)
    for now in (0.2, 0.4, 0.6):
        fault(breakers, "p", now)
    breakers.retain({"p", "d"})
    assert breakers.excluded(0.7) == Excluded(frozenset({"p"}), frozenset({("p", "d")}))
    breakers.retain({"d"})
    assert breakers.excluded(0.7) == Excluded()
