"""How the prefix bench compares cold prompts: neighbours only, each pair in its own direction, with an interval."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.prefix_cold import COLD, NONE, NOT_SHOWN, OFF, ON, Cold, compared, interval, ratios, verdict, way_taken


def cold(way: str, seconds: float, after: float = 0.0) -> Cold:
    return Cold(way, seconds, {"prefill": seconds}, {"prefill": after}, {"router": seconds / 100})


def test_neighbours_are_compared_in_both_orders_and_a_slow_stretch_cancels() -> None:
    # The cache costs a tenth; the machine is three times as slow from the fourth prompt on.
    costs = {NONE: 1.0, ON: 1.1, OFF: 1.0}
    speeds = (1, 1, 1, 3, 3, 3)
    samples = [
        cold(way, costs[way] * speed, 0.5 * (way == ON) * speed) for way, speed in zip(COLD, speeds, strict=True)
    ] * 3
    found = ratios(samples, ON, NONE)
    assert found["each"] == [1.1] * 6
    assert found["interval"] == [1.1, 1.1]
    assert found["reached"] is False
    assert found["cpu_until_first_token"]["median"] == 1.1
    assert found["cpu_with_writes"]["median"] == 1.6
    assert ratios(samples, ON, OFF)["each"] == [1.1] * 6
    assert way_taken(samples, ON)["cpu"]["prefill"] == {"until_first_token_ms": 2200.0, "afterwards_ms": 1000.0}
    assert way_taken(samples, ON)["beside_computing_ms"] == {"router": 22.0}


def test_a_cache_that_costs_nothing_reaches_the_bar() -> None:
    found = compared([cold(way, 2.0) for way in COLD] * 3)
    for name in ("cold_on_over_no_cache", "cold_on_over_cache_off"):
        assert found[name]["reached"] is True
        assert found[name]["least"] == found[name]["most"] == 1.0


def test_few_pairs_show_nothing() -> None:
    found = ratios([cold(way, 2.0) for way in COLD] * 2, ON, OFF)
    assert (found["median"], found["interval"], found["reached"]) == (1.0, None, NOT_SHOWN)


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (30, 10), (60, 22), (100, 40)]
)
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, rank: int) -> None:
    # Ranks for a confidence of 95% as tables of the sign test give them.
    values = [float(value) for value in range(1, count + 1)]
    random.Random(count).shuffle(values)
    assert interval(values) == (rank, count + 1 - rank)


def test_more_confidence_needs_more_values() -> None:
    assert interval([1.0] * 5) is None
    assert interval([1.0] * 6, 0.975) is None
    assert interval([1.0] * 7, 0.975) == (1.0, 1.0)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    # Of a machine with two speeds, whose pairs now and then fall on both sides of a change.
    chosen, held = random.Random(1), 0
    for _ in range(1000):
        values = [chosen.choice((1.0, 1.0, 0.5, 2.0)) * chosen.lognormvariate(0.003, 0.05) for _ in range(40)]
        low, high = interval(values) or (0.0, 0.0)
        held += low <= 1.003 <= high
        assert low <= statistics.median(values) <= high
    assert held >= 930


@pytest.mark.parametrize(
    ("bounds", "said"),
    [((0.99, 1.01), True), ((0.99, 1.011), NOT_SHOWN), ((1.01, 1.2), NOT_SHOWN), ((1.011, 1.2), False)],
)
def test_only_a_whole_interval_decides(bounds: tuple[float, float], said: bool | str) -> None:
    assert verdict(bounds, 1.01) == said
    assert verdict(None, 1.01) == NOT_SHOWN
