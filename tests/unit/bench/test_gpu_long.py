"""The CPU-reachable part of the bench of long prompts on a GPU: a tiny model through every part of it."""

from typing import Any

import pytest
import torch

from baton.model.config import ModelConfig
from baton.planner.roofline import prefill_flops
from baton.planner.shape import ModelShape
from bench import gpu, gpu_long

TOKEN_BYTES = 2 * 64 * 2
"""Of K and V in one layer."""


def measure(*flags: str) -> dict[str, Any]:
    """All rows of a run on a CPU."""
    chosen = gpu_long.options().parse_args(["--layers", "3", "--chunk", "128", "--homes-length", "300", *flags])
    rows: dict[str, Any] = {}
    bench = gpu_long.LongBench(gpu.TINY, torch.device("cpu"), chosen)
    bench.run(gpu_long.PARTS, lambda row, part: rows.update({part: row}))
    return rows


def test_every_part_has_its_rows() -> None:
    rows = measure("--lengths", "300", "200", "--turns", "2")
    assert [*rows] == ["rates", "homes-3", "lengths-3-200", "lengths-3-300"]
    assert all(rate > 0 for rate in rows["rates"]["rates"].values())
    homes = rows["homes-3"]
    assert [len(homes[home]) for home in gpu_long.HOMES] == [2, 2]
    assert len(homes["host / device"]["rounds"]) == 2
    row = rows["lengths-3-300"]
    assert [chunk[:2] for chunk in row["chunks"]] == [[0, 128], [128, 128], [256, 44]]
    assert (row["complete"], row["done"], row["hidden"]) == (True, 300, 1.0)
    # Two layers read what is before each chunk, the last one what is before the last chunk.
    assert row["copied_gib"] * gpu_long.GIB == (2 * (128 + 256) + 256) * TOKEN_BYTES
    assert min(row[name] for name in ("seconds", "tokens_per_s", "mfu", "predicted_s", "pool_gib")) > 0


def test_a_prompt_ends_with_the_minutes_and_none_is_begun_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*measure("--lengths", "300", "--minutes", "0")] == ["rates", "homes-3"]
    monkeypatch.setattr(gpu_long.DeviceRates, "predict", lambda *_: -1e9)
    row = measure("--lengths", "300", "--minutes", "0")["lengths-3-300"]
    assert (row["complete"], row["done"]) == (False, 128)


def test_a_prediction_has_products_and_attention_at_rates_of_their_own() -> None:
    shape = ModelShape.of(ModelConfig.from_dict(gpu.LLAMA_8B | {"num_hidden_layers": 8}))
    rates = gpu_long.DeviceRates(product=1e15, link=1.0, attention=1e14, merge_s=0.0)
    seconds = rates.predict(shape, 1 << 20)
    # Seven layers, each `4 * 32 * 128 * n^2 / 2`; the products are seven layers of 218 million weights.
    assert seconds == pytest.approx(7 * 2 * 4096 * 2**40 / 1e14 + 7 * 2 * 218e6 * 2**20 / 1e15, rel=5e-3)
    assert gpu_long.DeviceRates(1e15, 1.0, 1e15, 0.0).predict(shape, 999) == pytest.approx(
        prefill_flops(shape, 999) / 1e15
    )
