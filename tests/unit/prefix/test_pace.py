"""The pace of a tier: means of what fetches took."""

import pytest

from baton.kv.prefix.contract import FetchRate
from baton.kv.prefix.pace import ENOUGH_BYTES, Pace

SIZE = 4 * ENOUGH_BYTES


def test_nothing_is_known_at_first_nor_from_small_fetches() -> None:
    pace = Pace()
    assert pace.rate is None
    pace.fetched(2, ENOUGH_BYTES - 1, 0.1, 0.2)
    assert pace.rate is None


def test_one_record_tells_no_rate() -> None:
    """Its latency is nearly all of its time."""
    pace = Pace()
    pace.fetched(1, SIZE, 0.1, 0.1000001)
    assert pace.rate is None
    pace.fetched(2, SIZE, 0.1, 1.1)
    assert pace.rate == FetchRate(0.1, pytest.approx(SIZE)), "the second record took a second"


def test_a_fetch_without_a_first_byte_tells_nothing() -> None:
    pace = Pace()
    for latency_s, total_s in ((float("inf"), 1.0), (-1.0, 1.0), (1.0, 1.0)):
        pace.fetched(2, SIZE, latency_s, total_s)
    assert pace.rate is None


def test_the_first_is_taken_as_it_is_and_later_ones_move_the_mean() -> None:
    pace = Pace()
    pace.fetched(2, SIZE, 0.1, 1.1)
    assert pace.rate == FetchRate(0.1, pytest.approx(SIZE))
    pace.fetched(2, SIZE, 0.5, 4.5)
    assert pace.rate is not None
    assert pace.rate.latency_s == pytest.approx(0.2)
    assert SIZE / pace.rate.bytes_per_s == pytest.approx(1.75), "of the seconds, not of the rates"
    for _ in range(50):
        pace.fetched(2, SIZE, 0.0, 0.5)
    assert pace.rate.bytes_per_s == pytest.approx(2 * SIZE, rel=1e-3)
