"""The CPU-reachable part of the GPU bench: a tiny model through every measurement, and the message without a GPU."""

import pytest
import torch

from baton.bench.engine import EnginePlan
from baton.bench.probes import Probes
from baton.model.config import ModelConfig
from baton.planner.shape import ModelShape
from bench import gpu

PLAN = EnginePlan(prefill=(24,), batches=(1, 3), contexts=(20,), steps=3, rounds=1, chunk_size=16)
CPU = torch.device("cpu")


def test_every_figure_is_there_and_positive() -> None:
    shape = ModelShape.of(ModelConfig.from_dict(gpu.TINY))
    probes = Probes(shape, torch.bfloat16, CPU, buffer_bytes=1 << 12, square=32)
    saved: list[list[str]] = []
    results = gpu.Bench(gpu.TINY, CPU, PLAN, probes).measure(lambda found: saved.append([*found]))
    assert saved == [[*results][: 3 + count] for count in range(4)]
    assert [row["tokens"] for row in results["prefill"]] == [24]
    for name in ("decode", *gpu.VARIANTS):
        assert [row["batch"] for row in results[name]] == [1, 3]
        for row in (*results[name], *results["prefill"], results["overlap"]):
            # On a busy machine the steps may be over before the first copy is.
            assert all(value > 0 for key, value in row.items() if key != "gb_per_s_each_way"), row
    assert results["overlap"]["gb_per_s_each_way"] >= 0
    ours, peer = results["decode"][1], results["transformers"]
    # Its steps are the difference of two times, which on a busy machine may have any sign.
    assert (peer["batch"], peer["tokens_per_s"]) == (3, pytest.approx(3e3 / peer["step_ms"]))
    assert results["over_transformers"] == pytest.approx(ours["tokens_per_s"] / peer["tokens_per_s"])
