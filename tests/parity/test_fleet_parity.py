"""The spine: greedy float32 output of the running fleet, over gRPC, equals transformers' `generate`.

For every family: each chunk size, each pair of page sizes on the two sides of the transfer, prompts shorter and longer
than the windows and the original RoPE length of the checkpoints. Each checkpoint is tied or untied: that both compute
the same in every family, chunk and page size is for the parity of the model.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet

TOKENS = 64
PREFILLS = ((1, 16), (7, 256), (16, 16), (64, 256), (0, 16))
"""Chunk and page sizes."""
PAGE_SIZES = (16, 256)
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
        prefills = {where: await fleet.prefill(chunk_size=where[0], page_size=where[1]) for where in PREFILLS}
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
