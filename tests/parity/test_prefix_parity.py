"""A prefix from Redis changes how long a prompt takes and nothing else; losing Redis changes no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import Fleet
from tests.redis_server import BINARIES, running

BLOCK = 16
SETTINGS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.mark.parametrize("kind", BINARIES)
async def test_hits_of_any_length_keep_the_tokens(kind: str, tmp_path: Path) -> None:
    shared = prompt_ids(6 * BLOCK)
    # None, part of a block, one block and a bit, several, and the whole prompt, which must still sample.
    lengths = {BLOCK - 1: 0, BLOCK: 0, 2 * BLOCK + 5: 2 * BLOCK, 4 * BLOCK: 3 * BLOCK, 6 * BLOCK: 5 * BLOCK}
    with running(kind, tmp_path) as server:
        async with Fleet(make_checkpoint("mistral", tmp_path / "model"), dtype="float32") as fleet:
            decode = await fleet.decode()
            plain = await fleet.router([await fleet.prefill(page_size=32)], [decode])
            first = await fleet.prefill(redis=server.url, chunk_size=16)
            second = await fleet.prefill(redis=server.url, chunk_size=64, page_size=256)
            writer = await fleet.router([first], [decode])
            reader = await fleet.router([second], [decode])
            await writer.complete(shared, **SETTINGS)
            await first.worker.finished()
            await first.cache.flush()
            for length, least in lengths.items():
                prompt = shared[:length]
                expected = await plain.complete(prompt, **SETTINGS)
                found = await reader.complete(prompt, **SETTINGS)
                assert found.token_ids == expected.token_ids, f"prompt of {length}"
                assert expected.usage is not None
                assert found.usage is not None
                assert expected.usage.cached_tokens == 0
                assert least <= found.usage.cached_tokens < length, f"prompt of {length}"


async def test_a_second_run_hits_and_a_dead_redis_only_slows(tmp_path: Path) -> None:
    prompt = prompt_ids(5 * BLOCK + 3)
    with running("valkey", tmp_path) as server:
        async with Fleet(make_checkpoint("qwen2", tmp_path / "model"), dtype="float32") as fleet:
            prefill = await fleet.prefill(redis=server.url)
            client = await fleet.router([prefill], [await fleet.decode()])
            first = await client.complete(prompt, **SETTINGS)
            await prefill.worker.finished()
            await prefill.cache.flush()
            second = await client.complete(prompt, **SETTINGS)
            server.kill()
            third = await client.complete(prompt, **SETTINGS)
            fourth = await client.complete(prompt[:40], **SETTINGS)
    assert first.usage is not None
    assert second.usage is not None
    assert third.usage is not None
    assert fourth.usage is not None
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 5 * BLOCK)
    assert first.token_ids == second.token_ids == third.token_ids
    assert third.usage.cached_tokens == fourth.usage.cached_tokens == 0
