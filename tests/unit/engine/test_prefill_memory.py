"""Memory that a prefill takes beside weights and KV, counted at each operator of torch."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.bench.engine import EngineRuns
from baton.engine.config import EngineConfig
from baton.engine.factory import build
from tests.checkpoints import make_checkpoint


class Peak(TorchDispatchMode):
    """The most bytes of the storages that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and (key := id_of(each)) not in known and key not in self._alive:
                storage = each.untyped_storage()
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key)
        self.peak = max(self.peak, sum(self._alive.values()))
        return results


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("home", ["host", "device"])
def test_memory_grows_with_the_prompt_only_where_its_kv_is_gathered(home: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen3", tmp_path)
    peaks = []
    for tokens in (256, 1024):
        engine = build(
            EngineConfig(
                str(checkpoint),
                device="cpu",
                dtype="float32",
                kernels="torch",
                kv_memory=4 << 20,
                kv_home=home,
                segment_tokens=32,
            )
        )
        with Peak() as counted:
            EngineRuns(engine, 32).prefill(tokens)
        engine.close()
        peaks.append(counted.peak)
    assert (peaks[1] <= 1.02 * peaks[0]) == (home == "host"), peaks
