"""Rigs of the engine contract: the fake engine, and the engine over a tiny random checkpoint.

The latter with torch's operators, with native kernels, with two thirds of the pages on the device and the others in
host memory, and with two tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.engine.core import EngineCore
from baton.engine.fake import FakeEngine
from tests.contract.engines import Rig
from tests.kernels import KERNELS
from tests.rank_threads import RankThread

if TYPE_CHECKING:
    from baton.engine.load import LoadedModel

SIZES = {"page_size": 16, "pages": 64, "slots": 6, "max_model_len": 512}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with sliding and full layers, the head ids of a byte tokenizer, float32."""
    from tests.checkpoints import make_checkpoint

    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


def make_fake(**sizes: Any) -> EngineCore:
    """A fake engine of the contract's usual sizes."""
    return FakeEngine(**{**SIZES, **sizes})


def make_torch(
    checkpoint: Path,
    steps_ahead: int = 0,
    kernels: str = "torch",
    home: str = "device",
    device: str = "cpu",
    ranks: int = 1,
    **sizes: Any,
) -> EngineCore:
    """An engine over a model of the contract's usual sizes; one thread on CPU, as its matrices are tiny.

    `home`: "both" if a third of the pages is in host memory, "host" if all are; attention takes them in segments of
    some tokens.
    """
    import torch

    from baton.engine.config import EngineConfig
    from baton.engine.factory import assemble, build
    from baton.kv.format import DTYPE_BYTES
    from baton.model.config import ModelConfig

    chosen = {**SIZES, "kv_dtype": "float32", **sizes}
    model = ModelConfig.from_pretrained(checkpoint)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[chosen["kv_dtype"]]
    page_bytes, pages = token_bytes * chosen["page_size"], chosen.pop("pages")
    if home == "both" and (in_host := pages - max(1, pages * 2 // 3)):
        chosen |= {"host_memory": page_bytes * in_host}
        pages -= in_host
    chosen |= {"kv_home": "auto" if home == "both" else home, "segment_tokens": 24}
    if chosen["kv_dtype"] == "float16":
        kernels = "torch"  # There are no native ones for it.
    chosen["kv_memory"] = page_bytes * pages
    config = EngineConfig(str(checkpoint), device=device, threads=1, kernels=kernels, tensor_parallel=ranks, **chosen)
    if ranks > 1:
        return build(config, steps_ahead, start_rank=RankThread)
    torch.set_num_threads(1)
    return assemble(loaded(checkpoint, device, kernels, config.dtype, config.kv_dtype), config, steps_ahead)


@cache
def loaded(checkpoint: Path, device: str, kernels: str, dtype: str, kv_dtype: str) -> LoadedModel:
    """A model for all engines of a process, because engines leave it as it is."""
    from baton.engine.config import EngineConfig
    from baton.engine.factory import load
    from baton.process.load_progress import LoadProgress

    config = EngineConfig(str(checkpoint), device=device, threads=1, kernels=kernels, dtype=dtype, kv_dtype=kv_dtype)
    return load(config, LoadProgress())


@pytest.fixture(params=["fake", *KERNELS, "hosted", pytest.param("ranks", marks=pytest.mark.long)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Each engine in turn; afterwards all that it made audit clean, and hold nothing once closed."""
    if request.param == "fake":
        made = Rig("fake", make_fake, vocab=1000, exact=True)
    else:
        path: Path = request.getfixturevalue("checkpoint")
        kernels = request.param if request.param in KERNELS else "torch"
        home = "both" if request.param == "hosted" else "device"
        make = partial(make_torch, path, kernels=kernels, home=home, ranks=2 if request.param == "ranks" else 1)
        made = Rig(request.param, make, vocab=256, exact=False)
    yield made
    made.close()


@pytest.fixture
def engine(rig: Rig) -> EngineCore:
    """An engine of the usual sizes."""
    return rig.engine()
