"""Rate and time left of a prompt, from the times of its chunks."""

import pytest

from baton.request import PrefillProgress
from prefill_svc.progress import INTERVAL_S, PrefillEstimate


def test_before_the_first_chunk_has_ended_nothing_is_known() -> None:
    assert PrefillEstimate(100).record(32, 5.0) == PrefillProgress(32, 100)


def test_cached_tokens_do_not_count_for_the_rate() -> None:
    estimate = PrefillEstimate(100)
    estimate.record(20, 5.0)
    assert estimate.record(40, 7.0) == PrefillProgress(40, 100, 10.0, 6.0)


def test_the_rate_is_that_of_the_latest_chunks() -> None:
    estimate, now = PrefillEstimate(1_000_000), 0.0
    for done in range(0, 400_000, 4000):
        progress = estimate.record(done, now)
        now += 1.0 if done < 200_000 else 3.0
    assert progress == PrefillProgress(396_000, 1_000_000, pytest.approx(4000 / 3), pytest.approx(604_000 * 3 / 4000))


def test_reports_are_not_more_frequent_than_the_interval_and_the_end_is_reported() -> None:
    estimate, step = PrefillEstimate(1000), INTERVAL_S / 4
    reports = [estimate.record(done, 7.0 + done / 10 * step) for done in range(0, 1000, 10)]
    assert [report.tokens_done for report in reports if report] == list(range(0, 1000, 40))
    for report in filter(None, reports[1:]):
        assert report.tokens_per_second == pytest.approx(10 / step)
    last = estimate.record(1000, 7.0 + 99 * step)
    assert (last.tokens_done, last.seconds_left) == (1000, 0.0)


def test_a_report_without_new_tokens_changes_nothing() -> None:
    estimate = PrefillEstimate(100)
    for done, now in ((0, 5.0), (0, 6.0), (20, 7.0), (20, 9.0)):
        progress = estimate.record(done, now)
    assert progress == PrefillProgress(20, 100, pytest.approx(10), pytest.approx(8))


def test_a_clock_that_stands_still_tells_no_rate() -> None:
    estimate = PrefillEstimate(100)
    estimate.record(0, 5.0)
    assert estimate.record(100, 5.0) == PrefillProgress(100, 100)
