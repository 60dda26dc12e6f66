"""A small model, and sizes for an engine that runs it."""

import pytest
import torch

from baton.engine.contract import EngineSpec
from baton.engine.load import LoadedModel, load_model
from baton.kv.format import KvFormat, KvPart
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    # Its matrices are tiny.
    torch.set_num_threads(1)
    return load_model(make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2")), dtype=torch.float32)


@pytest.fixture
def spec(model: LoadedModel) -> EngineSpec:
    parts = tuple(KvPart(name, "float32", (model.config.num_kv_heads, model.config.head_dim)) for name in ("k", "v"))
    return EngineSpec(
        fingerprint="",
        kv_format=KvFormat(parts, model.config.num_layers, 16),
        vocab_size=model.config.vocab_size,
        max_model_len=256,
        eos_token_ids=frozenset(),
        page_size=16,
        pages=60,
        slots=6,
    )
