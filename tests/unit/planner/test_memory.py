"""Sizes of memory, against published and hand-computed numbers."""

from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.planner.memory import (
    PoolSize,
    heads_per_rank,
    kv_token_bytes,
    mlp_token_bytes,
    pipeline_stages,
    streaming,
    torch_workspace,
    weights,
)
from baton.planner.shape import SHAPES

GIB = 1 << 30
LLAMA = SHAPES["llama-3.1-8b"]


def tokens_beside(memory: int, used: int, token_bytes: int) -> int:
    """floor((memory - used) / bytes of a token), 0 if `used` does not fit: a pool with pages of one token."""
    return PoolSize.within(memory - used, 1, token_bytes).tokens


@pytest.mark.parametrize(
    ("name", "w", "a", "tokens"),
    [
        ("0.5b", 16, 16, 252_705),
        ("0.5b", 4, 8, 519_568),
        ("7b", 16, 16, 22_072),
        ("7b", 8, 8, 71_224),
        ("14b", 16, 16, 0),
        ("14b", 4, 16, 23_285),
        ("32b", 4, 16, 37_778),
        ("32b", 6, 16, 7_515),
        ("32b", 4, 8, 75_556),
        *((name, w, 16, 0) for name in ("72b", "110b") for w in (16, 8, 6, 4)),
    ],
)
def test_tokens_beside_the_activated_parameters_in_24_gib(name: str, w: int, a: int, tokens: int) -> None:
    """floor((24 * 2^30 - P w/8) / (KV a/8)), P: activated parameters; 0: they do not fit. Source: calculators."""
    shape = SHAPES[f"qwen1.5-{name}"]
    assert tokens_beside(24 * GIB, shape.activated * w // 8, kv_token_bytes(shape, a)) == tokens


@pytest.mark.parametrize(("w", "a", "tokens"), [(16, 16, 19_697), (4, 8, 83_576)])
def test_tokens_beside_all_tensors_in_24_gib(w: int, a: int, tokens: int) -> None:
    """The same with all parameters of the untied checkpoint, each of w bits, in place of the activated ones."""
    shape = SHAPES["qwen1.5-7b"]
    assert tokens_beside(24 * GIB, shape.parameters * w // 8, kv_token_bytes(shape, a)) == tokens


def test_the_engine_has_norms_in_float32() -> None:
    """266,240 elements of norms take 4 bytes, not 2; 64 rotary frequencies take 8."""
    shape = SHAPES["qwen1.5-7b"]
    assert weights(shape, 16).total == shape.parameters * 2 + 266_240 * 2 + 64 * 8
    assert tokens_beside(24 * GIB, weights(shape, 16).total, kv_token_bytes(shape, 16)) == 19_696


@pytest.mark.parametrize(("host", "tokens"), [(128, 1 << 20), (512, 1 << 22), (1024, 1 << 23), (2048, 1 << 24)])
def test_tokens_of_the_8b_in_host_memory(host: int, tokens: int) -> None:
    """memory / (2 * 32 layers * 8 KV heads * 128 * 2 bytes). Source: docs/long-prompts.md."""
    assert tokens_beside(host * GIB, 0, kv_token_bytes(LLAMA, 16)) == tokens


def test_a_token_of_the_8b() -> None:
    """gate and up: 2 * 14,336 * 2 bytes; KV: 131,072 bytes."""
    assert mlp_token_bytes(LLAMA, 2) == 57_344
    assert kv_token_bytes(LLAMA, 16) == 131_072


@pytest.mark.parametrize(("tokens", "layer"), [(1 << 20, 4), (1 << 21, 8), (1 << 22, 16)])
def test_streaming_the_8b_holds_the_ring_alone(tokens: int, layer: int) -> None:
    """A layer's KV: tokens * 4,096 bytes; with `cat` twice that; the ring 3 * 16,384 * 4,096 for any length."""
    sizes = streaming(LLAMA, tokens, 4096, 16)
    assert (sizes.layer, sizes.joined) == (layer * GIB, 2 * layer * GIB)
    assert sizes.ring == 3 * 64 << 20


@pytest.mark.parametrize(("chunk", "gib"), [(32768, 1984), (16384, 4032), (8192, 8128), (4096, 16320)])
def test_copies_of_a_prompt_of_a_million_tokens(chunk: int, gib: int) -> None:
    """L n(n-1)/2 C * 4,096 bytes for n = 2^20 / C chunks. Source: docs/long-prompts.md."""
    assert streaming(LLAMA, 1 << 20, chunk, 16).copied == gib * GIB


def test_the_70b_on_four_ranks() -> None:
    """Matrices alone: 70,552,387,584 * 2 / 4 bytes; published as 35.276 GB. The whole norms are 2.6 MB more."""
    shape = SHAPES["llama-3-70b"]
    share = weights(shape, 16, tp=4)
    assert share.matrices + share.embeddings == 35_276_193_792 == shape.matrix_weights * 2 // 4
    assert share.norms == 4 * 161 * 8192
    assert kv_token_bytes(shape, 16, tp=4) == 81_920


def test_stages_share_layers_and_the_ends_have_the_tables() -> None:
    parts = [weights(LLAMA, 16, stage=stage) for stage in pipeline_stages(LLAMA, 5)]
    assert [stage.layers for stage in pipeline_stages(LLAMA, 5)] == [7, 7, 6, 6, 6]
    whole = weights(LLAMA, 16)
    assert sum(part.matrices for part in parts) == whole.matrices
    assert [part.embeddings for part in parts] == [whole.embeddings // 2, 0, 0, 0, whole.embeddings // 2]
    assert sum(part.norms for part in parts) == whole.norms


def test_a_tied_table_is_on_both_ends_of_a_pipeline() -> None:
    shape = SHAPES["qwen3-0.6b"]
    table = 151936 * 1024 * 2
    assert weights(shape, 16).embeddings == table
    assert [weights(shape, 16, stage=stage).embeddings for stage in pipeline_stages(shape, 2)] == [table, table]


def test_ranks_must_divide_the_model() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: 64 ranks do not divide 32 heads; possible: 1, 2, 4, 8, 16"):
        weights(LLAMA, 16, tp=64)
    with pytest.raises(ConfigError, match="12 ranks neither divide 8 KV heads nor are a multiple of them"):
        weights(replace(LLAMA, num_heads=96, intermediate_size=96), 16, tp=12)
    with pytest.raises(ConfigError, match="pipeline_parallel: 33 stages for 32 layers"):
        pipeline_stages(LLAMA, 33)


@pytest.mark.parametrize(("kv_heads", "tp", "rank"), [(8, 8, 1), (8, 16, 1), (8, 32, 1), (1, 8, 1), (2, 1, 2)])
def test_more_ranks_than_kv_heads_have_copies_of_them(kv_heads: int, tp: int, rank: int) -> None:
    """A rank has max(1, KV heads / tp): 2 * 32 layers * so many * 128 * 2 bytes, and as many rows of K and V."""
    shape = replace(LLAMA, num_kv_heads=kv_heads)
    assert heads_per_rank(shape, tp) == (32 // tp, rank)
    assert kv_token_bytes(shape, 16, tp=tp) == rank * 2 * 32 * 128 * 2
    own = (32 // tp + rank) * 2 * 128 * 4096 + 3 * 4096 * 14336 // tp
    assert weights(shape, 16, tp=tp).matrices == 32 * own * 2


def test_sequences_have_whole_pages() -> None:
    pool = PoolSize.within(1000, page_size=16, token_bytes=2)
    assert (pool.pages, pool.tokens, pool.bytes) == (31, 496, 992)
    assert [pool.sequences(length) for length in (1, 16, 17, 496, 497)] == [31, 31, 15, 1, 0]
    assert PoolSize.within(-5, 16, 2).pages == 0


def test_ranks_share_the_workspace_of_the_mlp() -> None:
    """Of each token: gate, up and product 3 I / tp; hidden states 4 H; Q and K; angles."""
    assert torch_workspace(LLAMA, 100, 2, tp=2).total == 100 * 2 * (3 * 7168 + 4 * 4096 + 20 * 128) + 100 * 1024
