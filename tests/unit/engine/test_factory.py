"""The shortest chunk that hides copies, for published rates of devices and of their links to the host."""

from baton.engine.factory import min_overlap_chunk


def test_copies_hide_behind_chunks_of_llama_3_8b_on_an_a100() -> None:
    assert min_overlap_chunk(312e12, 25e9, group=4, dtype_bytes=2) == 3_120


def test_more_query_heads_a_kv_head_hide_them_sooner() -> None:
    assert min_overlap_chunk(1e12, 1e9, 8, 2) == 125
    assert min_overlap_chunk(1e12, 1e9, 1, 2) == 1_000
    assert min_overlap_chunk(1e12, 1e9, 1, 4) == 2_000
