"""Placement on fleets of any size: equal to the plain one where workers are few, close to it where they are many."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.kv.format import KvFormat, KvPart
from router.placement import exhaustive
from router.placement.demand import Against, Choice, Demand, decode_cost, prefill_cost
from router.placement.fleet import DecodeView, Fleet, PrefillView
from router.placement.policy import SMALL, choose, matching_decodes, quietest, servable
from router.placement.prefix_index import Found
from router.workers.breaker import Shut
from tests.effort import effort
from tests.hits import hits

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
HALF = replace(KV, parts=tuple(replace(part, dtype="bfloat16") for part in KV.parts))
LIMIT = 3
FORMATS = [KV, KV, KV, HALF]
RATES = [0.0, 90.0, 100.0, 130.0, 1000.0]


Views = tuple[list[PrefillView], list[DecodeView]]


def fleet_of(draw: random.Random, least: int, most: int) -> Views:
    """Workers with few different numbers, so that equals and near-equals are many."""
    prefills = [
        PrefillView(
            f"p{i}",
            draw.choice(FORMATS),
            draw.random() < 0.1,
            draw.choice([0, 50, draw.randrange(300)]),
            draw.choice(RATES),
            draw.randrange(LIMIT + 1),
            draw.choice([0, draw.randrange(300)]),
            draw.randrange(3),
            draw.choice([0.0, 1000.0]),
        )
        for i in range(draw.randint(least, most))
    ]
    decodes = [
        DecodeView(
            f"d{i}",
            draw.choice(FORMATS),
            draw.random() < 0.2,
            draw.random() < 0.1,
            draw.choice([0, 100, draw.randrange(300)]),
            draw.randrange(3),
            draw.randrange(3),
        )
        for i in range(draw.randint(least, most))
    ]
    return prefills, decodes


def asked_of(draw: random.Random, count: int) -> dict[str, Any]:
    """A demand on such a fleet, what breakers say, and who is kept for another."""

    def some(*names: str) -> frozenset[str]:
        return frozenset(draw.choice(names) for _ in range(draw.choice([0, 0, 1, 3])))

    prefills, decodes = [f"p{i}" for i in range(count)], [f"d{i}" for i in range(count)]

    def pairs() -> frozenset[tuple[str, str]]:
        return frozenset((draw.choice(prefills), draw.choice(decodes)) for _ in range(draw.choice([0, 0, 1, 4, 20])))

    def drawn() -> Found:
        return hits({draw.choice(prefills + decodes): draw.choice([16, 100, 200]) for _ in range(draw.randrange(6))})

    demand = Demand(
        draw.randint(1, 200),
        draw.random() < 0.8,
        some(*prefills, *decodes),
        pairs(),
        drawn(),
        drawn(),
        some(*decodes),
        number=draw.randrange(100),
    )
    return {"demand": demand, "shut": Shut(some(*prefills, *decodes), pairs()), "held": some(*prefills, *decodes)}


def both(workers: Views, asked: dict[str, Any]) -> tuple[Fleet, Choice | None, Choice | None]:
    fleet = Fleet(*workers)
    plain = exhaustive.choose(*workers, prefill_limit=LIMIT, usual_rate=fleet.usual_rate, **asked)
    return fleet, choose(fleet, prefill_limit=LIMIT, **asked), plain


@given(st.integers(0, 2**32), st.integers(0, 6))
@effort(1000)
def test_a_small_fleet_is_looked_at_whole(seed: int, most: int) -> None:
    draw = random.Random(seed)
    workers, asked = fleet_of(draw, 0, most), asked_of(draw, 6)
    fleet, choice, plain = both(workers, asked)
    assert choice == plain
    open_prefills = [view for view in workers[0] if not view.draining]
    pairs = exhaustive._pairs(*workers, Demand(1), frozenset())
    assert servable(fleet, decodes=False) is bool(open_prefills)
    assert servable(fleet, decodes=True) is bool(pairs)
    assert matching_decodes(fleet) == {decode.name for _, follow in pairs for decode in follow}
    found = quietest(fleet, asked["demand"], asked["shut"])
    pairs = exhaustive._pairs(*workers, asked["demand"], asked["demand"].never)
    assert (found is not None) is bool(pairs)
    if found is not None:
        assert found[0].prefill in {prefill.name for prefill, _ in pairs}


@given(st.integers(0, 2**32))
@effort(200)
def test_a_large_fleet_is_served_nearly_as_well(seed: int) -> None:
    draw = random.Random(seed)
    workers, asked = fleet_of(draw, SMALL + 1, SMALL + 30), asked_of(draw, SMALL + 1)
    fleet, choice, plain = both(workers, asked)
    assert (choice is None) is (plain is None)
    if choice is None or plain is None:
        return
    demand, against = asked["demand"], Against.of(asked["demand"], asked["shut"])
    prefills = {view.name: view for view in workers[0]}
    decodes = {view.name: view for view in workers[1]}
    chosen, best = prefills[choice.prefill], prefills[plain.prefill]
    assert chosen.name not in asked["held"]
    assert chosen.own_requests < LIMIT
    usual = fleet.usual_rate
    # Within one row rates differ by up to the square root of two.
    assert prefill_cost(chosen, demand, usual)[0] <= 2**0.5 * prefill_cost(best, demand, usual)[0] + 1e-9
    assert bool(choice.decode) is bool(plain.decode)
    if choice.decode:
        first, other = choice.decode[0], plain.decode[0]
        assert against.pair(chosen.name, first) == against.pair(best.name, other)
        if chosen is best:
            assert decode_cost(decodes[first], demand) == decode_cost(decodes[other], demand)


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 300)), max_size=20))
@effort(100)
def test_a_fleet_that_news_has_changed_is_as_one_made_anew(seed: int, news: list[tuple[int, bool, int]]) -> None:
    workers = fleet_of(random.Random(seed), 0, 5)
    fleet = Fleet(*workers)
    prefills, decodes = ({view.name: view for view in views} for views in workers)
    for pick, gone, number in news:
        for views, put, remove in (
            (prefills, fleet.put_prefill, fleet.remove_prefill),
            (decodes, fleet.put_decode, fleet.remove_decode),
        ):
            if not views:
                continue
            name = sorted(views)[pick % len(views)]
            if gone:
                del views[name]
                remove(name)
            elif isinstance(view := views[name], PrefillView):
                views[name] = replace(view, pending_tokens=number, rate=float(number % 3), draining=number % 5 == 0)
                put(views[name])
            else:
                views[name] = replace(view, free_tokens=number, free_slots=number % 2, draining=number % 5 == 0)
                put(views[name])
    anew = Fleet(prefills.values(), decodes.values())
    for mine, its in ((fleet.prefill, anew.prefill), (fleet.decode, anew.decode)):
        rows = [{(row.first.kv_format, row.kind[1]): list(row) for row in each.rows} for each in (mine, its)]
        assert rows[0] == rows[1]
        assert sorted(view.name for view in mine) == sorted(view.name for view in its)
    assert fleet.usual_rate == anew.usual_rate
    assert [fleet.seats(limit) for limit in range(5)] == [anew.seats(limit) for limit in range(5)]
