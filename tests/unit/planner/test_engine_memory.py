"""The planner's sizes, beside those that an engine on a CPU allocates."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.bench.engine import EngineRuns
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.factory import build
from baton.engine.load import LoadedModel
from baton.model.attention import KvCache
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.layers import TensorParallel
from baton.model.linear import TensorOptions
from baton.native.decoder import NativeDecoder
from baton.native.library import isa
from baton.planner.memory import PoolSize, kv_token_bytes, native_workspace, torch_workspace, weights
from baton.planner.shape import ModelShape
from tests.checkpoints import make_checkpoint
from tests.kernels import KERNELS, LIBRARY
from tests.unit.engine.test_prefill_memory import Peak

MODELS: dict[str, dict[str, Any]] = {
    # Sizes that are not whole panels; biases everywhere, none, or of Q, K and V; norms of Q and K.
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tied": True},
    "qwen3": {"hidden_size": 72, "intermediate_size": 200},
}
TOKENS = 100


@dataclass
class Allocated:
    """Memory that was allocated while an engine was built."""

    models: list[LoadedModel] = field(default_factory=list)
    pools: list[KvCache] = field(default_factory=list)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Allocated:
    seen, new = Allocated(), LoadedModel.new_kv_cache

    def watched(model: LoadedModel, *arguments: Any) -> KvCache:
        seen.models.append(model)
        seen.pools.append(new(model, *arguments))
        return seen.pools[-1]

    monkeypatch.setattr(LoadedModel, "new_kv_cache", watched)
    return seen


def engine_of(family: str, folder: Path, dtype: str, kernels: str, **sizes: Any) -> tuple[EngineCore, ModelShape]:
    made = make_checkpoint(family, folder, **{**MODELS[family], **sizes})
    config = EngineConfig(str(made), device="cpu", dtype=dtype, kernels=kernels, kv_memory=3_000_001, threads=1)
    return build(config), ModelShape.of(ModelConfig.from_pretrained(made))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_weights_and_pool_are_those_of_the_engine_to_the_byte(
    family: str, dtype: str, kernels: str, tmp_path: Path, allocated: Allocated
) -> None:
    engine, shape = engine_of(family, tmp_path, dtype, kernels)
    bits = 32 if dtype == "float32" else 16
    (model,), (pool,) = allocated.models, allocated.pools
    planned = weights(shape, bits, packed=kernels == "native")
    assert planned.total == model.decoder.weight_bytes
    if isinstance(model.decoder, Decoder):
        own = {each.data_ptr(): each.untyped_storage().nbytes() for each in model.decoder.parameters()}
        assert planned.total == sum(own.values()) + model.decoder.rotary.frequencies.nbytes
    room = PoolSize.within(3_000_001, engine.spec.page_size, kv_token_bytes(shape, bits))
    assert room.pages == engine.spec.pages
    assert room.bytes == sum(part.untyped_storage().nbytes() for part in pool.parts.values())
    engine.close()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_rank_of_a_70b_has_the_bytes_of_the_decoder(architecture: str) -> None:
    """Four tensor-parallel ranks, on the meta device, which allocates nothing."""
    raw = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    others = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192}
    config = ModelConfig.from_dict({"architectures": [architecture], **raw, **others})
    options = TensorOptions(torch.bfloat16, torch.device("meta"))
    planned = weights(ModelShape.of(config), 16, tp=4).total
    assert planned == Decoder(config, options, TensorParallel(0, 4)).weight_bytes


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_the_workspace_is_that_of_a_pass(
    family: str, dtype: str, kernels: str, tmp_path: Path, allocated: Allocated
) -> None:
    """Within 5%. Tensors of torch are counted at each operator. A short prompt has few, beside a thread's scratch."""
    tokens = 600 if kernels == "native" else TOKENS
    engine, shape = engine_of(family, tmp_path, dtype, kernels, hidden_size=192)
    bits = 32 if dtype == "float32" else 16
    with Peak() as counted:
        EngineRuns(engine, tokens).prefill(tokens)
    decoder = allocated.models[0].decoder
    if isinstance(decoder, NativeDecoder):
        assert LIBRARY is not None
        planned = native_workspace(
            shape, [(tokens, tokens)], threads=torch.get_num_threads(), bits=bits, isa=isa(LIBRARY)
        )
        allocates = decoder.workspace_bytes + tokens * shape.hidden_size * 4
    else:
        planned, allocates = torch_workspace(shape, tokens, bits // 8), counted.peak
    assert planned.total == pytest.approx(allocates, rel=0.05)
    engine.close()


@pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")
def test_the_workspace_of_long_contexts_has_a_result_for_each_split(tmp_path: Path, allocated: Allocated) -> None:
    """A sampled token attends to each 1,024 tokens apart."""
    engine, shape = engine_of("qwen3", tmp_path, "bfloat16", "native", max_position_embeddings=4096)
    EngineRuns(engine, 2100).prefill(2100)
    decoder = allocated.models[0].decoder
    assert isinstance(decoder, NativeDecoder)
    assert LIBRARY is not None
    planned = native_workspace(shape, [(2100, 2100)], threads=torch.get_num_threads(), bits=16, isa=isa(LIBRARY))
    assert planned.total == pytest.approx(decoder.workspace_bytes + 2100 * shape.hidden_size * 4, rel=0.05)
    engine.close()
