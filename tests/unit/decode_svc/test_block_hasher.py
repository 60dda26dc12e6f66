"""Names of a sequence's blocks: those of the chain, and never one whose KV may not be there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.fake import FakeEngine
from decode_svc.scheduler import RollingBlockHasher
from tests.decoding import digests

ENGINE = FakeEngine(page_size=4, pages=1, block_size=4)


@given(st.integers(0, 21), st.lists(st.integers(1, 9), max_size=6), st.binary(max_size=3))
def test_it_names_all_blocks_but_that_of_the_last_token(context: int, steps: list[int], salt: bytes) -> None:
    ids = list(range(7, 7 + context))
    names = digests(ENGINE, ids, salt)
    first = RollingBlockHasher(ENGINE.spec, salt, names, ids[len(names) * 4 :])
    hasher = first.fork(1)
    ids.append(1)
    for step in steps:
        tokens = list(range(100, 100 + step))
        hasher.extend(tokens)
        ids += tokens
        assert hasher.digests == digests(ENGINE, ids[:-1], salt)
    assert first.digests == names


@pytest.mark.parametrize("context", [3, 4])
def test_choices_go_different_ways(context: int) -> None:
    ids = list(range(context))
    names = digests(ENGINE, ids)
    hasher = RollingBlockHasher(ENGINE.spec, b"", names, ids[len(names) * 4 :])
    one, two = hasher.fork(50), hasher.fork(60)
    one.extend(range(8))
    two.extend(range(8))
    assert one.digests == digests(ENGINE, [*ids, 50, *range(7)])
    assert two.digests == digests(ENGINE, [*ids, 60, *range(7)])
    assert one.digests[: len(names)] == two.digests[: len(names)] == names
