"""Fetch or compute: the choice is the quickest there is, by the measured rates, which are decaying means."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.prefix.contract import FetchRate, Hits
from baton.kv.prefix.fetch_cost import MIN_SAMPLE_BYTES, TRIAL_EVERY_S, TRIAL_S, FetchCostModel, Throughput

BYTES, TOKENS = 400_000, 16
LARGE = 4 * MIN_SAMPLE_BYTES
QUICK, SLOW = FetchRate(0.001, 2e9), FetchRate(0.005, 20e6)
TIERS = ("host", "redis", "peer")

runs = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(1, 300)), max_size=6).map(tuple).map(Hits)
rates = st.dictionaries(st.sampled_from(TIERS), st.builds(FetchRate, st.floats(0, 1), st.floats(1e5, 1e11)))
speeds = st.floats(1, 1e6)


def blocks(hits: Hits, rates: Mapping[str, FetchRate], prefill_rate: float) -> int:
    return FetchCostModel(BYTES, TOKENS).decide(hits, rates, prefill_rate, 0.0).blocks


def test_blocks_are_fetched_if_computing_them_takes_as_long() -> None:
    assert blocks(Hits((("redis", 8),)), {"redis": FetchRate(0.5, 400_000 * 16.0)}, 128.0) == 8


@pytest.mark.parametrize("prefill_rate", [0.0, 1e9])
def test_blocks_of_a_tier_with_unknown_rate_are_fetched(prefill_rate: float) -> None:
    assert blocks(Hits((("redis", 7),)), {}, prefill_rate) == 7
    assert blocks(Hits((("host", 3), ("redis", 7))), {"redis": SLOW}, 0.0) == 10


def test_decisions_have_names() -> None:
    model, redis = FetchCostModel(BYTES, TOKENS), Hits((("host", 3), ("redis", 7)))
    assert model.decide(Hits(), {}, 0.0, 0.0).name == "nothing"
    assert model.decide(redis, {}, 0.0, 0.0).name == "all"
    assert model.decide(redis, {"redis": SLOW}, 1e6, 1.0).name == "part"
    assert model.decide(Hits(redis.runs[1:]), {"redis": SLOW}, 1e6, 1.0).name == "none"
    assert model.decide(redis, {"redis": SLOW}, 1e6, TRIAL_EVERY_S).name == "trial"


def test_saved_time_is_that_of_computing_less_that_of_fetching() -> None:
    decision = FetchCostModel(BYTES, TOKENS).decide(Hits((("redis", 100),)), {"redis": QUICK}, 1000.0, 0.0)
    assert decision.saves_s == pytest.approx(1.6 - 0.001 - 0.02)


def test_a_refused_tier_is_tried_now_and_then_and_comes_back() -> None:
    model, hits, slow = FetchCostModel(BYTES, TOKENS), Hits((("redis", 256),)), {"redis": SLOW}
    trials = [now for now in range(100) if model.decide(hits, slow, 50_000.0, 1000.0 + now).trial]
    assert trials == list(range(int(TRIAL_EVERY_S), 100, int(TRIAL_EVERY_S)))
    assert model.decide(hits, {"redis": QUICK}, 1000.0, 1100.0).blocks == 256, "measured anew"


def test_a_fetch_puts_off_the_next_trial() -> None:
    model, hits = FetchCostModel(BYTES, TOKENS), Hits((("redis", 256),))
    assert model.decide(hits, {"redis": QUICK}, 1000.0, 4.0).blocks == 256
    assert not model.decide(hits, {"redis": SLOW}, 50_000.0, 5.0).trial
    assert model.decide(hits, {"redis": SLOW}, 50_000.0, 9.0).trial


def test_a_trial_is_short_but_fetches_something() -> None:
    def trial(rate: FetchRate, blocks: int = 256) -> int:
        model, hits = FetchCostModel(BYTES, TOKENS), Hits((("redis", blocks),))
        model.decide(hits, {"redis": rate}, 1e9, 0.0)
        decision = model.decide(hits, {"redis": rate}, 1e9, TRIAL_EVERY_S)
        assert decision.trial
        return decision.blocks

    assert trial(FetchRate(0.0, 40e6)) == int(TRIAL_S * 40e6 / BYTES) == 2
    assert trial(FetchRate(0.0, 400e6), blocks=3) == 3
    assert trial(FetchRate(10.0, 1e12)) == 1
    assert trial(FetchRate(0.0, 1.0)) == 1


@settings(deadline=None, max_examples=50)
@given(runs, rates, speeds)
def test_no_other_number_of_blocks_is_quicker(hits: Hits, rates: dict[str, FetchRate], prefill_rate: float) -> None:
    model = FetchCostModel(BYTES, TOKENS)

    def seconds(fetched: int) -> float:
        took = model.estimate_compute_s(hits.blocks - fetched, prefill_rate)
        for tier, blocks in hits.runs:
            taken = min(blocks, fetched)
            took += model.estimate_fetch_s(taken, rates.get(tier)) if taken else 0.0
            fetched -= taken
        return took

    best = min(seconds(n) for n in range(hits.blocks + 1))
    assert seconds(model.decide(hits, rates, prefill_rate, 0.0).blocks) <= best * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(runs, rates, st.floats(0, 1e6), st.floats(0, 3)), max_size=20))
def test_at_most_what_was_found_is_fetched(requests: list[tuple[Hits, dict[str, FetchRate], float, float]]) -> None:
    model, now = FetchCostModel(BYTES, TOKENS), 0.0
    for hits, measured, prefill_rate, passed in requests:
        now += passed
        decision = model.decide(hits, measured, prefill_rate, now)
        assert decision.found == hits.blocks
        assert int(decision.trial) <= decision.blocks <= hits.blocks


def test_nothing_is_known_at_first_nor_from_small_fetches() -> None:
    throughput = Throughput()
    throughput.record_lookup(0.1)
    assert throughput.rate is None
    throughput.record_fetch(MIN_SAMPLE_BYTES - 1, 0.1)
    assert throughput.rate is None


def test_the_first_samples_are_taken_as_they_are_and_later_ones_move_the_means() -> None:
    throughput = Throughput()
    throughput.record_lookup(0.1)
    throughput.record_fetch(LARGE, 1.0)
    assert throughput.rate == FetchRate(0.1, LARGE)
    throughput.record_lookup(0.6)
    throughput.record_fetch(LARGE, 4.0)
    assert throughput.rate is not None
    assert throughput.rate.latency_s == pytest.approx(0.2)
    assert LARGE / throughput.rate.bytes_per_s == pytest.approx(4.8 / 1.8), "of the seconds, not of the rates"
    for _ in range(50):
        throughput.record_fetch(LARGE, 0.5)
    assert throughput.rate.bytes_per_s == pytest.approx(2 * LARGE, rel=1e-3)
