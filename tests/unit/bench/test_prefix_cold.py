"""How the prefix bench compares cold prompts: neighbours only, each pair in its own direction."""

from __future__ import annotations

from bench.prefix_cold import COLD, NONE, OFF, ON, Cold, ratios, way_taken


def test_neighbours_are_compared_in_both_orders_and_a_slow_stretch_cancels() -> None:
    # The cache costs a tenth; the machine is three times as slow from the fourth prompt on.
    costs = {NONE: 1.0, ON: 1.1, OFF: 1.0}
    speeds = (1, 1, 1, 3, 3, 3)
    samples = [
        Cold(way, costs[way] * speed, {"prefill": costs[way] * speed}, {"prefill": 0.5 * (way == ON) * speed})
        for way, speed in zip(COLD, speeds, strict=True)
    ] * 2
    found = ratios(samples, ON, NONE)
    assert found["each"] == [1.1] * 4
    assert not found["reached"]
    assert found["cpu_until_first_token"]["median"] == 1.1
    assert found["cpu_with_writes"]["median"] == 1.6
    assert ratios(samples, ON, OFF)["each"] == [1.1] * 4
    assert way_taken(samples, ON)["cpu"]["prefill"] == {"until_first_token_ms": 2200.0, "afterwards_ms": 1000.0}


def test_a_cache_that_costs_nothing_reaches_the_bar() -> None:
    samples = [Cold(way, 2.0, {"prefill": 2.0}, {"prefill": 0.0}) for way in COLD]
    assert ratios(samples, ON, NONE)["reached"]
    assert ratios(samples, ON, OFF)["least"] == ratios(samples, ON, OFF)["most"] == 1.0
