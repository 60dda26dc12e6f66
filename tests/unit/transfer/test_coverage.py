"""Coverage against a set of cells."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import CorruptFrame
from baton.transfer.wire import Coverage, KvSlice

SLICE = KvSlice(range(5, 30), range(1, 4), range(2))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 34), st.integers(0, 12)), max_size=40))
def test_coverage_is_a_set_of_cells(frames: list[tuple[int, int, int]]) -> None:
    coverage, cells = Coverage(SLICE), set()
    for layer, start, count in frames:
        tokens = range(start, start + count)
        new = {(layer, token) for token in tokens}
        fits = layer in SLICE.layers and tokens and all(token in SLICE.tokens for token in tokens)
        if fits and not new & cells:
            coverage.add(layer, tokens, SLICE.heads)
            cells |= new
        else:
            with pytest.raises(CorruptFrame):
                coverage.add(layer, tokens, SLICE.heads)
    runs = coverage.runs()
    assert {(layer, token) for layer, start, stop in runs for token in range(start, stop)} == cells
    assert list(runs) == sorted(runs)
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(runs))
    missing = {(gap.layers.start, token) for gap in coverage.missing() for token in gap.tokens}
    assert missing == {(layer, token) for layer in SLICE.layers for token in SLICE.tokens} - cells


def test_frames_of_heads_outside_of_the_slice_are_corrupt() -> None:
    with pytest.raises(CorruptFrame, match=r"heads \[0, 1\)"):
        Coverage(SLICE).add(1, range(5, 6), range(1))
