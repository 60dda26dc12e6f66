"""`baton plan roofline` and `baton plan parallel`: figures by name, pictures, and refusals of bad values."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from baton.bench import probes
from baton.cli.main import main
from baton.planner.hardware import HARDWARE, Hardware


def figures(command: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Values of the figures by group and name."""
    done = CliRunner().invoke(main, ["plan", command, *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {group: {each["name"]: each["value"] for each in own} for group, own in json.loads(done.output).items()}


CRITICAL = "batch from which a step computes longer than it reads weights"


def test_critical_batches_by_bits() -> None:
    found = figures("roofline", "llama-3.1-8b", "--hardware=h200")[CRITICAL]
    assert found["bf16"] == pytest.approx(206.1, abs=0.05)
    assert found["int8 weights, bf16 arithmetic"] == pytest.approx(103.1, abs=0.05)
    assert found["int8"] == pytest.approx(206.1, abs=0.05)
    assert "int4" not in found, "an H200 has no such instructions"
    assert "int4" in figures("roofline", "llama-3.1-8b", "--hardware=b200")[CRITICAL]
    moe = figures("roofline", "practice-moe", "--hardware=v5e", "--context=100")[CRITICAL]
    assert moe["bf16"] == pytest.approx(1922, abs=0.5)


def test_steps_and_prefills() -> None:
    found = figures("roofline", "llama-3.1-8b", "--hardware=h100", "--batch=1,64", "--context=1024,4096")
    at = found["decode at a context of 4,096"]
    weights, kv = 2 * 7_504_658_432, 131_072
    assert at["batch 1: step, limited by weights"] == pytest.approx(1e3 * (weights + 4096 * kv) / 3.35e12)
    step = (weights + 64 * 4096 * kv) / 3.35e12
    assert at["batch 64: throughput"] == pytest.approx(64 / step)
    assert [*found["prefill in one chunk"]] == ["prompt of 1,024", "prompt of 4,096"]
    assert found["attention"]["chunk that hides copies of KV from the host"] == 4_498
    shared = figures("roofline", "llama-3.1-8b", "--hardware=h100", "--batch=1", "--tensor-parallel=2")
    assert shared["decode at a context of 8,192"]["batch 1: throughput"] == pytest.approx(
        2 * 3.35e12 / (weights + 8192 * kv)
    )


@pytest.mark.parametrize(("bits", "tokens"), [(16, 4_498), (12, 3_373), (8, 2_249), (4, 1_125)])
def test_copies_of_kv_of_fewer_bits_hide_behind_shorter_chunks(bits: int, tokens: int) -> None:
    """ceil(989.4e12 / 55e9 * bits / 8 / (2 * 4))."""
    found = figures("roofline", "llama-3.1-8b", "--hardware=h100", f"--kv-bits={bits}")
    assert found["attention"]["chunk that hides copies of KV from the host"] == tokens


def test_a_batch_that_the_memory_does_not_hold_is_marked() -> None:
    at = figures("roofline", "llama-3.1-8b", "--hardware=4090", "--batch=1,16")["decode at a context of 8,192"]
    assert [name for name in at if "more than fits" in name] == [
        "batch 16, more than fits the memory: step, limited by KV",
        "batch 16, more than fits the memory: throughput",
    ]
    # Two devices have 28 GiB for KV beside the weights, and 10 sequences of 2.5 GiB.
    shared = figures("roofline", "llama-3-70b", "--hardware=h100", "--batch=10,12", "--tensor-parallel=2")
    at = shared["decode at a context of 8,192"]
    assert {name.split(":")[0] for name in at} == {"batch 10", "batch 12, more than fits the memory"}


def test_changes_move_what_limits_a_step() -> None:
    groups = figures("roofline", "llama-3.1-8b", "--hardware=h100", "--batch=1", "--context=128")
    (changes,) = (group for name, group in groups.items() if "if ..., then" in name)
    milliseconds = {name: float(value.split(" ms")[0]) for name, value in changes.items()}
    plain = milliseconds["as it is"]
    assert milliseconds["weights had 8 bits"] == pytest.approx(plain / 2, rel=0.01)
    assert milliseconds["weights had 4 bits"] == pytest.approx(plain / 4, rel=0.02)
    assert milliseconds["2 devices shared each layer"] < plain
    assert milliseconds["a step checked 4 free drafts, each right with 80%"] == plain
    assert milliseconds["KV had 8 bits"] < plain < milliseconds["each query head had its own K and V"]


def test_the_front_has_only_choices_that_fit(tmp_path: Path) -> None:
    plot = tmp_path / "front.svg"
    groups = figures("roofline", "llama-3-70b", "--hardware=h100", f"--plot={plot}")
    (front,) = (group for name, group in groups.items() if name.startswith("Pareto"))
    # One device does not hold the model.
    assert not any(name.startswith("tensor parallel 1,") for name in front)
    points = len([*ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}circle")])
    assert points > len(front)


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    plot = tmp_path / "front.svg"
    done = CliRunner().invoke(main, ["plan", "roofline", "llama-3-70b", "--hardware=4090", f"--plot={plot}"])
    assert done.exit_code == 1
    assert "there is nothing to draw: no batch fits the memory" in done.output
    assert not plot.exists()


def test_every_figure_is_explained() -> None:
    for arguments in (["roofline", "llama-3.1-8b"], ["parallel", "llama-3.1-8b", "--tensor-parallel=2"]):
        done = CliRunner().invoke(main, ["plan", *arguments, "--hardware=h100", "--json"])
        for group in json.loads(done.output).values():
            for figure in group:
                assert figure["formula"] or figure["source"], figure


def test_this_machine_is_measured_once_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def this_machine(*_: object) -> Any:
        def at(rows: int) -> Hardware:
            asked.append(rows)
            return Hardware("this", (rows * 1e9, None, None), 1e10, 1 << 40, 0.0, 0.0, 0, 1, "measured")

        return at

    monkeypatch.setattr(probes, "this_machine", this_machine)
    sizes = ("--batch=1,8", "--context=64")
    found = figures("roofline", "llama-3.1-8b", "--hardware=this", *sizes)
    assert set(asked) == {1, 8, 64}, "rows of the steps and of the prompt"
    at, weights = found["decode at a context of 64"], 7_504_658_432
    assert at["batch 8: step, limited by compute"] == pytest.approx(
        1e3 * (8 * 64 * 131_072 / 1e10 + 16 * weights / 8e9)
    )


def test_pairs_and_all_reduces() -> None:
    found = figures("parallel", "llama-3-70b", "--hardware=h100", "--tensor-parallel=4", "--batch=16")
    pairs = found["pairs of matrices on each device"]
    assert pairs["q, k, v, by columns"] == "8,192 x 2,560"
    assert pairs["down, by rows"] == "7,168 x 8,192"
    assert pairs["KV of a token"] == 81_920
    layer = found["a layer"]
    assert layer["array of an all-reduce"] == 16 * 8192 * 2
    assert layer["sent by each device"] == 2 * 2 * 16 * 8192 * 2 * 3 // 4
    assert (layer["time"], layer["bound by latency"]) == (pytest.approx(4), "yes")
    assert found["a step"]["communication"] == pytest.approx(80 * 4e-3)
    assert "share of the time in which a stage works" not in found


def test_stages_and_advice() -> None:
    found = figures("parallel", "llama-3-70b", "--hardware=4090", "--pipeline-parallel=8", "--batch=1")
    assert found["share of the time in which a stage works"]["8 micro-batches"] == 8 / 15
    assert found["a step"]["sent between two stages"] == 16384
    assert found["advice"]["batch 1 at a context of 8,192"].startswith("pipeline parallel 7 across slow links")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["roofline", "llama-3-8b", "--hardware=h300"], "Invalid value for '--hardware': unknown 'h300'; known: v5e"),
        (["roofline", "llama-3-8b", "--hardware=h100", "--batch=0"], "'--batch': must be integers of at least 1"),
        (["roofline", "llama-3-8b", "--hardware=h100", "--batch="], "--batch and --context need a number"),
        (["roofline", "llama-3-8b", "--hardware=h100", "--tensor-parallel=3"], "'--tensor-parallel': 3 ranks do not"),
        (["parallel", "llama-3-8b", "--hardware=this"], "'--hardware': unknown 'this'; known: v5e"),
        (["parallel", "llama-3-8b", "--hardware=h100", "--tensor-parallel=3"], "'--tensor-parallel': 3 ranks do not"),
        (["parallel", "llama-3-8b", "--hardware=h100", "--pipeline-parallel=33"], "'--pipeline-parallel': 33 stages"),
        (["parallel", "no-model", "--hardware=h100"], "'MODEL': 'no-model' is no folder"),
    ],
)
def test_bad_values_name_the_option(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["plan", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_each_hardware_works() -> None:
    for name in HARDWARE:
        assert figures("roofline", "qwen3-0.6b", f"--hardware={name}")
        assert figures("parallel", "qwen3-0.6b", f"--hardware={name}", "--tensor-parallel=2")
