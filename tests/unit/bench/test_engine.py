"""`baton bench engine`: runs through the contract on a tiny checkpoint, the arithmetic of shares, the command."""

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from baton.bench import engine_report, probes
from baton.bench.engine import EnginePlan, EngineRuns, engine_for
from baton.bench.probes import Probes
from baton.cli.main import main
from baton.engine.config import EngineConfig
from baton.engine.contract import Engine
from baton.errors import ConfigError
from baton.model.config import ModelConfig
from baton.native.packed import PackedWeight
from baton.planner.roofline import decode_bytes, prefill_flops
from baton.planner.shape import ModelShape
from tests.checkpoints import make_checkpoint
from tests.kernels import LIBRARY, needs_native

SMALL = {"buffer_bytes": 1 << 20, "square": 64}
PLAN = EnginePlan((16, 40), (1, 4), (20,), steps=3, rounds=1, chunk_size=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    made = engine_for(PLAN, EngineConfig(str(checkpoint), device="cpu", threads=1))
    yield made
    made.close()


def test_runs_give_back_all_that_they_took(engine: Engine) -> None:
    runs = EngineRuns(engine, PLAN.chunk_size)
    for tokens in PLAN.prefill:
        assert runs.prefill(tokens) > 0
    for batch in PLAN.batches:
        assert runs.decode(batch, 20, PLAN.steps) > 0
    assert engine.stats().used == 0


def test_a_mixed_pass_steps_the_batch_beside_its_chunks_and_gives_back_their_pages(engine: Engine) -> None:
    runs = EngineRuns(engine)
    layers: list[int] = []
    with runs.batch(2, 8, 8):
        before = engine.stats().used
        assert runs.mixed([4, 2], 8) > 0
        assert runs.mixed([], 8) > 0
        assert runs.mixed([4], 8, step=False, on_layer=layers.append) > 0
        assert engine.stats().used == before
    assert layers == 3 * list(range(engine.spec.kv_format.layers))
    assert engine.stats().used == 0


def test_sequences_of_a_batch_have_pages_of_their_own(engine: Engine) -> None:
    with EngineRuns(engine).batch(4, 20, 3):
        assert engine.stats().used == 4 * engine.spec.pages_for(20 + 3 + 1)


def test_a_run_that_fails_gives_back_its_pages(engine: Engine) -> None:
    with pytest.raises(Exception, match="slot"):
        EngineRuns(engine).decode(5, 1, 1)
    assert engine.stats().used == 0


def test_the_pool_is_as_large_as_the_plan_needs() -> None:
    plan = EnginePlan((100,), (1, 4), (10, 20), steps=4)
    assert plan.longest == 100
    # 20 tokens, the steps and their warm-up make two pages of 16 each.
    assert plan.tokens(16) == max(4 * 32, 112)


@pytest.mark.parametrize(("field", "value"), [("prefill", (0,)), ("batches", (-1,)), ("steps", 0), ("rounds", 0)])
def test_plans_that_measure_nothing_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must be 1 or more"):
        EnginePlan(**{field: value})  # type: ignore[arg-type]


def test_more_than_the_model_takes_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="4096 tokens are asked for, the model has 1024"):
        engine_for(EnginePlan((4096,), (), ()), EngineConfig(str(checkpoint)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_measure_something(checkpoint: Path, dtype: torch.dtype) -> None:
    shape = ModelShape.of(ModelConfig.from_pretrained(checkpoint))
    probes = Probes(shape, dtype, torch.device("cpu"), **SMALL)
    assert probes.bandwidth() > 0
    assert probes.flops() > 0
    assert min(probes.step_rates(4)) > 0
    assert min(probes.step_rates(256)) > 0


def test_rates_are_those_of_a_model_of_a_similar_shape(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps take a second, as does a prompt; sizes are powers of two, and the buffer holds 4 layers."""
    shape = ModelShape.of(ModelConfig.from_pretrained(checkpoint))
    near = ModelShape(64, 128, 4, 2, 32, 2048, (None,) * 4)
    assert (shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads) == (64, 112, 4, 2)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(EngineRuns, "decode", lambda self, *run: asked.append(run) or 1.0)
    monkeypatch.setattr(EngineRuns, "prefill", lambda self, tokens: asked.append((tokens,)) or 1.0)
    monkeypatch.setattr(Probes, "_best", lambda self, run: run())
    sizes = {"buffer_bytes": 4 * 4 * near.layer_weights, "square": 64}
    probes = Probes(shape, torch.float32, torch.device("cpu"), **sizes)
    flops, bandwidth = probes.step_rates(2)
    assert flops == pytest.approx(2 * 2 * near.step_weights * 4)
    assert bandwidth == pytest.approx(4 * near.step_weights * 4)
    assert probes.step_rates(1) == pytest.approx((bandwidth / 2, bandwidth))
    assert asked == [(1, 1, 4), (2, 1, 4), (1, 1, 4)], "one row is measured once"
    # Prompts have two layers, and at most 2,048 tokens a pass.
    prompt = ModelShape(64, 128, 4, 2, 32, 2048, (None,) * 2)
    assert probes.step_rates(200)[0] == pytest.approx(prefill_flops(prompt, 200))
    assert probes.step_rates(9999)[0] == pytest.approx(prefill_flops(prompt, 2048))


@needs_native
def test_native_kernels_multiply_in_probes_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied, multiply = [], PackedWeight.multiply
    monkeypatch.setattr(
        PackedWeight, "multiply", lambda self, x, **given: (multiplied.append(len(x)), multiply(self, x, **given))
    )
    shape = ModelShape.of(ModelConfig.from_pretrained(checkpoint))
    probes = Probes(shape, torch.bfloat16, torch.device("cpu"), library=LIBRARY, **SMALL)
    assert probes.state()["flops_per_s"] > 0
    assert set(multiplied) == {256, 2048}


def test_this_machine_is_measured_once_beyond_the_rows_of_its_peak(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def step_rates(_: Probes, rows: int) -> tuple[float, float]:
        measured.append(rows)
        return 1e12, 1e10

    monkeypatch.setattr(probes, "Probes", partial(Probes, **SMALL))
    monkeypatch.setattr(Probes, "step_rates", step_rates)
    at = probes.this_machine(ModelShape.of(ModelConfig.from_pretrained(checkpoint)), torch.float32)
    assert at(8192) == at(32768) == at(2048)
    assert "passes of 2048 tokens" in at(8192).source
    assert at(8).source != at(2048).source
    assert measured == [2048, 8]


def test_shares_are_of_the_probes_around_each_run() -> None:
    clock = itertools.count(1.0)
    took, means = engine_report._interleaved(2, lambda: next(clock), lambda: (next(clock) ** 2, 7.0))
    assert (took, means) == ([2.0, 4.0], [((1 + 9) / 2, 7.0), ((9 + 25) / 2, 7.0)])


class Paced:
    """Runs that take a second a prompt and a second a step; probes that are always the same."""

    def prefill(self, tokens: int) -> float:
        return 1.0

    def decode(self, batch: int, context: int, steps: int) -> float:
        return float(steps)

    def bandwidth(self) -> float:
        return 1e6

    def flops(self) -> float:
        return 1e6

    def flops_256(self) -> float:
        return 4e6

    def step_rates(self, rows: int) -> tuple[float, float]:
        return 1e5 * rows, 2e6


def test_rates_are_by_token_and_step(engine: Engine) -> None:
    paced: Any = Paced()
    kv_format = engine.spec.kv_format
    shape = ModelShape(64, 112, 4, 2, 32, 264, (None, None, None))
    rates = engine_report.Rates(paced, paced, shape, PLAN, kv_format, lambda _: None)
    decode, prefill = rates._decode(4, 20), rates._prefill(40)
    assert (decode["step_ms"], decode["tokens_per_s"]) == (1000.0, 4.0)
    assert decode["bytes"] == decode_bytes(shape, 4, 24, 4 * shape.step_weights, kv_format.token_bytes)
    assert decode["mbu"] == decode["bytes"] / 1e6
    # Four rows make 4e5 operations a second, 256 make 4e6; the step takes a second.
    weights, kv = shape.step_weights, 24 * kv_format.token_bytes
    assert decode["predicted_ms"] == pytest.approx(1e3 * (4 * kv / 2e6 + 8 * weights / 4e5))
    assert decode["predicted_256_over_measured"] == pytest.approx(
        4 * kv / 2e6 + max(8 * weights / 4e6, 4 * weights / 2e6)
    )
    # A chunk has 16 rows.
    assert prefill["predicted_over_measured"] == pytest.approx(prefill_flops(shape, 40) / 1.6e6)
    assert (prefill["tokens_per_s"], prefill["mfu"]) == (40.0, prefill_flops(shape, 40) / 1e6)
    # Chunks of 16, 16 and 8 tokens read the layers three times, and 0, 16 and 32 tokens of KV.
    weights = 3 * shape.num_layers * shape.layer_weights + shape.lm_head_weights
    assert prefill["bytes"] == 4 * weights + (40 + 48) * kv_format.token_bytes


def test_the_command_reports_all_rows(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_report, "Probes", partial(Probes, **SMALL))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    sizes = ["--prefill=16,40", "--batch=1,4", "--context=20", "--steps=3", "--rounds=1", "--chunk-size=16"]
    files = [f"--json={tmp_path / 'report.json'}", f"--plot={tmp_path / 'picture.svg'}"]
    result = CliRunner().invoke(main, ["bench", "engine", str(checkpoint), *sizes, *files])
    assert result.exit_code == 0, result.output
    assert re.search(r"steps predicted within 15%: [0-2] of 2", result.output)
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["interrupted"]
    assert [row["tokens"] for row in report["prefill"]] == [16, 40]
    assert [(row["batch"], row["context"]) for row in report["decode"]] == [(1, 20), (4, 20)]
    assert report["machine"]["cores"] == os.cpu_count()
    assert "commit" in report
    assert 0 < report["startup"]["loaded_s"] < report["startup"]["first_token_s"]
    assert 0 < report["memory"]["steady_bytes"] <= report["memory"]["peak_bytes"]
    for row in report["prefill"]:
        assert row["mfu"] == pytest.approx(row["flops"] / row["seconds"] / row["peak_flops_per_s"])
    for row in report["decode"]:
        assert row["mbu"] == pytest.approx(1e3 * row["bytes"] / row["step_ms"] / row["peak_bytes_per_s"])
        # A round's prediction over its step, and the median of either, are of the one round.
        assert row["predicted_over_measured"] == pytest.approx(row["predicted_ms"] / row["step_ms"])
    picture = ElementTree.parse(tmp_path / "picture.svg").getroot()
    labels = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 x 20", "4 x 20"} <= set(labels)


def test_ctrl_c_keeps_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> Iterator[dict[str, Any]]:
        memory = {"steady_bytes": None, "peak_bytes": None}
        yield {"startup": {"first_token_s": 1.0}, "memory": memory, "prefill": [], "decode": []}
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine_report, "measure", measure)
    result = CliRunner().invoke(main, ["bench", "engine", "MODEL", f"--json={tmp_path / 'report.json'}"])
    assert result.exit_code == 130
    assert "start to first token: 1.0 s" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"]
