"""The parts of bench.peers that drive a real fleet: load through `baton bench serve`, streams watched under prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.bench.load.targets import Place
from bench.peers import fleet, interference
from bench.peers.places import Places
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


def test_a_fleet_is_loaded_and_its_streams_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path, max_position_embeddings=8192)
    monkeypatch.setattr(fleet, "VOCABULARY", VOCAB_SIZE)
    places = Places(vllm=tmp_path, llama=tmp_path, model=checkpoint, gguf=tmp_path)
    load = interference.Load(streams=2, alone_s=0.2, prompts=2, tokens=256)
    with fleet.baton_fleet(places) as router:
        report = fleet.load(f"grpc://{router}", concurrency=2, requests=3, seed=0)
        found = asyncio.run(interference.watched(Place(f"grpc://{router}"), load, VOCAB_SIZE))
    figures = fleet.figures(report)
    summary = fleet.summary({"baton": [figures], "vllm": [figures], "prediction": [figures]})
    assert summary["unfinished"] == {"baton": 0, "vllm": 0}
    assert summary["ratios"]["tokens_per_s"]["median"] == summary["of_predicted"]["median"] == 1
    assert interference.figures(found)["ratio"] > 0
