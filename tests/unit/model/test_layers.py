"""Layers by themselves: shards of every linear, and a whole model over tensor-parallel ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from baton.engine.load import load_model
from baton.errors import ModelError
from baton.kv.format import KvFormat, attention_parts
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder, DecoderLayer, GatedMlp, GroupedAttention
from baton.model.layers import MergedColumnParallelLinear, RMSNorm, RowParallelLinear, TensorParallel, unsplittable
from baton.model.linear import DenseStorage, TensorOptions, WeightTensor
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.unit.model.runner import chunked_logits


class Threads:
    """Collectives between threads: each contributes a tensor, all get the combination."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def rank(self, rank: int) -> TensorParallel:
        size = len(self._given)
        return TensorParallel(rank, size, self._combine(rank, sum), self._combine(rank, lambda t: torch.cat(t, -1)))

    def _combine(self, rank: int, how: Callable[[list[Tensor]], Tensor]) -> Callable[[Tensor], Tensor]:
        def collective(x: Tensor) -> Tensor:
            self._given[rank] = x
            self._barrier.wait()
            result = how(list(self._given))
            self._barrier.wait()
            return result

        return collective


@pytest.mark.parametrize(
    ("family", "tied", "overrides"),
    [
        ("llama", True, {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", False, {"vocab_size": 267, "num_key_value_heads": 2}),
        ("qwen3", True, {"vocab_size": 267, "num_key_value_heads": 4}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_rank(family: str, tied: bool, overrides: dict[str, object], size: int, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, tied=tied, **overrides)
    ids, threads = prompt_ids(40), Threads(size)
    alone = chunked_logits(load_model(path, dtype=torch.float32), ids, 16, 16)

    def run(rank: int) -> Tensor:
        model = load_model(path, dtype=torch.float32, parallel=threads.rank(rank))
        assert model.new_kv_cache(1, 16).kv_heads == max(1, model.config.num_kv_heads // size)
        return chunked_logits(model, ids, 16, 16)

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(run, range(size)):
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def shard_of_70b(rank: int, size: int) -> Decoder:
    """The layers of a rank, without memory."""
    options = TensorOptions(torch.bfloat16, torch.device("meta"))
    return Decoder(ModelConfig.from_dict(LLAMA_70B), options, TensorParallel(rank, size))


def test_shapes_of_a_rank_of_llama_70b() -> None:
    """Each rank of 4 holds 35.276 GB: a quarter of each matrix, and whole norms (Shoeybi et al. 2019, §3)."""
    decoder = shard_of_70b(3, 4)
    layer = cast(DecoderLayer, decoder.layers[79])
    attention, mlp = cast(GroupedAttention, layer.attention), cast(GatedMlp, layer.mlp)
    qkv, o = attention.qkv.storage.weight.numel(), attention.o.storage.weight.numel()
    inner = sum(linear.storage.weight.numel() for linear in (mlp.gate, mlp.up, mlp.down))
    assert (qkv, o, qkv + o, inner, qkv + o + inner) == (20_971_520, 16_777_216, 37_748_736, 176_160_768, 213_909_504)
    embedding, head = decoder.embedding.weight.numel(), decoder.head.storage.weight.numel()
    matrices = 80 * (qkv + o + inner) + embedding + head
    assert (80 * (qkv + o + inner), embedding, head) == (17_112_760_320, 262_668_288, 262_668_288)
    assert matrices == 17_638_096_896
    assert 2 * matrices == 35_276_193_792
    norms = sum(each.weight.numel() for each in decoder.modules() if isinstance(each, RMSNorm))
    assert matrices + norms == 17_639_415_808 == sum(weight.numel() for weight in decoder.parameters())


def test_heads_of_ranks_of_llama_70b() -> None:
    """Keys and values of a token are 81,920 B on a rank of 4, of 327,680; beyond 8 ranks, heads are on several."""
    config, found = ModelConfig.from_dict(LLAMA_70B), []
    for size in (1, 2, 4, 8, 16):
        ranks = [TensorParallel(rank, size).kv_heads(config.num_kv_heads) for rank in range(size)]
        heads, copies = config.num_heads // size, sum(0 in each for each in ranks)
        assert sorted({head for each in ranks for head in each}) == list(range(8))
        found.append((heads, len(ranks[0]), copies))
    assert found == [(64, 8, 1), (32, 4, 1), (16, 2, 1), (8, 1, 1), (4, 1, 2)]
    parts = attention_parts("bfloat16", len(TensorParallel(1, 4).kv_heads(8)), config.head_dim)
    assert sum(part.token_bytes for part in parts) == 1024
    assert KvFormat(parts, 80, 16).token_bytes == 81_920 == 327_680 // 4


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (3, "num_attention_heads 64 is not divisible by 3 ranks"),
        (64, ""),
        (128, "num_attention_heads 64 is not divisible by 128 ranks"),
        (16, ""),
    ],
)
def test_degrees_that_do_not_divide_are_named(size: int, problem: str) -> None:
    assert unsplittable(ModelConfig.from_dict(LLAMA_70B), size) == problem


def test_kv_heads_that_ranks_can_not_share_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_key_value_heads=2, num_attention_heads=6, hidden_size=96)
    with pytest.raises(ModelError, match="3 tensor-parallel ranks can't share num_key_value_heads 2 evenly"):
        load_model(path, dtype=torch.float32, parallel=TensorParallel(0, 3))


def test_one_rank_adds_the_bias() -> None:
    options = TensorOptions(torch.float32, torch.device("cpu"))
    ranks = [RowParallelLinear(6, 3, True, options, TensorParallel(rank, 2)) for rank in range(2)]
    weight, bias, x = torch.randn(3, 6), torch.randn(3), torch.randn(2, 6)
    for linear in ranks:
        assert linear.parts() == {"weight": (3, 6), "bias": (3,)}
        linear.load_shard("weight", weight)
        linear.load_shard("bias", bias)
    torch.testing.assert_close(ranks[0](x[:, :3]) + ranks[1](x[:, 3:]), x @ weight.T + bias)


class ScaledStorage(DenseStorage):
    """A weight with a scale for each row and each pair of columns."""

    def __init__(self, rows: int, columns: int, bias: bool, options: TensorOptions) -> None:
        super().__init__(rows, columns, bias, options)
        self.scale = options.empty(rows, columns // 2)

    @staticmethod
    def tensors(rows: int, columns: int, bias: bool) -> tuple[WeightTensor, ...]:
        scale = WeightTensor("weight_scale", (rows, columns // 2), row_dim=0, column_dim=1)
        return (*DenseStorage.tensors(rows, columns, bias), scale)

    def load(self, name: str, row: int, tensor: Tensor) -> None:
        if name == "weight_scale":
            self.scale[row : row + len(tensor)].copy_(tensor)
        else:
            super().load(name, row, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale.repeat_interleave(2, 1), self.bias)


def test_a_weight_of_several_tensors_is_split_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.model.layers.DenseStorage", ScaledStorage)
    options, outputs = TensorOptions(torch.float32, torch.device("cpu")), {"q": 4, "k": 2}
    merged = [MergedColumnParallelLinear(8, outputs, True, options, TensorParallel(rank, 2)) for rank in range(2)]
    row = [RowParallelLinear(8, 3, True, options, TensorParallel(rank, 2)) for rank in range(2)]
    given = {name: torch.randn(shape) for name, shape in {**merged[0].parts(), **row[0].parts()}.items()}
    assert {name: tuple(given[name].shape) for name in ("q.weight", "k.weight_scale", "weight_scale", "bias")} == {
        "q.weight": (4, 8),
        "k.weight_scale": (2, 4),
        "weight_scale": (3, 4),
        "bias": (3,),
    }
    for linear in (*merged, *row):
        for name in linear.parts():  # type: ignore[operator]
            linear.load_shard(name, given[name])  # type: ignore[operator]

    def product(name: str, x: Tensor) -> Tensor:
        return (
            x @ (given[f"{name}weight"] * given[f"{name}weight_scale"].repeat_interleave(2, 1)).T + given[f"{name}bias"]
        )

    x = torch.randn(5, 8)
    q, k = zip(*(linear(x).split([2, 1], dim=1) for linear in merged), strict=True)
    torch.testing.assert_close(torch.cat(q, 1), product("q.", x))
    torch.testing.assert_close(torch.cat(k, 1), product("k.", x))
    torch.testing.assert_close(row[0](x[:, :4]) + row[1](x[:, 4:]), product("", x))


@pytest.mark.parametrize("size", [64, 896, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 3e4])
def test_norm_equals_its_formula(size: int, dtype: torch.dtype, tolerance: float, scale: float) -> None:
    eps, draw = 1e-6, torch.Generator().manual_seed(size)
    weight = torch.rand(size, generator=draw) + 0.5
    norm = RMSNorm(size, eps, TensorOptions(dtype, torch.device("cpu")))
    norm.load_shard("weight", weight)
    x = (torch.rand(5, size, generator=draw) * 2 - 1).mul_(scale).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 1e-2)
