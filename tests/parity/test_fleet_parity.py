"""The spine: greedy float32 output of the running fleet, over gRPC, equals transformers' `generate`.

For every family: each chunk size, each pair of page sizes on the two sides of the transfer, prompts shorter and longer
than the windows and the original RoPE length of the checkpoints. Each checkpoint is tied or untied: that both compute
the same in every family, chunk and page size is for the parity of the model.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.telemetry.metrics import SEQUENCES_PREEMPTED
from tests.checkpoints import FAMILIES, Reference, lively_prompt, load_reference, make_checkpoint
from tests.fleet import Fleet
from tests.metrics import count

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


async def test_what_is_preempted_and_replayed_equals_generate(tmp_path: Path) -> None:
    """In a pool that can't hold all of them: they need 25 pages at their ends, and more for several choices."""
    checkpoint = make_checkpoint("llama", tmp_path)
    expected, preempted = references(checkpoint), count(SEQUENCES_PREEMPTED)
    async with Fleet(checkpoint, dtype="float32") as fleet:
        prefill = await fleet.prefill(page_size=16)
        token_bytes = prefill.engine.spec.kv_format.token_bytes
        small = {"kv_memory": 14 * 16 * token_bytes, "max_model_len": 224, "reserve_tokens": 8}
        decode = await fleet.decode(page_size=16, **small)
        client = await fleet.router([prefill], [decode])
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
