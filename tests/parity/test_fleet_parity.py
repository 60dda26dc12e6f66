"""The spine: greedy float32 output of the running fleet, over gRPC, equals transformers' `generate`.

For every family: each chunk size, each pair of page sizes on the two sides of the transfer, prompts shorter and longer
than the windows and the original RoPE length of the checkpoints.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet

TOKENS = 64
CHUNK_SIZES = (1, 7, 16, 64, 0)
PAGE_SIZES = (16, 256)
LENGTHS = (5, 40, 131)


def references(checkpoint: Path) -> list[tuple[list[int], Reference]]:
    """A prompt of each length with what transformers makes of it."""
    model = load_reference(checkpoint)
    return [lively_prompt(model, length) for length in LENGTHS]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_fleet_equals_generate(family: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path, tied=tied)
    expected = references(checkpoint)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        prefills = {
            (chunk, page): await fleet.prefill(chunk_size=chunk, page_size=page)
            for chunk, page in itertools.product(CHUNK_SIZES, PAGE_SIZES)
        }
        decodes = {page: await fleet.decode(page_size=page) for page in PAGE_SIZES}

        async def check(where: tuple[int, int], page: int) -> None:
            client = await fleet.router([prefills[where]], [decodes[page]])
            completions = await asyncio.gather(
                *(client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) for prompt, _ in expected)
            )
            for (prompt, reference), completion in zip(expected, completions, strict=True):
                assert completion.token_ids == reference.token_ids, (
                    f"chunk size and prefill page {where}, decode page {page}, prompt of {len(prompt)}"
                )

        await asyncio.gather(*(check(where, page) for where, page in itertools.product(prefills, decodes)))
