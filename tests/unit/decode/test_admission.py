"""How many sequences are taken on: the arithmetic, by hand."""

from __future__ import annotations

import pytest

from baton.errors import Overloaded
from decode_svc.admission import MAX_RETRY_S, MIN_RETRY_S, SPAN_S, USUAL_RETRY_S, Admission


def busy(slots: int, rate: float, lead_s: float, until: float = 10 * SPAN_S) -> Admission:
    """Admission that has seen `rate` completions a second for long, and readiness `lead_s` after reservation."""
    admission = Admission(slots, 0.0)
    admission.ready(lead_s)
    for n in range(int(until * rate)):
        admission.ended((n + 1) / rate)
    return admission


def test_without_measurements_the_slots_are_the_limit() -> None:
    admission = Admission(8, 0.0)
    admission.check(7, 1, 0.0)
    with pytest.raises(
        Overloaded, match=r"8 sequences are held for 8 slots, of which 0 .* 1 more would wait"
    ) as refused:
        admission.check(8, 1, 0.0)
    assert refused.value.retry_after == USUAL_RETRY_S


def test_as_many_more_as_end_while_a_new_one_is_made_ready() -> None:
    admission, now = busy(32, rate=10.0, lead_s=0.5), 10 * SPAN_S
    assert admission.rate(now) == pytest.approx(10.0, rel=0.02)
    assert admission.ahead(now) == 5
    admission.check(36, 1, now)
    with pytest.raises(Overloaded, match="of which 5 will be free in time") as refused:
        admission.check(36, 3, now)
    # Two too many, and ten end in a second.
    assert refused.value.retry_after == pytest.approx(0.2, rel=0.02)


def test_no_more_than_a_quarter_of_the_slots_is_ahead_whatever_was_measured() -> None:
    assert busy(32, rate=10.0, lead_s=60.0).ahead(10 * SPAN_S) == 8
    assert busy(3, rate=10.0, lead_s=60.0).ahead(10 * SPAN_S) == 0


def test_a_rate_is_of_late_and_right_from_the_first_second_on() -> None:
    admission = busy(32, rate=10.0, lead_s=0.5, until=2.0)
    assert admission.rate(2.0) == pytest.approx(10.0, rel=0.1)
    assert admission.rate(2.0 + 3 * SPAN_S) < 1.0
    assert admission.ahead(2.0 + 3 * SPAN_S) == 0
    eager = Admission(32, 0.0)
    eager.ended(0.001, 4)
    assert eager.rate(0.001) < 5.0


def test_the_lead_follows_what_is_measured() -> None:
    admission, now = busy(64, rate=10.0, lead_s=0.2), 10 * SPAN_S
    assert admission.ahead(now) == 2
    for _ in range(60):
        admission.ready(1.0)
    assert admission.ahead(now) == 10


def test_an_idle_worker_takes_more_choices_than_it_has_slots() -> None:
    admission = Admission(2, 0.0)
    admission.check(0, 5, 0.0)
    with pytest.raises(Overloaded):
        admission.check(1, 5, 0.0)


def test_the_time_to_retry_is_bounded() -> None:
    assert busy(32, rate=1000.0, lead_s=0.1, until=20.0).retry_after(20.0) == MIN_RETRY_S
    assert busy(32, rate=10.0, lead_s=0.1).retry_after(20 * SPAN_S, 9) == MAX_RETRY_S
