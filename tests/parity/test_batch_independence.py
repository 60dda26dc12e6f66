"""In float32 a request's output depends on the request alone: not on batch mates, slots, or who came first."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from baton.completion import Completion
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.fleet import Fleet
from tests.metrics import sample

REQUESTS = 32


def mixed_requests(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 150 tokens, each with settings of its own."""
    draw = random.Random(seed)
    requests = []
    for index in range(REQUESTS):
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 150))]
        settings: dict[str, Any] = {"max_tokens": draw.randint(2, 48), "ignore_eos": draw.random() < 0.5}
        settings["temperature"] = draw.choice([0.0, 0.7, 1.0, 1.5])
        settings["seed"] = index
        for name, values in {
            "top_p": [0.5, 0.9],
            "top_k": [3, 40],
            "min_p": [0.05],
            "repetition_penalty": [1.3],
            "presence_penalty": [0.8],
            "frequency_penalty": [0.5],
            "min_tokens": [2],
            "stop_token_ids": [[17, 99]],
            "logprobs": [0, 3],
            "logit_bias": [{5: 4.0, 9: -100.0}],
            "allowed_token_ids": [list(range(0, 256, 2))],
        }.items():
            if draw.random() < 0.3:
                settings[name] = draw.choice(values)
        requests.append((prompt, settings))
    return requests


def gist(completion: Completion) -> tuple[Any, ...]:
    """Values that must be the same, log-probabilities to the tolerance of float32 sums."""
    choice = completion.choices[0]
    logprobs = [
        (info.token_id, None if info.logprob is None else pytest.approx(info.logprob, abs=1e-3))
        for info in choice.tokens
    ]
    return choice.text, logprobs, choice.finish_reason, choice.stop


async def test_each_request_gives_what_it_gives_alone(tmp_path: Path) -> None:
    requests = mixed_requests(1)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        prefill = await fleet.prefill(chunk_size=32)
        alone = await fleet.router([prefill], [await fleet.decode(slots=1)])
        expected = [await alone.complete(prompt, **settings) for prompt, settings in requests]
        assert len({tuple(completion.token_ids) for completion in expected}) > REQUESTS // 2

        for slots in (REQUESTS, 5):
            client = await fleet.router([prefill], [await fleet.decode(slots=slots)])
            found = await asyncio.gather(*(client.complete(prompt, **settings) for prompt, settings in requests))
            for completion, reference in zip(found, expected, strict=True):
                assert gist(completion) == gist(reference)


async def test_n_choices_come_from_one_prefill(tmp_path: Path) -> None:
    prompt = [7] * 70
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    async with Fleet(make_checkpoint("qwen3", tmp_path), dtype="float32") as fleet:
        client = await fleet.router([await fleet.prefill(page_size=16)], [await fleet.decode(page_size=32)])
        one = await client.complete(prompt, **settings)
        before = sample("baton_prefill_tokens_total", source="computed")
        four = await client.complete(prompt, n=4, cache="off", **settings)
        again = await client.complete(prompt, n=4, cache="off", **settings)
        computed = sample("baton_prefill_tokens_total", source="computed") - before
    outputs = [tuple(choice.token_ids) for choice in four.choices]
    assert len(set(outputs)) == 4
    assert outputs[0] == tuple(one.token_ids)
    assert outputs == [tuple(choice.token_ids) for choice in again.choices]
    assert computed == 2 * len(prompt)
    assert four.usage.completion_tokens == 4 * 24
    assert all(max(choice.token_ids) < VOCAB_SIZE for choice in four.choices)
