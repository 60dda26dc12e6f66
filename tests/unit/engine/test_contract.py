"""The shortest chunk that hides copies of KV, against published rates."""

import pytest

from baton.engine.contract import min_overlap_chunk


@pytest.mark.parametrize(
    ("flops", "link", "tokens"),
    [(989.4e12, 55e9, 4_498), (312e12, 25e9, 3_120), (165.2e12, 25e9, 1_652)],
    ids=["H200 on PCIe 5", "A100", "RTX 4090"],
)
def test_copies_hide_behind_chunks_of_llama_3_8b(flops: float, link: float, tokens: int) -> None:
    """ceil(C / W / (2 group / bytes)), published rates of devices and of their links to the host."""
    assert min_overlap_chunk(flops, link, group=4, kv_bits=16) == tokens


def test_more_query_heads_a_kv_head_hide_them_sooner() -> None:
    assert min_overlap_chunk(1e12, 1e9, 8, 16) == 125
    assert min_overlap_chunk(1e12, 1e9, 1, 16) == 1_000
    assert min_overlap_chunk(1e12, 1e9, 1, 32) == 2_000


def test_elements_of_kv_may_have_less_than_a_byte() -> None:
    assert min_overlap_chunk(1e12, 1e9, 1, 4) == 250
    assert min_overlap_chunk(1e12, 1e9, 1, 12) == 750
