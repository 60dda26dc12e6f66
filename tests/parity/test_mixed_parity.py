"""Fleets with mixed workers give transformers' tokens, if a prompt is computed in place or for another worker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.completion import Completion
from tests.checkpoints import FAMILIES, Reference, make_checkpoint
from tests.fleet import Fleet
from tests.kernels import needs_native
from tests.metrics import sample
from tests.parity.test_fleet_parity import LENGTHS, TOKENS, gist, mixed_requests, references

SHAPES = ("m", "pm", "md", "mm")
"""Workers of a fleet by the first letter of their role."""
SIZES = ((7, 16, 256), (64, 256, 16))
"""Chunk size, page size of mixed workers, and page size of the others."""
GRID = ((1, 16, 16), (0, 16, 256), *SIZES)

BLOCK_SIZE = 16

Expected = list[tuple[list[int], Reference]]


async def serving(
    fleet: Fleet, shape: str, chunk_size: int, page_size: int, others: int, **settings: Any
) -> AsyncClient:
    """A router over a fleet of this shape; of two mixed workers, one has the pages of the others."""
    mixed = [
        await fleet.mixed(chunk_size=chunk_size, page_size=each, **settings)
        for each, _ in zip((page_size, others), shape.replace("p", "").replace("d", ""), strict=False)
    ]
    prefill = [await fleet.prefill(chunk_size=chunk_size, page_size=others)] if "p" in shape else []
    decode = [await fleet.decode(page_size=others)] if "d" in shape else []
    return await fleet.router(prefill, decode, mixed=mixed)


async def check(client: AsyncClient, expected: Expected, shape: str) -> None:
    """Alone and as several choices, then again with prefix hits, then one request after the other.

    A worker keeps the blocks of what it has decoded, also those of a page that is not full. So a worker alone computes
    only the tokens of a repeated prompt after its last full block. In a larger fleet the load decides whether a prompt
    goes where its blocks are.
    """

    async def one(prompt: list[int], reference: Reference, **settings: Any) -> None:
        found = await client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, **settings)
        assert [choice.token_ids for choice in found.choices] == [reference.token_ids] * len(found.choices), (
            f"prompt of {len(prompt)}, {settings}"
        )

    await asyncio.gather(*(one(*each, n=n) for each in expected for n in (1, 2)))
    before = sample("baton_prefill_tokens_total", source="computed")
    await asyncio.gather(*(one(*each) for each in expected for _ in range(3)))
    computed = sample("baton_prefill_tokens_total", source="computed") - before
    after_blocks = sum(length % BLOCK_SIZE for length in LENGTHS)
    assert computed == 3 * after_blocks if shape == "m" else computed < 3 * sum(LENGTHS)
    # What a request has generated is a prefix of the next one.
    for prompt, reference in expected:
        following = [*prompt, *reference.token_ids[: TOKENS // 2]]
        found = await client.complete(following, max_tokens=TOKENS // 2, temperature=0, ignore_eos=True)
        assert found.token_ids == reference.token_ids[TOKENS // 2 :]


@pytest.mark.parametrize(("family", "shape"), list(zip(FAMILIES, SHAPES, strict=True)))
async def test_mixed_fleets_equal_generate(family: str, shape: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        await check(await serving(fleet, shape, *SIZES[SHAPES.index(shape) % 2]), references(checkpoint), shape)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
async def test_every_family_on_every_mixed_fleet(family: str, shape: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path, tied=True)
    expected = references(checkpoint)
    for sizes in GRID:
        for kernels in ("native", "torch"):
            async with Fleet(checkpoint, dtype="float32", kernels=kernels) as fleet:
                await check(await serving(fleet, shape, *sizes), expected, shape)


@pytest.mark.long
@needs_native
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
async def test_mixed_workers_with_ranks_equal_generate(shape: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path, vocab_size=267)
    tensor, pipeline = degrees
    async with Fleet(checkpoint, dtype="float32") as fleet:
        ranks = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        await check(await serving(fleet, shape, *SIZES[1], **ranks), references(checkpoint), shape)


def told(completion: Completion) -> list[Any]:
    """Everything of a completion, log-probabilities to the tolerance of float32 sums."""
    return [
        gist(completion),
        [choice.token_ids for choice in completion.choices],
        [
            (info.token_id, None if info.logprob is None else pytest.approx(info.logprob, abs=1e-3))
            for info in completion.prompt_tokens
        ],
    ]


@pytest.mark.parametrize("shape", ["mm", pytest.param("pmd", marks=pytest.mark.long)])
async def test_each_request_gives_what_it_gives_alone(shape: str, tmp_path: Path) -> None:
    """Sampling settings, choices, and log-probabilities of outputs and prompts, with few slots."""
    requests = mixed_requests(2)
    for number, (_, settings) in enumerate(requests):
        settings |= {0: {"prompt_logprobs": 1}, 1: {"n": 2}}.get(number % 4, {})
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        alone = await fleet.router([await fleet.prefill(chunk_size=32)], [await fleet.decode(slots=2)])
        expected = [await alone.complete(prompt, **settings) for prompt, settings in requests]
        client = await serving(fleet, shape, 32, 16, 256, slots=6)
        found = await asyncio.gather(*(client.complete(prompt, **settings) for prompt, settings in requests))
        for completion, reference in zip(found, expected, strict=True):
            assert told(completion) == told(reference)
