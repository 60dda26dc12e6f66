"""The shortest chunk that hides copies, for published rates of devices and of their links to the host."""

import pytest

from baton.engine.factory import min_overlap_chunk


@pytest.mark.parametrize(
    ("flops", "link", "tokens"),
    [(989.4e12, 55e9, 4_498), (312e12, 25e9, 3_120), (165.2e12, 25e9, 1_652)],
    ids=["H200 on PCIe 5", "A100", "RTX 4090"],
)
def test_copies_hide_behind_chunks_of_llama_3_8b(flops: float, link: float, tokens: int) -> None:
    assert min_overlap_chunk(flops, link, group=4, dtype_bytes=2) == tokens


def test_more_query_heads_a_kv_head_hide_them_sooner() -> None:
    assert min_overlap_chunk(1e12, 1e9, 8, 2) == 125
    assert min_overlap_chunk(1e12, 1e9, 1, 2) == 1_000
    assert min_overlap_chunk(1e12, 1e9, 1, 4) == 2_000
