"""`baton plan roofline` and `baton plan parallel`: figures by name, pictures, and refusals of bad values."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from baton.bench import probes
from baton.cli.main import main
from baton.engine import process
from baton.planner.hardware import HARDWARE, Hardware


def figures(command: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Values of the figures by group and name."""
    done = CliRunner().invoke(main, ["plan", command, *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {group: {each["name"]: each["value"] for each in own} for group, own in json.loads(done.output).items()}


CRITICAL = "batch from which weights take longer to compute with than to read"


def test_critical_batches_by_bits() -> None:
    found = figures("roofline", "llama-3.1-8b", "--hardware=h200")[CRITICAL]
    assert found["bf16"] == pytest.approx(206.1, abs=0.05)
    assert found["int8 weights, bf16 arithmetic"] == pytest.approx(103.1, abs=0.05)
    assert found["int8"] == pytest.approx(206.1, abs=0.05)
    assert "int4" not in found, "an H200 has no such instructions"
    assert "int4" in figures("roofline", "llama-3.1-8b", "--hardware=b200")[CRITICAL]
    moe = figures("roofline", "practice-moe", "--hardware=v5e", "--context=100")[CRITICAL]
    assert moe["bf16, MLPs"] == pytest.approx(1922, abs=0.5)
    # 211.66e9 weights over the 31.27e9 of a token, times 240.24.
    assert moe["bf16, whole step"] == pytest.approx(1626, abs=0.5)


def test_steps_and_prefills() -> None:
    found = figures("roofline", "llama-3.1-8b", "--hardware=h100", "--batch=1,64", "--context=1024,4096")
    at = found["decode at a context of 4,096"]
    weights, kv = 2 * 7_504_658_432, 131_072
    assert at["batch 1: limited by"] == "weights"
    assert at["batch 1: step"] == pytest.approx(1e3 * (weights + 4096 * kv) / 3.35e12)
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
    assert (at["batch 1: fits the memory"], at["batch 16: fits the memory"]) == ("yes", "no")
    # Two devices have 28 GiB for KV beside the weights, and 10 sequences of 2.5 GiB.
    shared = figures("roofline", "llama-3-70b", "--hardware=h100", "--batch=10,12", "--tensor-parallel=2")
    at = shared["decode at a context of 8,192"]
    assert (at["batch 10: fits the memory"], at["batch 12: fits the memory"]) == ("yes", "no")


def test_changes_are_those_of_a_batch_that_fits_and_marked_if_they_do_not() -> None:
    groups = figures("roofline", "llama-3.1-8b", "--hardware=h200", "--context=8192")
    (heading,) = (name for name in groups if name.startswith("effect"))
    assert "at batch 32," in heading, "128 do not fit"
    assert not groups[heading]["as it is"].endswith("(does not fit)")
    assert groups[heading]["each MLP has 16 experts, and a token uses 2"].endswith("(does not fit)")
    groups = figures("roofline", "llama-3-70b", "--hardware=h100", "--context=16384")
    assert [*groups["prefill in one chunk"]] == ["prompt of 16,384 (does not fit)"]
    (changes,) = (group for name, group in groups.items() if "change at batch 1," in name)
    assert changes["as it is"].endswith("(does not fit)")
    assert not changes["weights have 4 bits"].endswith("(does not fit)")
    at = groups["decode at a context of 16,384"]
    assert at["batch 1: fits the memory"] == "no, but the model has 8,192 positions"


def test_changes_move_what_limits_a_step() -> None:
    groups = figures("roofline", "llama-3.1-8b", "--hardware=h100", "--batch=1", "--context=128")
    (changes,) = (group for name, group in groups.items() if "effect of one change" in name)
    milliseconds = {name: float(value.split(" ms")[0].replace(",", "")) for name, value in changes.items()}
    plain = milliseconds["as it is"]
    assert milliseconds["weights have 8 bits"] == pytest.approx(plain / 2, rel=0.01)
    assert milliseconds["weights have 4 bits"] == pytest.approx(plain / 4, rel=0.02)
    assert milliseconds["2 devices share each layer"] < plain
    assert milliseconds["a step checks 4 free drafts, each accepted with a probability of 80%"] == plain
    assert milliseconds["KV has 8 bits"] < plain < milliseconds["each query head has its own K and V"]


def test_the_front_has_only_points_that_fit(tmp_path: Path) -> None:
    plot = tmp_path / "front.svg"
    groups = figures("roofline", "llama-3-70b", "--hardware=h100", f"--plot={plot}")
    (front,) = (group for name, group in groups.items() if name.startswith("Pareto"))
    degrees = {int(name.split(",")[0].removeprefix("tensor parallel ")) for name in front}
    assert degrees
    assert 1 not in degrees, "one device does not hold the model"
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that are measured on this machine, which has 900e9 operations/s and reads 40e9 bytes/s.

    As in `step_rates`, the rate of few rows has the time in it in which weights of 16 bits are read.
    """
    rows_asked: list[int] = []

    def this_machine(*_: object) -> Any:
        def at(rows: int) -> Hardware:
            rows_asked.append(rows)
            seconds = max(2 / 40e9, 2 * rows / 900e9) if rows <= 128 else 2 * rows / 900e9
            return Hardware("this", (2 * rows / seconds, None, None), 40e9, 1 << 40, 0.0, 0.0, 0, 1, "measured")

        return at

    monkeypatch.setattr(probes, "this_machine", this_machine)
    monkeypatch.setattr(process, "prepare", lambda: None)
    return rows_asked


SIZES = ("llama-3.1-8b", "--hardware=this", "--batch=1,8", "--context=64")


def test_this_machine_is_measured_with_the_rows_of_a_pass(asked: list[int]) -> None:
    at, weights = figures("roofline", *SIZES)["decode at a context of 64"], 7_504_658_432
    assert set(asked) == {1, 8, 64, 2048}, "rows of the steps, of the prompt and of the peak"
    for batch in (1, 8):
        assert at[f"batch {batch}: limited by"] == "weights"
        assert at[f"batch {batch}: step"] == pytest.approx(1e3 * (batch * 64 * 131_072 + 2 * weights) / 40e9)


def test_limits_of_this_machine_are_those_of_its_peak(asked: list[int]) -> None:
    found = figures("roofline", *SIZES)
    assert found[CRITICAL]["bf16"] == pytest.approx(900 / 40)
    assert found["attention"]["limit of decode attention"] == "memory at any batch"
    (changes,) = (group for name, group in found.items() if "effect of one change" in name)
    times = {name: float(value.split(" ms")[0].replace(",", "")) for name, value in changes.items()}
    assert times["weights have 8 bits"] == pytest.approx(times["as it is"] / 2, rel=0.01)
    fewer = figures("roofline", *SIZES, "--weight-bits=8")["decode at a context of 64"]
    assert fewer["batch 1: step"] == pytest.approx(found["decode at a context of 64"]["batch 1: step"] / 2, rel=0.01)


def test_this_machine_computes_with_float32_weights_in_float32(asked: list[int]) -> None:
    found = figures("roofline", *SIZES, "--weight-bits=32")
    assert "FLOP/s in 32 bits" in found["hardware: this"]
    assert found[CRITICAL] == {"float32": pytest.approx(2 * 900 / 40)}


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


@pytest.mark.parametrize(
    ("arguments", "microseconds"),
    [
        (["llama-3.1-70b", "--hardware=h100", "--batch=128"], 16.31),
        # 491,520 B are more than the 360 kB of the book for 8 devices.
        (["llama-2-13b", "--hardware=v5e", "--batch=48"], 21.85),
    ],
)
def test_collectives_that_take_the_time_of_their_bytes_are_not_bound_by_latency(
    arguments: list[str], microseconds: float
) -> None:
    layer = figures("parallel", *arguments, "--tensor-parallel=8")["a layer"]
    assert (layer["time"], layer["bound by latency"]) == (pytest.approx(microseconds, abs=5e-3), "no")


@pytest.mark.parametrize(("tp", "pp", "fits"), [(1, 1, "no"), (4, 3, "yes"), (4, 2, "no"), (16, 1, "yes")])
def test_a_parallelism_that_does_not_fit_is_marked(tp: int, pp: int, fits: str) -> None:
    degrees = (f"--tensor-parallel={tp}", f"--pipeline-parallel={pp}")
    assert figures("parallel", "llama-3.1-405b", "--hardware=H100", *degrees)["a step"]["fits the memory"] == fits


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
