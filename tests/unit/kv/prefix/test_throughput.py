"""The throughput of a tier: decaying means of what look-ups and fetches took."""

import pytest

from baton.kv.prefix.contract import FetchRate
from baton.kv.prefix.throughput import MIN_SAMPLE_BYTES, Throughput

SIZE = 4 * MIN_SAMPLE_BYTES


def test_nothing_is_known_at_first_nor_from_small_fetches() -> None:
    throughput = Throughput()
    throughput.record_lookup(0.1)
    assert throughput.rate is None
    throughput.record_fetch(MIN_SAMPLE_BYTES - 1, 0.1)
    assert throughput.rate is None


def test_the_first_samples_are_taken_as_they_are_and_later_ones_move_the_means() -> None:
    throughput = Throughput()
    throughput.record_lookup(0.1)
    throughput.record_fetch(SIZE, 1.0)
    assert throughput.rate == FetchRate(0.1, SIZE)
    throughput.record_lookup(0.6)
    throughput.record_fetch(SIZE, 4.0)
    assert throughput.rate.latency_s == pytest.approx(0.2)
    assert SIZE / throughput.rate.bytes_per_s == pytest.approx(4.8 / 1.8), "of the seconds, not of the rates"
    for _ in range(50):
        throughput.record_fetch(SIZE, 0.5)
    assert throughput.rate.bytes_per_s == pytest.approx(2 * SIZE, rel=1e-3)
