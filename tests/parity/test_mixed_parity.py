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


def most_fresh(shape: str, page_size: int, others: int) -> int:
    """Largest number of times that a known prompt is computed from its beginning, if it comes three times.

    A worker has the blocks of each prompt that it has computed. If it has computed it for another one, these are only
    those in full pages, and no prompt fills a page of 256 tokens. So in a fleet of one worker that prefills, each
    prompt is found; in one of two, it may go once to the worker that does not have it, if it comes once at a time.
    With pages of 256 tokens, placement alone decides, and so the load.
    """
    for_others = {"m": (), "pm": (others,), "md": (page_size,), "mm": (page_size, others)}[shape]
    return len(shape.replace("d", "")) - 1 if all(size == BLOCK_SIZE for size in for_others) else 3


async def check(client: AsyncClient, expected: Expected, shape: str, page_size: int, others: int) -> None:
    """Alone and as several choices, then again with prefix hits, then one request after the other."""

    async def one(prompt: list[int], reference: Reference, **settings: Any) -> None:
        found = await client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, **settings)
        assert [choice.token_ids for choice in found.choices] == [reference.token_ids] * len(found.choices), (
            f"prompt of {len(prompt)}, {settings}"
        )

    await asyncio.gather(*(one(*each, n=n) for each in expected for n in (1, 2)))
    before = sample("baton_prefill_tokens_total", source="computed")
    fresh = most_fresh(shape, page_size, others)
    rounds, at_once = (3, 1) if fresh else (1, 3)
    for _ in range(rounds):
        await asyncio.gather(*(one(*each) for each in expected for _ in range(at_once)))
    computed = sample("baton_prefill_tokens_total", source="computed") - before
    after_blocks = sum(length % BLOCK_SIZE for length in LENGTHS)
    in_blocks = sum(LENGTHS) - after_blocks
    assert 3 * after_blocks <= computed <= 3 * after_blocks + fresh * in_blocks
    # What a request has generated is a prefix of the next one.
    for prompt, reference in expected:
        following = [*prompt, *reference.token_ids[: TOKENS // 2]]
        found = await client.complete(following, max_tokens=TOKENS // 2, temperature=0, ignore_eos=True)
        assert found.token_ids == reference.token_ids[TOKENS // 2 :]


@pytest.mark.parametrize(
    ("family", "shape", "sizes"), [*zip(FAMILIES, SHAPES, 2 * SIZES, strict=True), ("llama", "mm", (64, 16, 16))]
)
async def test_mixed_fleets_equal_generate(
    family: str, shape: str, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        await check(await serving(fleet, shape, *sizes), references(checkpoint), shape, *sizes[1:])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
async def test_every_family_on_every_mixed_fleet(family: str, shape: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path, tied=True)
    expected = references(checkpoint)
    for sizes in GRID:
        for kernels in ("native", "torch"):
            async with Fleet(checkpoint, dtype="float32", kernels=kernels) as fleet:
                await check(await serving(fleet, shape, *sizes), expected, shape, *sizes[1:])


@pytest.mark.long
@needs_native
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
async def test_mixed_workers_with_ranks_equal_generate(shape: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2", tmp_path, vocab_size=267)
    tensor, pipeline = degrees
    async with Fleet(checkpoint, dtype="float32") as fleet:
        ranks = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        await check(await serving(fleet, shape, *SIZES[1], **ranks), references(checkpoint), shape, *SIZES[1][1:])


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
