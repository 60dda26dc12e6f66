"""Conversations turn by turn, and fleets that `baton up` starts."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import beside, conversations
from bench.conversations import Conversations, Turn, by_turn, summary
from bench.up import Router

METRICS = """# HELP baton_replays_total Replays.
baton_replays_total 2.0
baton_placements_total{kind="in place",model_name="m"} 5.0
baton_requests_total{status="OK"} 9.0
"""


class FakeClient:
    """Answers with zeros; has cached all but the last 4 tokens of a prompt, and transfers those longer than 20."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def complete(self, prompt: list[int], max_tokens: int, **_: Any) -> Any:
        self.prompts.append(list(prompt))
        usage = SimpleNamespace(prompt_tokens=len(prompt), cached_tokens=len(prompt) - 4)
        timings = SimpleNamespace(transfer=5.0 if len(prompt) > 20 else 0.0, first_token=10.0, total=20.0)
        return SimpleNamespace(usage=usage, timings_ms=timings, token_ids=[0] * max_tokens)


async def test_a_turn_has_the_conversation_so_far() -> None:
    client: Any = FakeClient()
    turns = await conversations._user(client, Conversations(1, 3, 10, 4), random.Random(0), 100)
    assert [len(prompt) for prompt in client.prompts] == [10, 18, 26]
    first, second, _ = client.prompts
    assert second[: len(first) + 4] == [*first, 0, 0, 0, 0]
    assert [turn.computed for turn in turns] == [4, 4, 4]
    assert [turn.transferred for turn in turns] == [False, False, True]


def test_turns_are_compared_by_number_and_fleets_by_round() -> None:
    mine = [Turn(1, 10, 50, 100, 100, False), Turn(1, 30, 50, 100, 60, False), Turn(2, 5, 20, 200, 10, False)]
    theirs = [Turn(1, 20, 50, 100, 100, True), Turn(2, 20, 40, 200, 10, True)]
    assert by_turn(mine)[0] == {
        "turn": 1,
        "ttft_ms": 20,
        "total_ms": 50,
        "prompt": 200,
        "computed": 160,
        "transferred": 0,
        "requests": 2,
    }
    found = summary({"--mixed=1": [mine], "--prefill=1": [theirs]}, {"--mixed=1": {"a": 1}, "--prefill=1": {}})
    assert found["ratios"]["--mixed=1 over --prefill=1"]["first_token_ms"]["rounds"] == [0.5]
    assert [row["transferred"] for row in found["fleets"]["--prefill=1"]["turns"]] == [1, 1]


def test_counters_of_a_router_are_found_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *_: Any) -> None: ...

        def read(self) -> bytes:
            return METRICS.encode()

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer())
    assert Router("x:1", "x:2").counters(conversations.COUNTERS) == {
        "baton_replays_total": 2.0,
        'baton_placements_total{kind="in place",model_name="m"}': 5.0,
    }


def test_a_checkpoint_gets_positions_for_long_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "kept": 1}))
    (tmp_path / "model.safetensors").write_text("weights")
    with beside.with_positions(tmp_path, 64) as same:
        assert same == tmp_path
    with beside.with_positions(tmp_path, 128) as longer:
        assert json.loads((longer / "config.json").read_text()) == {"max_position_embeddings": 128, "kept": 1}
        assert (longer / "model.safetensors").read_text() == "weights"
    assert not longer.exists()
