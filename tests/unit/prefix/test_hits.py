"""Hits cut to their first blocks."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.prefix.contract import Hits

RUNS = st.lists(st.tuples(st.sampled_from(["host", "redis"]), st.integers(1, 5)), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        (0, ()),
        (1, (("host", 1),)),
        (3, (("host", 3),)),
        (4, (("host", 3), ("redis", 1))),
        (5, (("host", 3), ("redis", 2))),
        (9, (("host", 3), ("redis", 2))),
    ],
)
def test_the_first_blocks_of_hits(blocks: int, runs: tuple[tuple[str, int], ...]) -> None:
    assert Hits((("host", 3), ("redis", 2))).first(blocks) == Hits(runs)


@given(runs=RUNS, blocks=st.integers(0, 25))
def test_each_block_keeps_its_tier(runs: tuple[tuple[str, int], ...], blocks: int) -> None:
    cut = Hits(runs).first(blocks)
    assert all(count > 0 for _, count in cut.runs)
    assert tiers(cut) == tiers(Hits(runs))[:blocks]


def tiers(hits: Hits) -> list[str]:
    return list(chain.from_iterable(repeat(tier, count) for tier, count in hits.runs))
