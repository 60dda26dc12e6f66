"""Failures that another attempt follows, and their cost."""

import pytest

from baton.errors import BatonError, Overloaded, TransferError, Unavailable
from router.retries import (
    FORGIVEN_TOKENS,
    MAX_EXCUSED_DEATHS,
    MAX_IN_A_ROW,
    RetryBudget,
    RetryHistory,
)
from router.workers.failures import Blame, Cause, FailureEvent, Suspicion, WorkerLoss, WorkerLosses

FAULT = FailureEvent(TransferError("the link broke"), Blame.PAIR)
LOST = FailureEvent(Unavailable("decode-1 was silent"), Blame.DECODE, Cause.LOST)
DRAIN = FailureEvent(Unavailable("draining"), Blame.DECODE, Cause.DRAIN)
PREEMPTED = FailureEvent(Overloaded("no pages", 1.0), Blame.DECODE, Cause.PREEMPTED)


class Charges:
    def __init__(self, granted: bool = True) -> None:
        self.count = 0
        self.granted = granted

    def __call__(self) -> bool:
        self.count += 1
        return self.granted


def retry(history: RetryHistory, failed: FailureEvent, charges: Charges | None = None) -> float:
    return history.next_delay_s(failed, max_attempts=3, charge=charges or Charges(), jitter=lambda least, most: most)


@pytest.fixture
def history() -> RetryHistory:
    return RetryHistory()


def test_faults_are_bounded_charged_and_wait_longer_each_time() -> None:
    history, charges = RetryHistory(), Charges()
    assert retry(history, FAULT, charges) == 0
    assert retry(history, FAULT, charges) == pytest.approx(0.1)
    with pytest.raises(TransferError, match="the link broke"):
        retry(history, FAULT, charges)
    assert charges.count == 2


def test_an_empty_budget_makes_the_fault_the_answer() -> None:
    with pytest.raises(TransferError, match="the link broke"):
        retry(RetryHistory(), FAULT, Charges(granted=False))


@pytest.mark.parametrize("failed", [DRAIN, PREEMPTED, LOST])
def test_retries_without_a_fault_are_free_but_bounded(failed: FailureEvent) -> None:
    history, charges = RetryHistory(), Charges(granted=False)
    for _ in range(MAX_IN_A_ROW - 1):
        assert retry(history, failed, charges) == 0
    with pytest.raises(type(failed.error)):
        retry(history, failed, charges)
    assert (charges.count, history.faults) == (0, 0)


def test_attempts_that_bring_tokens_are_not_counted(history: RetryHistory) -> None:
    for _ in range(3 * MAX_IN_A_ROW):
        history.record_progress(1)
        assert retry(history, PREEMPTED) == 0


def test_faults_are_forgotten_after_many_tokens_and_not_after_a_few(history: RetryHistory) -> None:
    for _ in range(10):
        history.record_progress(FORGIVEN_TOKENS)
        assert retry(history, FAULT) == 0
    history.record_progress(FORGIVEN_TOKENS - 1)
    assert retry(history, FAULT) > 0
    with pytest.raises(TransferError, match="the link broke"):
        retry(history, FAULT)


def test_deaths_without_a_token_from_decode_are_not_endless(history: RetryHistory) -> None:
    for _ in range(MAX_IN_A_ROW - 1):
        history.record_progress(1)
        history.record_loss(loss(1.0), at_decode=True, isolated=False)
        assert retry(history, LOST) == 0
    history.record_loss(loss(1.0), at_decode=True, isolated=False)
    with pytest.raises(Unavailable, match="silent"):
        retry(history, LOST)


def loss(share: float) -> WorkerLoss:
    return WorkerLoss("decode d:1", "one", 0.0, share)


@pytest.mark.parametrize(
    ("shares", "isolated"),
    [
        ([1.0], False),
        ([1.0, 0.05], True),
        ([0.5, 0.5], True),
        ([0.5, 0.4], False),
        ([0.1] * 10, True),
        ([0.1] * 9, False),
    ],
)
def test_two_deaths_that_say_enough_isolate(history: RetryHistory, shares: list[float], isolated: bool) -> None:
    for share in shares:
        history.record_loss(loss(share), at_decode=True, isolated=False)
    assert history.suspicion is (Suspicion.PAIR if isolated else Suspicion.NONE)
    assert history.fork().suspicion is (Suspicion.PAIR if isolated else Suspicion.NONE)


@pytest.mark.parametrize(
    ("at_decode", "suspicion"),
    [
        ((False, False), Suspicion.PREFILL),
        ((True, True), Suspicion.PAIR),
        ((False, True), Suspicion.PREFILL),
        ((False, False, True), Suspicion.PREFILL),
        ((True, False, True), Suspicion.PAIR),
    ],
)
def test_only_deaths_of_decode_give_a_request_one_of_its_own(at_decode: tuple[bool, ...], suspicion: Suspicion) -> None:
    history = RetryHistory()
    for each in at_decode:
        history.record_loss(loss(1.0), at_decode=each, isolated=False)
    assert history.suspicion is history.fork().suspicion is suspicion
    history.clear_losses()
    assert history.suspicion is Suspicion.NONE


def test_failures_other_than_deaths_after_a_token_count_for_nothing() -> None:
    history, broken = RetryHistory(), loss(1.0)
    for each in (broken, broken, loss(1.0)):
        history.record_loss(each, at_decode=True, isolated=False)
    assert history.suspicion
    fork = history.fork()
    broken.settle(death=False)
    assert not history.suspicion
    assert not fork.suspicion
    fork.record_loss(loss(1.0), at_decode=True, isolated=True)
    assert fork.suspicion
    assert fork.has_killed_workers(0)
    assert not history.has_killed_workers(0), "choices that part have histories of their own"
    fork.clear_losses()
    assert not fork.suspicion
    assert not fork.has_killed_workers(0)


def test_a_death_alone_is_proof_unless_others_die_without_it_and_several_always_are(history: RetryHistory) -> None:
    for deaths in range(1, MAX_EXCUSED_DEATHS + 1):
        history.record_loss(loss(1.0), at_decode=True, isolated=True)
        assert history.has_killed_workers(deaths - 1)
        assert not history.has_killed_workers(deaths)
    history.record_loss(loss(1.0), at_decode=True, isolated=True)
    assert history.has_killed_workers(1000)


def test_a_death_is_no_proof_where_requests_of_another_router_were() -> None:
    losses, history = WorkerLosses(), RetryHistory()
    for number in range(MAX_EXCUSED_DEATHS + 2):
        history.record_loss(
            losses.record_loss("decode d:1", str(number), 1, 10.0 * number, has_foreign_suspects=True),
            at_decode=True,
            isolated=True,
        )
    assert history.suspicion
    assert not history.has_killed_workers(0)
    history.record_loss(
        losses.record_loss("decode d:1", "last", 1, 100.0, has_foreign_suspects=False), at_decode=True, isolated=True
    )
    assert history.has_killed_workers(0)


def test_a_full_worker_is_left_in_peace_for_as_long_as_it_says(history: RetryHistory) -> None:
    full = FailureEvent(Overloaded("4 wait", 0.7), Blame.PREFILL, Cause.REFUSED)
    assert retry(history, full) == pytest.approx(0.7)
    never: BatonError = Overloaded("needs 9 pages, there are 4")
    history = RetryHistory()
    for _ in range(2):
        retry(history, FailureEvent(never, Blame.PREFILL, Cause.REFUSED))
    with pytest.raises(Overloaded, match="9 pages"):
        retry(history, FailureEvent(never, Blame.PREFILL, Cause.REFUSED))


def test_after_a_first_refusal_another_worker_is_tried_at_once(history: RetryHistory) -> None:
    full, charges = FailureEvent(Overloaded("4 wait", 0.7), Blame.PREFILL, Cause.REFUSED), Charges()
    delays = [
        history.next_delay_s(full, max_attempts=3, charge=charges, elsewhere=True, jitter=lambda least, most: most)
        for _ in range(2)
    ]
    assert delays == [0.0, pytest.approx(0.7)]
    assert (charges.count, history.faults) == (0, 0)


def test_choices_that_part_have_their_own_history_and_common_numbers(history: RetryHistory) -> None:
    retry(history, FAULT)
    one, other = history.fork(), history.fork()
    retry(one, FAULT)
    assert (one.faults, other.faults) == (2, 1)
    assert [next(one.attempt_numbers), next(other.attempt_numbers), next(one.attempt_numbers)] == [0, 1, 2]


def test_the_budget_is_a_share_of_what_was_accepted_and_a_rate() -> None:
    budget = RetryBudget(0, share=0.25, per_second=2, most=10, tokens=0)
    assert not budget.charge(0)
    for _ in range(4):
        budget.record_request()
    assert [budget.charge(0), budget.charge(0)] == [True, False]
    assert [budget.charge(0.5), budget.charge(0.5)] == [True, False]
    assert [budget.charge(1000) for _ in range(11)] == [True] * 10 + [False]


def test_one_event_is_charged_once_whatever_number_of_requests_it_fails() -> None:
    budget = RetryBudget(0, share=0, per_second=0, most=10, tokens=2)
    assert all(budget.charge(0.01, blamed="d", first=True) for _ in range(50))
    # Only the first fault of a request rides for free.
    assert budget.charge(0.02, blamed="d")
    assert not budget.charge(0.03, blamed="d")
    assert not budget.charge(1.0, blamed="d", first=True)
