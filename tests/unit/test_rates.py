"""Averages that forget."""

import pytest

from baton.rates import DecayingAverage, DecayingRate


def test_a_rate_forgets_old_samples() -> None:
    rate = DecayingRate()
    assert rate.value == 0.0
    rate.add(1_000, 1.0)
    assert rate.value == 1_000
    rate.add(0, 0.2)
    assert rate.value == pytest.approx(800), "a stall counts for as long as it took"
    for _ in range(50):
        rate.add(100, 1.0)
    assert rate.value == pytest.approx(100, rel=0.01)


def test_an_average_starts_at_its_first_sample_and_forgets() -> None:
    average = DecayingAverage(0.25)
    assert average.value == 0.0
    for sample in (0.0, 8.0):
        average.add(sample)
    assert average.value == 2.0
    for _ in range(50):
        average.add(1.0)
    assert average.value == pytest.approx(1.0)
