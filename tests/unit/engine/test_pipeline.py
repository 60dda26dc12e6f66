"""The stages of a pipeline, one after the other on one thread, against the whole decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from baton.engine.pipeline import StageDecoder, pieces_of
from baton.kv.format import attention_parts
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder, stages_of
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.collective import Channel

CPU = torch.device("cpu")
PAGE_SIZE, PAGES = 16, 300
CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
)


class Queue:
    """A channel without bounds."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._waiting: list[Tensor] = []

    def send(self, tensor: Tensor) -> None:
        self.sizes.append(len(tensor))
        self._waiting.append(tensor.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._waiting.pop(0)
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
        return tensor


def decoder_of(layers: range) -> Decoder:
    """The decoder of some layers, whose weights are the same in every decoder that has them."""
    decoder = Decoder(CONFIG, TensorOptions(torch.float32, CPU), TensorParallel(), layers)
    tensors = [*decoder.checkpoint_tensors()]
    if decoder.head is not None:
        tensors.append(decoder.head_tensor())
    for tensor in tensors:
        generator = torch.Generator().manual_seed(sum(tensor.name.encode()))
        tensor.load(torch.randn(tensor.shape, generator=generator) / 4)
    return decoder.eval()


def cache_of(layers: range) -> KvCache:
    parts = attention_parts("float32", CONFIG.num_kv_heads, CONFIG.head_dim)
    return KvCache.allocate(parts, num_layers=len(layers), num_pages=PAGES, page_size=PAGE_SIZE, device=CPU)


@pytest.mark.parametrize(
    ("queries", "pieces"),
    [
        ([300, 1, 20], [128, 128, 65]),
        ([1100, 3], [138] * 7 + [137]),
        ([100, 1], [101]),
        # A decode step reads the weights once, however many slots it has.
        ([1] * 200, [200]),
    ],
)
def test_stages_compute_every_piece(queries: list[int], pieces: list[int]) -> None:
    stages, channel = stages_of(CONFIG.num_layers, 2), Queue()
    first = StageDecoder(decoder_of(stages[0]), None, cast(Channel, channel))
    last = StageDecoder(decoder_of(stages[1]), cast(Channel, channel), None)
    whole, layers = decoder_of(range(CONFIG.num_layers)), range(CONFIG.num_layers)
    caches = [cache_of(each) for each in (layers, *stages)]
    pages = max(-(-query // PAGE_SIZE) for query in queries)
    tables = torch.arange(len(queries) * pages, dtype=torch.int32).view(len(queries), pages)
    batch = AttentionBatch.build(queries, queries, tables, PAGE_SIZE)
    ids = torch.arange(batch.num_tokens) % CONFIG.vocab_size
    for sampled in None, [0, batch.num_tokens // 2, batch.num_tokens - 1]:
        wanted = whole(ids, batch.positions, batch, caches[0], None, sampled)
        channel.sizes.clear()
        nothing = first(ids, batch.positions, batch, caches[1], None, sampled)
        found = last(ids, batch.positions, batch, caches[2], None, sampled)
        assert nothing.shape == (0, CONFIG.hidden_size)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert channel.sizes == pieces
    for name, part in caches[0].parts.items():
        torch.testing.assert_close(torch.cat([each.parts[name] for each in caches[1:]]), part, rtol=1e-4, atol=1e-4)


def test_pieces_have_every_token_once() -> None:
    for tokens in (1, 127, 128, 129, 1024, 1025, 5000):
        pieces = list(pieces_of(tokens))
        assert [token for piece in pieces for token in piece] == list(range(tokens))
        assert len(pieces) <= 8
        assert all(len(piece) >= 128 for piece in pieces[:-1])
