"""The parts of bench.peers that drive a fleet: load through `baton bench serve`, streams watched under prompts."""

import asyncio
from pathlib import Path

import pytest

from baton.bench.load.targets import Endpoint
from bench.peers import fleet, interference
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.fleet import Fleet


async def test_a_fleet_is_loaded_and_its_streams_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path, max_position_embeddings=8192)
    for name, value in {"VOCABULARY": VOCAB_SIZE, "IN_TOKENS": 16, "OUT_TOKENS": 4}.items():
        monkeypatch.setattr(fleet, name, value)
    load = interference.InterferenceLoad(streams=2, alone_s=0.2, prompts=2, tokens=256)
    async with Fleet(checkpoint) as services:
        router = await services.start_router([await services.prefill()], [await services.decode()])
        report = await asyncio.to_thread(fleet.load, f"grpc://{router.address}", concurrency=2, requests=3, seed=0)
        found = await interference.watched(Endpoint(f"grpc://{router.address}"), load, VOCAB_SIZE)
    figures = fleet.figures(report)
    summary = fleet.summary({"baton": [figures], "vllm": [figures], "prediction": [figures]})
    assert summary["unfinished"] == {"baton": 0, "vllm": 0}
    assert summary["ratios"]["tokens_per_s"]["median"] == summary["of_predicted"]["median"] == 1
    assert interference.figures(found)["ratio"] > 0
