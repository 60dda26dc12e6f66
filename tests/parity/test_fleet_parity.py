"""The spine: greedy float32 output of the running fleet, over gRPC, equals transformers' `generate`.

For every family: each chunk size, each pair of page sizes on the two sides of the transfer, prompts shorter and longer
than the windows and the original RoPE length of the checkpoints. Each checkpoint is tied or untied: that both compute
the same in every family, chunk and page size is for the parity of the model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet

TOKENS = 64
WORKERS = ((1, 16, 16), (7, 256, 16), (16, 16, 256), (64, 256, 256), (0, 16, 256))
"""Chunk size and page sizes of prefill and decode."""
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

        async def check(chunk: int, page: int, decode_page: int) -> None:
            prefill = await fleet.prefill(chunk_size=chunk, page_size=page)
            client = await fleet.router([prefill], [decodes[decode_page]])
            completions = await asyncio.gather(
                *(client.complete(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) for prompt, _ in expected)
            )
            for (prompt, reference), completion in zip(expected, completions, strict=True):
                assert completion.token_ids == reference.token_ids, (
                    f"chunk size {chunk}, prefill page {page}, decode page {decode_page}, prompt of {len(prompt)}"
                )

        await asyncio.gather(*(check(*sizes) for sizes in WORKERS))
