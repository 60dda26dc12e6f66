"""Pipeline stages on native kernels, one after the other in one process, against the whole model."""

import ctypes
import dataclasses
import random

import pytest
import torch
from torch import Tensor

from baton.errors import EngineError
from baton.kv.format import attention_parts
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder, stages_of
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.decoder import NativeDecoder
from baton.native.packed import PackedWeights, weights_of
from baton.process.load_progress import LoadProgress
from tests.effort import fuzz
from tests.unit.native.test_forward import CPU, random_config, some_tokens

PAGE_SIZE, PAGES = 8, 40


class Stage:
    """A stage of a model whose weights are the same in every stage that has them, and its own pages."""

    def __init__(
        self, config: ModelConfig, stage: range, library: ctypes.CDLL, dtype: torch.dtype, threads: int, tied: bool
    ) -> None:
        decoder = Decoder(config, TensorOptions(dtype, CPU), TensorParallel(), stage)
        tensors = [*decoder.checkpoint_tensors()]
        if decoder.head is not None and not tied:
            tensors.append(decoder.head_tensor())
        for tensor in tensors:
            generator = torch.Generator().manual_seed(sum(tensor.name.encode()))
            weight = torch.randn(tensor.shape, generator=generator)
            tensor.load((weight if len(tensor.shape) == 1 else 2 * weight * tensor.shape[1] ** -0.5).to(dtype))
        if tied and decoder.head is not None and decoder.embedding is not None:
            decoder.head.tie(decoder.embedding)
        weights = PackedWeights.private(weights_of(decoder, library, LoadProgress()))
        self.names = set(weights.addresses)
        self.native = NativeDecoder(config, dtype, weights, library, threads, stage=stage)
        parts = attention_parts("float32", config.num_kv_heads, config.head_dim)
        self.kv = KvCache.allocate(parts, num_layers=len(stage), num_pages=PAGES, page_size=PAGE_SIZE, device=CPU)
        for part in self.kv.parts.values():
            part.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@fuzz("native pipeline stages", 4)
def test_stages_equal_the_whole_model(library: ctypes.CDLL, dtype: torch.dtype, tied: bool, rng: random.Random) -> None:
    """All bits: hidden states, choices, logits and pages, layer by layer or at once."""
    torch.manual_seed(rng.getrandbits(32))
    count, threads = rng.randint(2, 5), rng.randint(1, 3)
    # A checkpoint may have a projection of its own although its configuration allows that it has none.
    config = dataclasses.replace(random_config(rng, layers=count), tie_word_embeddings=tied or rng.random() < 0.5)
    ranges = stages_of(count, rng.randint(2, min(count, 3)))
    whole, *stages = (Stage(config, layers, library, dtype, threads, tied) for layers in (range(count), *ranges))
    assert [{"embedding", "head", "norm"} & stage.names for stage in stages] == [
        {"embedding"},
        *[set()] * (len(stages) - 2),
        {"head", "norm"},
    ]
    tables = torch.randperm(PAGES).int().view(2, -1)
    contexts = [0, 0]
    for queries in ([70, 9], [1, 30], [1, 1]):
        contexts = [context + query for context, query in zip(contexts, queries, strict=True)]
        batch = AttentionBatch.build(queries, contexts, tables, PAGE_SIZE)
        sampled, on_layer = some_tokens(rng, batch.num_tokens), rng.random() < 0.5
        ids = torch.randint(config.vocab_size, (batch.num_tokens,))
        wanted = whole.native(ids, batch.positions, batch, whole.kv, None, sampled)
        given, hidden = ids, None
        for stage in stages:
            layers: list[int] = []
            last = stage is stages[-1]
            hidden = stage.native(
                given,
                batch.positions,
                batch,
                stage.kv,
                layers.append if on_layer else None,
                sampled if last else None,
                hidden,
            )
            assert layers == list(range(len(stage.native.stage))) * on_layer
            given = None
        assert torch.equal(hidden, wanted)
        expected = whole.native.forward_head(ids, batch, whole.kv, None, sampled, logits=True)
        for logits in (True, False):
            output = stages[-1].native.head(hidden, logits)
            assert torch.equal(output.argmax, expected.argmax)
            assert (output.logits is not None) == logits
            assert output.logits is None or torch.equal(output.logits, expected.logits)
    for name, part in whole.kv.parts.items():
        assert torch.equal(torch.cat([stage.kv.parts[name] for stage in stages]), part)


def test_a_stage_refuses_what_it_does_not_have(library: ctypes.CDLL) -> None:
    config = random_config(random.Random(1), layers=3)
    first, last = (Stage(config, layers, library, torch.float32, 2, False) for layers in stages_of(3, 2))
    batch = AttentionBatch.build([2], [2], torch.zeros(1, 1, dtype=torch.int32), PAGE_SIZE)
    ids, hidden = torch.zeros(2, dtype=torch.int64), torch.zeros(2, config.hidden_size)

    def run(stage: Stage, ids: Tensor | None, hidden: Tensor | None, kv: KvCache | None = None) -> Tensor:
        return stage.native(ids, batch.positions, batch, kv or stage.kv, hidden=hidden)

    with pytest.raises(EngineError, match="token ids for a stage without an embedding"):
        run(last, ids, None)
    for given in (None, None), (ids, hidden):
        with pytest.raises(EngineError, match="either token ids or hidden states"):
            run(last, *given)
    across = torch.zeros(config.hidden_size, 2).t()
    for wrong in (hidden[:1], hidden[None], hidden.bfloat16(), across):
        with pytest.raises(EngineError, match="hidden states must be contiguous float32"):
            run(last, None, wrong)
    with pytest.raises(EngineError, match="the KV cache has 2 layers, the decoder has 1"):
        run(last, None, hidden, first.kv)
    with pytest.raises(EngineError, match="a stage without a head"):
        first.native.head(hidden, logits=False)
    with pytest.raises(EngineError, match="a stage without a head"):
        first.native.logits(hidden)
    assert run(last, None, hidden).data_ptr() == hidden.data_ptr()
