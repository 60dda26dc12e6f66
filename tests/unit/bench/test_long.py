"""The bench of long prompts: its attention, its strategies, and its count of tensors."""

import pytest
import torch
import torch.nn.functional as F

from bench.long import (
    STRATEGIES,
    LlamaShape,
    LongModel,
    Tracker,
    attend,
    chunked_attention,
    measure,
    standard_attention,
)

SHAPE = LlamaShape(layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=16, vocab=32)


@pytest.mark.parametrize(
    ("start", "tokens", "queries", "segment"), [(0, 7, 3, 2), (5, 4, 4, 3), (9, 1, 1, 4), (3, 6, 2, 99)]
)
def test_attention_by_segments_equals_plain_attention(start: int, tokens: int, queries: int, segment: int) -> None:
    random = torch.Generator().manual_seed(start)
    q = torch.randn(tokens, 4, 8, generator=random, dtype=torch.float64)
    kv = torch.randn(2, start + tokens, 2, 8, generator=random, dtype=torch.float64)
    mask = torch.arange(start, start + tokens)[:, None] >= torch.arange(start + tokens)
    rows, k, v = (x.transpose(0, 1)[None] for x in (q, kv[0], kv[1]))
    plain = F.scaled_dot_product_attention(rows, k, v, mask, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(attend(q, kv, start, queries, segment), plain, rtol=1e-12, atol=1e-12)


def test_strategies_agree_in_hidden_state_and_kv() -> None:
    model = LongModel(SHAPE, chunk=8, segment=5)
    token_ids = torch.randint(32, (29,), generator=torch.Generator().manual_seed(0))
    homes = [model.new_kv(29) for _ in STRATEGIES]
    first, *others = (run(model, token_ids, kv) for run, kv in zip(STRATEGIES, homes, strict=True))
    for hidden, kv in zip(others, homes[1:], strict=True):
        torch.testing.assert_close(hidden, first)
        torch.testing.assert_close(kv, homes[0])


def test_chunked_attention_equals_standard() -> None:
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(20, 8, generator=random), torch.randn(4, 8, 8, generator=random)
    torch.testing.assert_close(chunked_attention(x, weights, 6), standard_attention(x, weights))


def test_streaming_memory_does_not_grow_with_the_prompt() -> None:
    model = LongModel(SHAPE, chunk=32, segment=32)
    peaks = {}
    for length in (128, 512):
        ids, kv = torch.zeros(length, dtype=torch.int64), model.new_kv(length)
        peaks[length] = {run.__name__: measure(lambda: run(model, ids, kv))[1].peak for run in STRATEGIES}  # noqa: B023
    assert peaks[512].pop("streaming") == peaks[128].pop("streaming")
    assert all(peaks[512][name] > 1.5 * peak for name, peak in peaks[128].items())


def test_tracker_counts_a_storage_once_and_until_it_is_freed() -> None:
    given = torch.zeros(1000)
    with Tracker() as tracker:
        given.add_(1)
        view = given.view(10, 100)
        assert tracker.now == 0
        made = view + 1
        rows = made[2:4]
        assert tracker.now == 4000
        del made
        assert tracker.now == 4000
        del rows
        assert tracker.now == 0
    assert tracker.peak == 4000
    assert tracker.at_peak == [("aten.add.Tensor", [10, 100], 4000 / (1 << 20))]
