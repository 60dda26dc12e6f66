"""Forward passes of tensor-parallel ranks, each a process, against the same model in one rank."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import EngineError
from baton.kv.format import attention_parts
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.collective import Collective, exchange_floats
from baton.native.decoder import NativeDecoder
from baton.native.packed import PackedWeights, weights_of
from baton.process.load_progress import LoadProgress
from tests.kernels import LIBRARY, needs_native
from tests.ranks import RankProcesses, run_threads

pytestmark = needs_native

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """Sizes of a model, and what is special in its weights."""

    vocab: int
    heads: int
    kv_heads: int
    inner: int = 88
    extras: bool = False  # biases and QK norm
    tied: bool = False
    dtype: torch.dtype = torch.float32
    kind: str = "random"  # or "plain": hidden states are embeddings, all logits equal; or "nan": those of one token
    threads: int = 2

    def config(self) -> ModelConfig:
        config = ModelConfig.from_dict(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": self.vocab,
                "hidden_size": 50,
                "intermediate_size": self.inner,
                "num_hidden_layers": 3,
                "num_key_value_heads": self.kv_heads,
                "num_attention_heads": self.heads,
                "head_dim": 10,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
            }
        )
        return dataclasses.replace(config, **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), self.extras))

    def decoder(self, ranks: Collective | None) -> NativeDecoder:
        """A rank's share of the same random weights, from views of whole tensors, as files give them."""
        assert LIBRARY is not None
        config = self.config()
        parallel = TensorParallel(ranks.rank, ranks.size) if ranks else TensorParallel()
        decoder = Decoder(config, TensorOptions(self.dtype, CPU, repacked=True), parallel)
        if self.tied:
            decoder.head.tie(decoder.embedding)
        torch.manual_seed(0)
        for tensor in (*decoder.checkpoint_tensors(), *(() if self.tied else (decoder.head_tensor(),))):
            weight = torch.randn(tensor.shape) * (1 if len(tensor.shape) == 1 else tensor.shape[1] ** -0.5)
            if self.kind == "plain" and ("o_proj" in tensor.name or "down_proj" in tensor.name):
                weight.zero_()
            if self.kind == "plain" and "lm_head" in tensor.name:
                weight[:] = weight[0].clone()
            if self.kind == "nan" and "lm_head" in tensor.name:
                weight[-1] = float("nan")
            tensor.load(weight.to(self.dtype))
        weights = PackedWeights.private(weights_of(decoder, LIBRARY, LoadProgress()))
        return NativeDecoder(config, self.dtype, weights, LIBRARY, self.threads, ranks)


def passes(ranks: Collective | None, model: Model) -> dict[str, Tensor]:
    """Results of a long chunk, a mixed pass with its head, a pass without samples, and a step."""
    decoder, config = model.decoder(ranks), model.config()
    kv_heads = max(1, config.num_kv_heads // (ranks.size if ranks else 1))
    parts = attention_parts("float32", kv_heads, config.head_dim)
    # More rows than an exchange takes, and more keys than a split.
    contexts = [1030, 3, 40]
    kv = KvCache.allocate(parts, num_layers=config.num_layers, num_pages=3 * 110, page_size=16, device=CPU)
    for part in kv.parts.values():
        part.zero_()
    tables = torch.randperm(3 * 110, generator=torch.Generator().manual_seed(1)).int().view(3, 110)
    ids = torch.randint(config.vocab_size, (2000,), generator=torch.Generator().manual_seed(2))
    found: dict[str, Tensor] = {}

    def batch(queries: list[int]) -> AttentionBatch:
        return AttentionBatch.build(queries, contexts, tables, kv.page_size)

    # As a leader does, whose ranks compute all layers in one call.
    layers: list[int] = []
    on_layer = None if ranks and ranks.rank else layers.append
    found["hidden"] = decoder(ids, ids, batch(contexts), kv, on_layer=on_layer)
    found["logits"] = decoder.logits(found["hidden"][-3:])
    mixtures = {"rows": ([600, 5, 1], None), "mixed": ([1, 5, 1], [0, 4, 6]), "step": ([1, 1, 1], None)}
    for name, (queries, sampled) in mixtures.items():
        contexts = [context + query for context, query in zip(contexts, queries, strict=True)]
        output = decoder.forward_head(ids[7:], batch(queries), kv, on_layer, sampled, logits=name != "step")
        found[f"{name} argmax"] = output.argmax
        if output.logits is not None:
            found[f"{name} logits"] = output.logits
    contexts = [context + 1 for context in contexts]
    decoder(ids[3:], ids, batch([1, 1, 1]), kv, sampled=[])
    found |= {f"pages {name}": part for name, part in kv.parts.items()}
    return found


def passes_of(ranks: Collective, models: list[Model]) -> list[dict[str, Tensor]]:
    return [passes(ranks, model) for model in models]


MODELS = {
    2: [
        Model(vocab=150, heads=4, kv_heads=2),
        Model(vocab=101, heads=4, kv_heads=2, extras=True, tied=True, threads=1),
        # The MLP's last product takes its inputs in slices.
        Model(vocab=77, heads=6, kv_heads=2, inner=4200, extras=True, dtype=torch.bfloat16, threads=3),
        Model(vocab=90, heads=2, kv_heads=2, kind="plain"),
        Model(vocab=90, heads=2, kv_heads=2, kind="nan"),
    ],
    # The last rank has no row of the vocabulary, and the one before it a single one.
    4: [Model(vocab=5, heads=8, kv_heads=4, threads=1)],
}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankProcesses]:
    with RankProcesses(2, exchange_floats(50), __name__) as pair:
        yield pair


def test_passes_of_two_ranks_equal_those_of_one(pair: RankProcesses) -> None:
    _equal_one_rank(pair, 2)


def test_passes_of_four_ranks_equal_those_of_one() -> None:
    with RankProcesses(4, exchange_floats(50), __name__) as processes:
        _equal_one_rank(processes, 4)


def _equal_one_rank(processes: RankProcesses, size: int) -> None:
    models = MODELS[size]
    found = processes.run(passes_of, models)
    for index, model in enumerate(models):
        wanted = passes(None, model)
        for rank in range(size):
            _compare(found[rank][index], wanted, found[0][index], model, rank, size)


def _compare(
    found: dict[str, Tensor], wanted: dict[str, Tensor], first: dict[str, Tensor], model: Model, rank: int, size: int
) -> None:
    tolerance = 1e-5 if model.dtype == torch.float32 else 0.03
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        whole, label = wanted[name], f"{model}, rank {rank}: {name}"
        if name.startswith("pages"):
            heads = model.kv_heads // size
            whole = whole.narrow(-2, rank * heads, heads)
        else:
            assert torch.equal(tensor.nan_to_num(7), first[name].nan_to_num(7)), label
        if "argmax" in name and model.dtype == torch.float32:
            assert torch.equal(tensor, whole), label
        assert torch.equal(tensor.isnan(), whole.isnan()), label
        difference = (tensor - whole).nan_to_num().float().norm()
        assert "argmax" in name or difference <= tolerance * whole.nan_to_num().norm(), label
        if model.kind == "plain" and name == "hidden":
            assert torch.equal(tensor, whole), label
        if "argmax" in name and model.kind != "random":
            assert set(tensor.tolist()) == {0 if model.kind == "plain" else -1}, label


def late_layer(ranks: Collective) -> float:
    """Seconds between rank 0's last two layers of a pass without samples; the other rank begins its last one late."""
    model = Model(vocab=20, heads=2, kv_heads=2)
    decoder, config = model.decoder(ranks), model.config()
    parts = attention_parts("float32", 1, config.head_dim)
    kv = KvCache.allocate(parts, num_layers=config.num_layers, num_pages=1, page_size=16, device=CPU)
    batch = AttentionBatch.build([3], [3], torch.zeros(1, 1, dtype=torch.int32), 16)
    times: list[float] = []

    def on_layer(index: int) -> None:
        times.append(time.monotonic())
        if ranks.rank and index == 1:
            time.sleep(0.3)

    decoder(torch.arange(3), torch.arange(3), batch, kv, on_layer=on_layer, sampled=[])
    return times[2] - times[1]


def test_a_layer_ends_when_all_ranks_have_its_keys(pair: RankProcesses) -> None:
    """Also the last layer of a pass without samples, which computes nothing else."""
    assert pair.run(late_layer)[0] > 0.2


def aborted_pass(ranks: Collective) -> Any:
    """Rank 0 waits in a pass for a rank that aborts; after a reset both compute. Times, and the choices."""
    model = Model(vocab=20, heads=2, kv_heads=2, threads=3)
    decoder, config = model.decoder(ranks), model.config()
    parts = attention_parts("float32", 1, config.head_dim)
    kv = KvCache.allocate(parts, num_layers=config.num_layers, num_pages=1, page_size=16, device=CPU)
    batch = AttentionBatch.build([3], [3], torch.zeros(1, 1, dtype=torch.int32), 16)
    ranks.barrier()
    began = time.monotonic()
    if ranks.rank:
        time.sleep(0.2)
        ranks.abort()
        # The other one has seen it when it resets.
        while True:
            try:
                ranks.barrier()
                break
            except EngineError:
                time.sleep(0.01)
        waited = 0.0
    else:
        with pytest.raises(EngineError, match="native kernels: the ranks' collective was aborted"):
            decoder.forward_head(torch.arange(3), batch, kv, None, None, logits=True)
        waited = time.monotonic() - began
        ranks.reset()
        ranks.barrier()
    return waited, decoder.forward_head(torch.arange(3), batch, kv, None, None, logits=True).argmax.tolist()


def test_an_abort_ends_a_pass_and_the_next_one_is_right(pair: RankProcesses) -> None:
    (waited, first), (_, second) = pair.run(aborted_pass)
    assert 0.1 < waited < 1.2
    assert first == second


def test_ranks_that_exchange_too_little_are_refused() -> None:
    def refuse(ranks: Collective) -> None:
        with pytest.raises(EngineError, match="exchange 100 floats at once, the model needs 25600"):
            passes(ranks, Model(vocab=20, heads=2, kv_heads=2))

    run_threads(2, 100, refuse)
