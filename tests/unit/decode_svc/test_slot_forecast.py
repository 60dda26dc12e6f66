"""Number of sequences that are admitted: the arithmetic, by hand."""

import math

import pytest

from baton.errors import Overloaded
from decode_svc.admission import KEEP, MAX_RETRY_S, MIN_RETRY_S, OFFER_S, SPAN_S, USUAL_RETRY_S, SlotForecast


def busy(slots: int, rate: float, lead_s: float, until: float = 10 * SPAN_S) -> SlotForecast:
    """SlotForecast that has seen `rate` completions a second for long, and readiness `lead_s` after reservation."""
    admission = SlotForecast(slots, 0.0)
    admission.record_ready(lead_s)
    for n in range(int(until * rate)):
        admission.record_end((n + 1) / rate)
    return admission


def test_without_measurements_the_slots_are_the_limit() -> None:
    admission = SlotForecast(8, 0.0)
    admission.check(7, 0.0)
    with pytest.raises(
        Overloaded, match=r"8 sequences are held for 8 slots, of which 0 .* one more would wait"
    ) as refused:
        admission.check(8, 0.0)
    assert refused.value.retry_after == USUAL_RETRY_S


def test_as_many_more_as_end_while_a_new_one_is_made_ready() -> None:
    admission, now = busy(32, rate=10.0, lead_s=0.5), 10 * SPAN_S
    assert admission.rate(now) == pytest.approx(10.0, rel=0.02)
    assert admission.lookahead(now) == 5
    admission.check(36, now)
    with pytest.raises(Overloaded, match="of which 5 will be free in time") as refused:
        admission.check(38, now)
    # Two too many, and ten end in a second.
    assert refused.value.retry_after == pytest.approx(0.2, rel=0.02)


def test_no_more_than_a_quarter_of_the_slots_is_ahead_whatever_was_measured() -> None:
    assert busy(32, rate=10.0, lead_s=60.0).lookahead(10 * SPAN_S) == 8
    assert busy(3, rate=10.0, lead_s=60.0).lookahead(10 * SPAN_S) == 0


def test_a_rate_is_of_late_and_right_from_the_first_second_on() -> None:
    admission = busy(32, rate=10.0, lead_s=0.5, until=2.0)
    assert admission.rate(2.0) == pytest.approx(10.0, rel=0.1)
    assert admission.rate(2.0 + 3 * SPAN_S) < 1.0
    assert admission.lookahead(2.0 + 3 * SPAN_S) == 0
    eager = SlotForecast(32, 0.0)
    eager.record_end(0.001, 4)
    assert eager.rate(0.001) < 5.0


def test_the_lead_follows_what_is_measured() -> None:
    admission, now = busy(64, rate=10.0, lead_s=0.2), 10 * SPAN_S
    assert admission.lookahead(now) == 2
    for _ in range(60):
        admission.record_ready(1.0)
    assert admission.lookahead(now) == 10


class Worker:
    """A worker that is never empty of either side: which side gets each place that comes free."""

    def __init__(self, slots: int) -> None:
        self.admission, self.now, self.held = SlotForecast(slots, 0.0), 0.0, 0

    def fork(self) -> bool:
        if not self.admission.may_fork(self.held, self.now):
            return False
        self.admission.record_fork()
        self.held += 1
        return True

    def reserve(self, *, pending: bool = True) -> bool:
        try:
            self.admission.check(self.held, self.now)
        except Overloaded:
            return False
        self.admission.record_grant(self.now, pending=pending)
        self.held += 1
        return True


@pytest.mark.parametrize("slots", [1, 2, 7, 8, 32])
def test_forks_and_reservations_take_turns_where_both_want_every_place(slots: int) -> None:
    worker = Worker(slots)
    while worker.fork() or worker.reserve():
        pass
    assert worker.held == slots
    got = []
    for _ in range(40):
        worker.held -= 1
        # Forks are always there first; a router comes when it hears of the place.
        got.append("fork" if worker.fork() else "other" if worker.reserve() else "nobody")
        assert not worker.fork()
        assert not worker.reserve()
    assert got in (["fork", "other"] * 20, ["other", "fork"] * 20)


@pytest.mark.parametrize("slots", [8, 32])
def test_forks_leave_a_share_of_the_places_to_a_request_that_comes_now(slots: int) -> None:
    worker = Worker(slots)
    while worker.fork():
        pass
    assert worker.held == slots - slots // KEEP
    assert worker.reserve()


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 4), (12.0, 5), (1000.0, 16)])
def test_forks_leave_more_places_where_reservations_come_often(rate: float, kept: int) -> None:
    worker = Worker(32)
    worker.now = 10 * SPAN_S
    for n in range(int(4 * SPAN_S * rate)):
        worker.admission.record_grant(6 * SPAN_S + n / rate, pending=False)
    assert worker.admission.fork_headroom(worker.now) == kept
    while worker.fork():
        pass
    assert worker.held == 32 - kept
    while kept > 32 // KEEP and (at := worker.admission.wake_at(worker.held, worker.now)) < math.inf:
        assert at > worker.now, "they are tried again"
        worker.now = at
        while worker.fork():
            pass
    assert worker.held == 32 - 32 // KEEP


def test_places_are_left_only_for_whoever_was_refused_and_only_for_a_while() -> None:
    worker = Worker(7)
    while worker.fork():
        pass
    assert worker.held == 7
    assert not worker.reserve()
    worker.held = 0
    assert not worker.fork()
    worker.now = OFFER_S
    assert worker.fork()


@pytest.mark.parametrize("slots", [2, 7, 32])
def test_places_that_come_free_all_at_once_are_shared_as_well(slots: int) -> None:
    worker = Worker(slots)
    while worker.fork() or worker.reserve():
        pass
    for _ in range(2):
        worker.held, got = 0, []
        while len(got) < slots:
            got.append("fork" if worker.fork() else "other" if worker.reserve() else "nobody")
        assert abs(got.count("fork") - got.count("other")) <= 1
        assert not worker.reserve()
    # Nobody comes behind the last one.
    worker.held = 1
    while worker.fork():
        pass
    assert worker.held == 1 + worker.admission._fork_owed
    worker.now += OFFER_S
    assert worker.fork() or slots == 2


def test_a_fork_that_cant_take_its_turn_keeps_nobody_from_the_place() -> None:
    worker = Worker(1)
    assert worker.reserve()
    worker.held -= 1
    assert not worker.reserve()
    worker.admission.record_fork()
    assert worker.reserve(pending=False)


def test_the_time_to_retry_is_bounded() -> None:
    assert busy(32, rate=1000.0, lead_s=0.1, until=20.0).retry_after(20.0) == MIN_RETRY_S
    assert busy(32, rate=10.0, lead_s=0.1).retry_after(20 * SPAN_S, 9) == MAX_RETRY_S
