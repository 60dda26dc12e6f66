"""Placement equals the plain one that looks at every pair, on fleets of any size."""

import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.kv.format import KvFormat, KvPart
from router.placement.policy import (
    ASKED_AT_MOST,
    DecodeView,
    FleetView,
    PrefillView,
    SelectionCriteria,
    can_serve,
    compatible_decode_addresses,
    least_loaded_pair,
    rank_pairs,
)
from router.placement.prefix_directory import PrefixMatch
from tests import placement_oracle
from tests.effort import effort
from tests.placement_oracle import hits

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
HALF = replace(KV, parts=tuple(replace(part, dtype="bfloat16") for part in KV.parts))
LIMIT = 3
FORMATS = [KV, KV, KV, HALF]
RATES = [0.0, 90.0, 100.0, 130.0, 1000.0]


Views = tuple[list[PrefillView], list[DecodeView]]


def fleet_of(draw: random.Random, least: int, most: int) -> Views:
    """Workers with few different numbers, so that equals and near-equals are many. Those named m are mixed."""
    names = [draw.choice("pm") + str(number) for number in range(draw.randint(least, most))]
    prefills = [
        PrefillView(
            name,
            draw.choice(FORMATS),
            draw.random() < 0.1,
            draw.choice([0, 50, draw.randrange(300)]),
            draw.choice(RATES),
            draw.randrange(LIMIT + 1),
            draw.choice([0, draw.randrange(300)]),
            draw.choice([0.0, 1000.0]),
            running=draw.choice([0, 1, 8]) if name.startswith("m") else 0,
        )
        for name in names
    ]
    formats = {view.address: view.kv_format for view in prefills}
    names = [name for name in names if name.startswith("m")]
    names += [f"d{number}" for number in range(draw.randint(least, most))]
    decodes = [
        DecodeView(
            name,
            formats.get(name, draw.choice(FORMATS)),
            draw.random() < 0.2,
            draw.random() < 0.1,
            draw.choice([0, 100, draw.randrange(300)]),
            draw.randrange(3),
            draw.randrange(3),
            slots=4,
            step_seconds=draw.choice([0.0, 0.01]),
            transfer_bytes_per_second=draw.choice([0.0, 10_000.0]),
        )
        for name in names
    ]
    return prefills, decodes


def criteria_of(draw: random.Random, count: int) -> tuple[SelectionCriteria, frozenset[str]]:
    """Criteria for such a fleet, and who is isolated for another."""

    def some(*names: str) -> frozenset[str]:
        return frozenset(draw.choice(names) for _ in range(draw.choice([0, 0, 1, 3])))

    prefills = [kind + str(number) for number in range(count) for kind in "pm"]
    decodes = [kind + str(number) for number in range(count) for kind in "dm"]

    def pairs() -> frozenset[tuple[str, str]]:
        return frozenset((draw.choice(prefills), draw.choice(decodes)) for _ in range(draw.choice([0, 0, 1, 4, 20])))

    def drawn() -> PrefixMatch:
        return hits({draw.choice(prefills + decodes): draw.choice([16, 100, 200]) for _ in range(draw.randrange(6))})

    criteria = SelectionCriteria(
        draw.randint(1, 200),
        draw.random() < 0.8,
        blame=Counter([*pairs(), *pairs(), *((name,) for name in some(*prefills, *decodes, *prefills))]),
        in_place_only=some(*prefills),
        prefill_match=drawn(),
        decode_match=drawn(),
        excluded_decodes=some(*decodes),
    )
    return criteria, some(*prefills, *decodes)


@given(st.integers(0, 2**32), st.one_of(st.integers(0, 6), st.just(ASKED_AT_MOST + 10)))
@effort(1000)
def test_the_best_of_all_pairs_are_selected(seed: int, most: int) -> None:
    draw = random.Random(seed)
    workers = fleet_of(draw, 0, most)
    criteria, isolated = criteria_of(draw, max(most, 1))
    fleet = FleetView(*workers)
    fleet.isolated = isolated
    for limit in (LIMIT, math.inf):
        plain = placement_oracle.rank(fleet, criteria, limit)
        for ranked in (1, 100):
            assert rank_pairs(fleet, criteria, prefill_limit=limit, most=ranked) == plain[:ranked]
    pairs = placement_oracle.pairs(*workers, SelectionCriteria(1))
    assert can_serve(fleet, needs_decode=False) is any(not view.draining for view in workers[0])
    assert can_serve(fleet, needs_decode=True) is bool(pairs)
    assert compatible_decode_addresses(fleet) == {decode.address for _, follow in pairs for decode in follow}
    pair = least_loaded_pair(fleet, criteria)
    pairs = placement_oracle.pairs(*workers, criteria)
    if most <= ASKED_AT_MOST // 2:
        assert (pair is not None) is bool(pairs)
    if pair is not None:
        assert pair[0].prefill in {prefill.address for prefill, _ in pairs}


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 300)), max_size=20))
@effort(100)
def test_a_fleet_that_news_has_changed_is_as_one_made_anew(seed: int, news: list[tuple[int, bool, int]]) -> None:
    workers = fleet_of(random.Random(seed), 0, 5)
    fleet = FleetView(*workers)
    prefills, decodes = ({view.address: view for view in views} for views in workers)
    for pick, gone, number in news:
        kind, draining = FORMATS[number % 4], number % 5 == 0
        if prefills:
            name = sorted(prefills)[pick % len(prefills)]
            prefill = replace(prefills.pop(name), kv_format=kind, rate=float(number % 3), draining=draining)
            prefills |= {} if gone else {name: prefill}
            fleet.set_prefill(name, prefills.get(name))
        if decodes:
            name = sorted(decodes)[pick % len(decodes)]
            decode = replace(decodes.pop(name), kv_format=kind, free_slots=number % 2, draining=draining)
            decodes |= {} if gone else {name: decode}
            fleet.set_decode(name, decodes.get(name))
        assert _grouped(fleet) == _grouped(FleetView(prefills.values(), decodes.values()))
    anew = FleetView(prefills.values(), decodes.values())
    assert (fleet.prefill, fleet.decode) == (anew.prefill, anew.decode)


def _grouped(fleet: FleetView) -> set[tuple[frozenset[str], frozenset[str]]]:
    """Names of the prefill workers of each group, and of those that may follow."""
    return {(frozenset(prefills), frozenset(decodes)) for prefills, decodes in fleet.compatible_groups}
