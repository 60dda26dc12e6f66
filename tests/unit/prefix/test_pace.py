"""The pace of a tier: means of what fetches took."""

import pytest

from baton.kv.prefix.contract import FetchRate
from baton.kv.prefix.pace import ENOUGH_BYTES, Pace

SIZE = 4 * ENOUGH_BYTES


def test_nothing_is_known_at_first_nor_from_small_fetches() -> None:
    pace = Pace()
    assert pace.rate is None
    pace.fetched(ENOUGH_BYTES - 1, 0.1, 0.2, 2)
    assert pace.rate is None


def test_a_fetch_without_a_first_byte_tells_nothing() -> None:
    pace = Pace()
    for latency_s, total_s in ((float("inf"), 1.0), (-1.0, 1.0), (1.0, 1.0)):
        for records in (1, 2):
            pace.fetched(SIZE, latency_s, total_s, records)
    assert pace.rate is None


def test_the_first_is_taken_as_it_is_and_later_ones_move_the_mean() -> None:
    pace = Pace()
    pace.fetched(SIZE, 0.1, 1.1, 2)
    assert pace.rate == FetchRate(0.1, pytest.approx(SIZE))
    pace.fetched(SIZE, 0.5, 4.5, 9)
    assert pace.rate is not None
    assert pace.rate.latency_s == pytest.approx(0.2)
    assert SIZE / pace.rate.bytes_per_s == pytest.approx(1.75), "of the seconds, not of the rates"
    for _ in range(50):
        pace.fetched(SIZE, 0.0, 0.5, 2)
    assert pace.rate.bytes_per_s == pytest.approx(2 * SIZE, rel=1e-3)


def test_one_record_changes_the_latency_alone() -> None:
    """All of it is there when its first, and only, record is."""
    pace = Pace()
    pace.fetched(SIZE, 0.1, 1.1, 4)
    pace.fetched(ENOUGH_BYTES, 0.7499, 0.75, 1)
    assert pace.rate is not None
    assert pace.rate.bytes_per_s == pytest.approx(SIZE)
    assert pace.rate.latency_s == pytest.approx(0.1 + (0.5 - 0.1) / 4), "a quarter of the seconds went by at that rate"
    for _ in range(50):
        pace.fetched(ENOUGH_BYTES, 0.7499, 0.75, 1)
    assert (pace.rate.latency_s, pace.rate.bytes_per_s) == (pytest.approx(0.5, rel=1e-3), pytest.approx(SIZE))


def test_one_record_that_comes_sooner_than_the_rate_has_it_leaves_no_latency() -> None:
    pace = Pace()
    pace.fetched(SIZE, 0.4, 1.4, 4)
    pace.fetched(SIZE, 0.49, 0.5, 1)
    assert pace.rate == FetchRate(pytest.approx(0.3), pytest.approx(SIZE))


def test_one_record_alone_is_taken_for_a_rate_without_latency() -> None:
    pace = Pace()
    pace.fetched(SIZE, 0.999, 1.0, 1)
    assert pace.rate == FetchRate(0.0, pytest.approx(SIZE))
