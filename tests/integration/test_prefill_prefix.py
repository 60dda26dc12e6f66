"""The prefill service with the prefix cache in a real server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.request import SamplingParams
from tests.prefill import PROMPT, Client, decode, decoder, serving
from tests.redis_server import Server, running


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    with running("valkey", tmp_path) as server:
        yield server


async def flushed(client: Client) -> None:
    """Wait until new blocks are written back; KV must not be held for longer."""
    await client.pages_back()
    await client.app.cache.flush()


@pytest.mark.parametrize(
    ("again", "cached"),
    [(PROMPT, 96), (PROMPT[:96], 95), (PROMPT[:90], 80), (PROMPT[:33], 32), (PROMPT[:32], 31), (PROMPT[:5], 0)],
)
async def test_a_prefix_is_not_computed_twice(valkey: Server, again: list[int], cached: int) -> None:
    async with serving(redis=valkey.url) as client, serving(redis=valkey.url, chunk_size=3) as other:
        assert (await client.done()).cached_tokens == 0
        await flushed(client)
        with decoder(5) as engine:
            handle = engine.reserve("r", 110)
            pulling = asyncio.create_task(other.fetch(engine, handle, "t", len(again)))
            done = await other.done(again, transfer_id="t")
            assert done.cached_tokens == cached
            handoff = await pulling
            assert handoff.cached_tokens == cached
            assert decode(engine, handle, handoff, 4) == expected_tokens(again, 5)


async def test_long_prefixes_go_in_slices(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    one_block = FakeEngine().spec.kv_format.token_bytes * 16
    monkeypatch.setattr("prefill_svc.prefix.SLICE_BYTES", 2 * one_block)
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
        with valkey.client() as redis:
            assert redis.dbsize() == 6
        done = await client.done()
        assert done.cached_tokens == 96
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_progress_tells_of_cached_tokens(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await client.done(PROMPT[:48])
        await flushed(client)
        first = (await client.events())[0].progress
        assert (first.computed_tokens, first.cached_tokens, first.total_tokens) == (48, 48, 100)


async def test_replays_find_their_prompt_and_count_only_it_as_cached(valkey: Server) -> None:
    tokens = expected_tokens(PROMPT[:40], 30)
    params = SamplingParams(max_tokens=50, temperature=0.0)
    async with serving(redis=valkey.url) as client:
        for cached in (0, 40):
            done = await client.done(PROMPT[:40], output=tokens, params=params)
            assert done.cached_tokens == cached
            assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT[:40], 31)[-1]
            await flushed(client)


async def test_tenants_do_not_share(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await client.done(salt=b"a")
        await flushed(client)
        assert (await client.done(salt=b"b")).cached_tokens == 0
        assert (await client.done(salt=b"a")).cached_tokens == 96


async def test_prompt_logprobs_need_the_whole_prompt_computed(valkey: Server) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
        done = await client.done(params=params)
        assert done.cached_tokens == 0
        assert len(done.prompt_tokens) == 100


async def test_a_damaged_block_is_computed_again(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
        with valkey.client() as redis:
            for key in redis.scan_iter():
                value = redis.get(key)
                redis.set(key, value[:-1] + bytes([value[-1] ^ 1]))
        done = await client.done()
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_a_dead_redis_is_only_slower(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
        valkey.kill()
        for _ in range(3):
            done = await client.done()
            assert done.cached_tokens == 0
            assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_a_call_cancelled_during_the_look_up_leaves_nothing(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
        with valkey.client() as redis:
            redis.client_pause(200)
        call = client.call(transfer_id="t")
        await client.status(lambda status: status.load.waiting == 1)
        call.cancel()
        await client.status(lambda status: status.load.waiting == 0)
        await client.pages_back()
