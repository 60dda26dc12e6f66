"""The arithmetic of forward passes, against numbers counted another way."""

import pytest

from baton.bench.roofline import decode_bytes, decode_flops, prefill_flops
from baton.planner.shape import ModelShape

LLAMA_8B = ModelShape(4096, 14336, 32, 8, 128, 128256, (None,) * 32)
SMALL = ModelShape(8, 16, 4, 2, 4, 100, (None, 3))


def _counted(shape: ModelShape, tokens: int, past: int) -> int:
    """Attention's operations, pair by pair; in the last layer those of the last token."""
    last = len(shape.windows) - 1
    pairs = sum(
        1
        for layer, window in enumerate(shape.windows)
        for query in range(past + tokens - 1 if layer == last else past, past + tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    return pairs * 4 * shape.num_heads * shape.head_dim


def test_llama_has_eight_billion_weights() -> None:
    assert LLAMA_8B.step_weights + LLAMA_8B.head_weights == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_8B.kv_token_bytes(2) == 131072


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (2, 0), (7, 0), (5, 2), (5, 9), (1, 2), (1, 3)])
def test_prefill_counts_only_what_the_mask_leaves(tokens: int, past: int) -> None:
    kv_only = 8 * 2 * 2 * 4
    linear = 2 * SMALL.layer_weights * (tokens + 1) + 2 * kv_only * (tokens - 1) + 2 * SMALL.head_weights
    assert prefill_flops(SMALL, tokens, past) == linear + _counted(SMALL, tokens, past)


def test_chunks_add_up_to_the_whole() -> None:
    parts = [(0, 300), (300, 500), (800, 1248)]
    assert sum(prefill_flops(LLAMA_8B, tokens, past, 0) for past, tokens in parts) == prefill_flops(
        LLAMA_8B, 2048, 0, 0
    )


def test_a_step_is_one_token_of_each_sequence() -> None:
    contexts = [1, 3, 4, 9]
    assert decode_flops(SMALL, 4, contexts) == sum(prefill_flops(SMALL, 1, context - 1) for context in contexts)
    assert decode_flops(SMALL, 4, 5) == decode_flops(SMALL, 4, [5] * 4)
    with pytest.raises(ValueError, match="3 contexts for a batch of 4"):
        decode_flops(SMALL, 4, [1, 2, 3])


def test_a_step_reads_weights_once_and_each_context_once() -> None:
    token = SMALL.kv_token_bytes(2)
    layer = token // SMALL.num_layers
    assert decode_bytes(SMALL, 2, [2, 7], 1000, token) == 1000 + (2 + 2) * layer + (7 + 3) * layer + 2 * token
    weights = LLAMA_8B.step_weights * 2
    assert decode_bytes(LLAMA_8B, 64, 1024, weights, 131072) == weights + 64 * 1025 * 131072
