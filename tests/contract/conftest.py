"""Rigs of the engine contract: the fake engine, and the engine over a tiny random checkpoint, with torch's operators
and with native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.fake import FakeEngine
from tests.contract.engines import Rig
from tests.kernels import KERNELS

SIZES = {"page_size": 16, "pages": 64, "slots": 6, "host_kv_memory": 1 << 22, "max_model_len": 512}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with sliding and full layers, the head ids of a byte tokenizer, float32."""
    from tests.checkpoints import make_checkpoint

    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


def make_fake(**sizes: Any) -> EngineCore:
    """A fake engine of the contract's usual sizes."""
    return FakeEngine(**{**SIZES, **sizes})


def make_torch(checkpoint: Path, steps_ahead: int = 0, kernels: str = "torch", **sizes: Any) -> EngineCore:
    """An engine over a model on CPU of the contract's usual sizes; one thread, as its matrices are tiny."""
    from baton.engine.config import EngineConfig
    from baton.engine.factory import build
    from baton.kv.format import DTYPE_BYTES
    from baton.model.config import ModelConfig

    chosen = {**SIZES, "kv_dtype": "float32", **sizes}
    model = ModelConfig.from_pretrained(checkpoint)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[chosen["kv_dtype"]]
    kv_memory = token_bytes * chosen["page_size"] * chosen.pop("pages")
    if chosen["kv_dtype"] == "float16":
        kernels = "torch"  # There are no native ones for it.
    config = EngineConfig(str(checkpoint), device="cpu", threads=1, kernels=kernels, kv_memory=kv_memory, **chosen)
    return build(config, steps_ahead)


@pytest.fixture(params=["fake", *KERNELS])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Each engine in turn; afterwards all that it made audit clean, and hold nothing once closed."""
    if request.param == "fake":
        made = Rig("fake", make_fake, vocab=1000, exact=True)
    else:
        path: Path = request.getfixturevalue("checkpoint")
        kernels = request.param
        made = Rig(kernels, lambda **sizes: make_torch(path, kernels=kernels, **sizes), vocab=256, exact=False)
    yield made
    for engine in made.made:
        engine.audit()
        engine.close()
        assert engine.audit() == {}
        assert engine.stats().free == engine.stats().total
