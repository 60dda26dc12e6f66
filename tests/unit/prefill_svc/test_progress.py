"""Rate and time left of a prompt, from the times of its chunks."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.request import PrefillProgress
from prefill_svc.progress import INTERVAL_S, PrefillEstimate

BASE, SLOPE = 1e-3, 1e-8


def seconds(start: int, end: int) -> float:
    """Seconds for tokens whose time grows with their position."""
    return BASE * (end - start) + SLOPE * (end**2 - start**2) / 2


def follow(ends: list[int], total: int, *, slower: float = 1.0) -> PrefillProgress:
    """The last report of a prompt whose chunks end there, all of them taking as much longer."""
    estimate, now = PrefillEstimate(total), 50.0
    progress = estimate.record(ends[0], now)
    for start, end in pairwise(ends):
        now += slower * seconds(start, end)
        progress = estimate.record(end, now)
    assert progress is not None
    return progress


@pytest.mark.parametrize("ends", [[0, 4096, 8192], [16_000, 20_000, 36_000, 40_000], list(range(0, 500_000, 4096))])
def test_the_time_left_allows_for_slower_later_tokens(ends: list[int]) -> None:
    total, done = 1_000_000, ends[-1]
    progress = follow(ends, total)
    assert (progress.tokens_done, progress.tokens_total) == (done, total)
    assert progress.seconds_left == pytest.approx(seconds(done, total), rel=1e-6)
    assert progress.tokens_per_second == pytest.approx(1 / (BASE + SLOPE * done), rel=1e-6)


def test_before_the_first_chunk_has_ended_nothing_is_known() -> None:
    assert PrefillEstimate(100).record(32, 5.0) == PrefillProgress(32, 100)


def test_after_one_chunk_all_tokens_are_thought_to_be_alike() -> None:
    estimate = PrefillEstimate(100)
    estimate.record(20, 5.0)
    progress = estimate.record(40, 7.0)
    assert (progress.tokens_per_second, progress.seconds_left) == (pytest.approx(10), pytest.approx(6))


def test_tokens_that_got_faster_are_not_thought_to_go_on_so() -> None:
    estimate = PrefillEstimate(10_000)
    for done, now in ((0, 0.0), (100, 10.0), (200, 11.0)):
        progress = estimate.record(done, now)
    assert progress.seconds_left == pytest.approx(9_800 * 11 / 200)


def test_a_worker_that_gets_slower_is_followed() -> None:
    estimate, now = PrefillEstimate(1_000_000), 0.0
    for start in range(0, 400_000, 4000):
        progress = estimate.record(start, now)
        now += (1 if start < 200_000 else 3) * seconds(start, start + 4000)
    assert progress.seconds_left == pytest.approx(3 * seconds(396_000, 1_000_000), rel=0.3)


def test_noise_of_the_latest_chunks_is_not_taken_for_slope() -> None:
    """For a while the worker has been busier with each chunk, as late chunks of a window alone would have it."""
    estimate, now = PrefillEstimate(1_000_000), 0.0
    for start in range(0, 500_000, 1000):
        progress = estimate.record(start, now)
        now += seconds(start, start + 1000) * (1 + max(0, start - 470_000) / 60_000)
    assert progress.seconds_left == pytest.approx(seconds(500_000, 1_000_000), rel=0.4)


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


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(INTERVAL_S, 100.0)), min_size=1, max_size=60))
def test_whatever_the_times_the_estimate_is_a_time(chunks: list[tuple[int, float]]) -> None:
    estimate, done, now = PrefillEstimate(1_000_000), 0, 0.0
    estimate.record(done, now)
    for tokens, took in chunks:
        done, now = done + tokens, now + took + 1e-9
        progress = estimate.record(done, now)
        assert progress.seconds_left is not None
        assert 0 < progress.seconds_left < math.inf
        assert 0 < progress.tokens_per_second < math.inf
