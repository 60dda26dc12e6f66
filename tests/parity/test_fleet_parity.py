"""The spine: greedy float32 output of the running fleet, over gRPC, equals transformers' `generate`, in any batch.

For every family: each chunk size, each pair of page sizes on the two sides of the transfer, prompts shorter and longer
than the windows and the original RoPE length of the checkpoints. Each checkpoint is tied or untied: that both compute
the same in every family, chunk and page size is for the parity of the model.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from baton.completion import Completion
from baton.telemetry.metrics import SEQUENCES_PREEMPTED
from tests.checkpoints import FAMILIES, VOCAB_SIZE, Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet
from tests.metrics import count, sample

TOKENS = 64
WORKERS = ((1, 16, 16), (7, 256, 16), (16, 16, 256), (64, 256, 256), (0, 16, 256))
"""Chunk size and page sizes of prefill and decode."""
IN_HOST_MEMORY = {"kernels": "torch", "kv_home": "host", "segment_tokens": 24}
"""Settings of workers whose KV lies in host memory; attention takes it in segments."""
LENGTHS = (5, 40, 131)


def references(checkpoint: Path) -> list[tuple[list[int], Reference]]:
    """A prompt of each length with what transformers makes of it."""
    model = load_reference(checkpoint)
    return [lively_prompt(model, length) for length in LENGTHS]


@pytest.mark.parametrize(("family", "tied"), [(family, number % 2 == 0) for number, family in enumerate(FAMILIES)])
async def test_fleet_equals_generate(family: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path, tied=tied)
    expected = references(checkpoint)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        decodes = {page: await fleet.decode(page_size=page) for page in {page for _, _, page in WORKERS}}

        async def check(chunk: int, page: int, decode: Any, **settings: Any) -> None:
            prefill = await fleet.prefill(chunk_size=chunk, page_size=page, **settings)
            client = await fleet.router([prefill], [decode])
            completions = await asyncio.gather(
                *(client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) for prompt, _ in expected)
            )
            for (prompt, reference), completion in zip(expected, completions, strict=True):
                assert completion.token_ids == reference.token_ids, (
                    f"chunk size {chunk}, prefill page {page}, {decode.config}, prompt of {len(prompt)}"
                )

        await asyncio.gather(*(check(chunk, page, decodes[decode_page]) for chunk, page, decode_page in WORKERS))
        # A context of 40 and one of 131 tokens do not both fit into the five pages on the device.
        token_bytes = decodes[16].engine.spec.kv_format.token_bytes
        mixed = {"kv_memory": 5 * 16 * token_bytes, "host_memory": 40 * 16 * token_bytes}
        decode = await fleet.decode(page_size=16, kernels="torch", segment_tokens=24, **mixed)
        await check(16, 16, decode, **IN_HOST_MEMORY)


@pytest.mark.parametrize("mixed", [False, True])
async def test_preempted_requests_equal_generate(mixed: bool, tmp_path: Path) -> None:
    """In a pool that can't hold all of them: they need 25 pages at their ends, and more for several choices.

    A mixed worker computes prompts meanwhile.
    """
    checkpoint = make_checkpoint("llama", tmp_path)
    expected, preempted = references(checkpoint), count(SEQUENCES_PREEMPTED)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        prefill = await fleet.prefill(page_size=16)
        token_bytes = prefill.engine.spec.kv_format.token_bytes
        small = {"page_size": 16, "kv_memory": 14 * 16 * token_bytes, "max_model_len": 224, "reserve_tokens": 8}
        if mixed:
            client = await fleet.router([], [], mixed=[await fleet.mixed(chunk_size=7, **small)])
        else:
            client = await fleet.router([prefill], [await fleet.decode(**small)])
        completions = await asyncio.gather(
            *(
                client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, n=n)
                for prompt, _ in expected
                for n in (1, 3)
            )
        )
        wanted = [reference.token_ids for _, reference in expected for n in (1, 3) for _ in range(n)]
        assert [choice.token_ids for each in completions for choice in each.choices] == wanted
    assert count(SEQUENCES_PREEMPTED) > preempted


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
