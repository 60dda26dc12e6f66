"""Pausing changes no token: a pool that can't hold the batch gives what an ample one gives, greedy and seeded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from tests.checkpoints import make_checkpoint
from tests.fleet import Fleet


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(f"baton_sequences_{name}_total") or 0.0


async def test_sequences_that_were_paused_give_what_they_give_with_room(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.5, "logprobs": 0},
    ]
    requests = [([7 + index] * (9 + 11 * index), {**each, "max_tokens": 90}) for index, each in enumerate(settings)]
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        prefill = await fleet.prefill()
        ample = await fleet.router([prefill], [await fleet.decode(slots=4)])
        expected = [await ample.complete(prompt, ignore_eos=True, **each) for prompt, each in requests]
        tight = await fleet.decode(slots=4, page_size=16, kv_memory=16 * 18432, max_model_len=160, reserve_tokens=8)
        assert tight.engine.spec.pages == 16
        before = {name: counted(name) for name in ("paused", "resumed", "preempted")}
        client = await fleet.router([prefill], [tight])
        found = await asyncio.gather(*(client.complete(p, ignore_eos=True, **each) for p, each in requests))
    for completion, reference in zip(found, expected, strict=True):
        assert completion.token_ids == reference.token_ids
        assert len(completion.token_ids) == 90
    assert counted("paused") - before["paused"] >= 2
    assert counted("resumed") - before["resumed"] == counted("paused") - before["paused"]
    assert counted("preempted") == before["preempted"]
