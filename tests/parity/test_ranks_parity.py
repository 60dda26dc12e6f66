"""Fleets whose workers have several ranks give transformers' tokens, whatever the degrees of prefill and decode."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet
from tests.kernels import needs_native
from tests.metrics import sample

pytestmark = needs_native

TOKENS = 40
LENGTHS = (5, 40, 300)
"""The longest goes through a pipeline in three pieces, if it is one chunk."""


def degrees(tensor: int, pipeline: int) -> dict[str, int]:
    return {"tensor_parallel": tensor, "pipeline_parallel": pipeline}


def references(checkpoint: Path) -> list[tuple[list[int], Reference]]:
    model = load_reference(checkpoint)
    return [lively_prompt(model, length) for length in LENGTHS]


async def check(client: Any, expected: list[tuple[list[int], Reference]], **settings: Any) -> None:
    completions = await asyncio.gather(
        *(
            client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, **settings)
            for prompt, _ in expected
        )
    )
    for (_, reference), completion in zip(expected, completions, strict=True):
        assert [choice.token_ids for choice in completion.choices] == [reference.token_ids[:TOKENS]] * len(
            completion.choices
        )


async def test_degrees_of_both_sides_may_differ(tmp_path: Path) -> None:
    """A prefix that was computed with one degree is a hit with another, in pages and in Redis's format alike."""
    checkpoint = make_checkpoint("qwen2", tmp_path, vocab_size=267)
    expected = references(checkpoint)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        prefill = await fleet.prefill(page_size=16, chunk_size=64, **degrees(2, 1))
        decode = await fleet.decode(page_size=32, **degrees(1, 2))
        client = await fleet.router([prefill], [decode])
        await check(client, expected)
        before = sample("baton_prefill_tokens_total", source="computed")
        await check(client, expected, n=2)
        again = sample("baton_prefill_tokens_total", source="computed") - before
        assert again < sum(LENGTHS) / 2
        # A worker of another degree continues from blocks that these have computed.
        stages = await fleet.prefill(page_size=16, chunk_size=512, **degrees(1, 2))
        client = await fleet.router([stages], [await fleet.decode()])
        await check(client, expected)
        await check(client, expected, cache="off")


PAIRS = {
    "llama": [((1, 1), (2, 1)), ((1, 2), (2, 1))],
    "mistral": [((2, 1), (1, 1))],
    "qwen2": [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 2), (4, 1))],
    "qwen3": [((1, 3), (2, 1))],
}
CASES = [(family, *pair) for family, pairs in PAIRS.items() for pair in pairs]


@pytest.mark.long
@pytest.mark.parametrize(("family", "prefill", "decode"), CASES, ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_every_pair_of_degrees(
    family: str, prefill: tuple[int, int], decode: tuple[int, int], kernels: str, tmp_path: Path
) -> None:
    """Two KV heads over four ranks, a vocabulary that does not divide, windows, QK norm, tied and untied weights."""
    tied = (family, prefill) in (("qwen2", (2, 1)), ("llama", (1, 2)), ("qwen3", (1, 3)))
    checkpoint = make_checkpoint(family, tmp_path, tied=tied, vocab_size=267)
    expected = references(checkpoint)
    settings: dict[str, Any] = {"logprobs": 2, "presence_penalty": 0.5, "temperature": 0.8, "seed": 5, "max_tokens": 20}
    async with Fleet(checkpoint, dtype="float32", kernels=kernels) as fleet:
        client = await fleet.router(
            [await fleet.prefill(page_size=16, chunk_size=48 if prefill[1] == 1 else 512, **degrees(*prefill))],
            [await fleet.decode(page_size=32, **degrees(*decode))],
        )
        alone = await fleet.router([await fleet.prefill()], [await fleet.decode()])
        for each in ({}, {"n": 3}):
            await check(client, expected, **each)
        for prompt, _ in expected:
            found, wanted = [
                (await each.complete(prompt, prompt_logprobs=1, ignore_eos=True, cache="off", **settings))
                for each in (client, alone)
            ]
            assert found.token_ids == wanted.token_ids
            for of in ("tokens", "prompt_tokens"):
                mine, theirs = (
                    [info.logprob for info in getattr(each.choices[0] if of == "tokens" else each, of) if info.logprob]
                    for each in (found, wanted)
                )
                assert mine == pytest.approx(theirs, abs=1e-3)
                assert len(mine) > 2
