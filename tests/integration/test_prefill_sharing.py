"""Prompts that share a beginning: computed once though they come together, and saved while a long one is computed."""

import asyncio
from typing import Any

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import NoToken
from baton.request import CachePolicy
from tests.metrics import sample
from tests.prefill import (
    PROMPT,
    WAIT_S,
    Client,
    Gate,
    by_tier,
    fetch_all,
    flushed,
    gated,
    prefilled,
    serving,
    since,
    status_of,
)
from tests.redis_server import Server

CHUNK = 16
LONG: dict[str, Any] = {"chunk_size": CHUNK, "long_prompt_chunks": 5}
BLOCKS = len(PROMPT) // CHUNK


def is_right(done: Any) -> bool:
    return bool(done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0])


class Watching(FakeEngine):
    """Counts the keys of a server before each chunk, and may raise in the last one."""

    def __init__(self, server: Server, *, error: Exception | None = None) -> None:
        super().__init__()
        self._server, self._error = server, error
        self.keys: list[int] = []

    def launch(self, chunks: Any = (), **kwargs: Any) -> Any:
        with self._server.client() as client:
            self.keys.append(client.dbsize())
        result = super().launch(chunks, **kwargs)
        if self._error is not None and chunks[0].sample:
            raise self._error
        return result


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for the server as long as a busy machine takes."""
    monkeypatch.setattr("prefill_svc.prefix.SAVE_WAIT_S", WAIT_S)


@pytest.mark.parametrize("writes", ["first", "second"])
async def test_others_find_all_but_two_chunks(valkey: Server, writes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)
    engine = Watching(valkey)
    async with serving(engine, redis=valkey.url, cache_writes=writes, **LONG) as client:
        assert is_right(await client.done())
        await flushed(client)
    assert all(keys >= chunk - 1 for chunk, keys in enumerate(engine.keys)), engine.keys
    async with serving(redis=valkey.url) as other:
        done = await other.done()
    assert is_right(done)
    assert by_tier(done) == {"redis": BLOCKS * CHUNK}


async def test_blocks_that_the_server_has_lost_are_saved_again(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)
    engine, prompt = Watching(valkey), [(7 * i) % 1000 for i in range(2 * len(PROMPT))]
    async with serving(engine, redis=valkey.url, **LONG) as client:
        await client.done()
        await flushed(client)
        with valkey.client() as server:
            server.flushdb()
        assert by_tier(await client.done(prompt)) == {"pool": BLOCKS * CHUNK}
        await flushed(client)
    assert engine.keys[-1] >= len(prompt) // CHUNK - 2
    async with serving(redis=valkey.url) as other:
        assert by_tier(await other.done(prompt)) == {"redis": len(prompt) // CHUNK * CHUNK}


async def test_a_short_prompt_is_written_after_its_answer_only(valkey: Server) -> None:
    engine = Watching(valkey)
    async with serving(engine, redis=valkey.url, chunk_size=CHUNK, long_prompt_chunks=8) as client:
        await client.done()
        await flushed(client)
    assert not any(engine.keys)


@pytest.mark.parametrize("kind", [NoToken, RuntimeError])
async def test_blocks_that_may_be_wrong_do_not_stay(valkey: Server, kind: type[Exception]) -> None:
    # Made here: an error that outlives the test keeps the frames, and so the jobs, that it went through.
    engine = Watching(valkey, error=kind("out of memory"))
    async with serving(engine, redis=valkey.url, **LONG) as client:
        await status_of(client.call())
        await flushed(client)
    assert engine.keys[-1] >= BLOCKS - 1
    with valkey.client() as server:
        assert server.dbsize() == 0


async def test_a_server_that_hangs_stops_no_prompt(valkey: Server) -> None:
    before = sample("baton_prefix_faults_total", reason="timeout")
    async with serving(redis=valkey.url, **{**LONG, "cache_budget_s": 0.05}) as client:
        with valkey.stalled():
            assert is_right(await client.done())
            await flushed(client)
    assert sample("baton_prefix_faults_total", reason="timeout") > before


async def test_other_prompts_are_computed_while_one_waits_for_the_server(valkey: Server) -> None:
    async with serving(redis=valkey.url, **LONG) as client:
        with valkey.stalled():
            # The look-up of the first prompt waits as well, so this one writes only.
            waiting = asyncio.create_task(client.done(cache=CachePolicy.WRITE))
            await computed(client, 2 * CHUNK)
            assert is_right(await client.done(cache=CachePolicy.OFF))
            assert not waiting.done()
        assert is_right(await waiting)
        await flushed(client)


async def test_a_prompt_that_is_given_up_frees_its_pages_while_the_server_hangs(valkey: Server) -> None:
    async with serving(redis=valkey.url, **LONG) as client:
        with valkey.stalled():
            call, reading = client.begin(cache=CachePolicy.WRITE)
            await computed(client, 2 * CHUNK)
            call.cancel()
            await asyncio.wait({reading})
            await client.pages_back()


async def computed(client: Client, tokens: int) -> None:
    """Return when the only prompt has no more than so many tokens done, and waits."""
    await client.status(lambda status: 0 < status.load.pending_tokens <= len(PROMPT) - tokens)


class Faulty(FakeEngine):
    """Fails once in the chunk that begins at `at`."""

    at = -1

    def launch(self, chunks: Any = (), **kwargs: Any) -> Any:
        if chunks[0].start == self.at:
            self.at = -1
            raise RuntimeError("no memory")
        return super().launch(chunks, **kwargs)


async def test_a_fault_of_the_engine_leaves_nothing_cached() -> None:
    engine = Faulty()
    async with serving(engine, chunk_size=40) as client:
        await client.done(PROMPT[50:])
        engine.at = 40
        with pytest.raises(Exception, match="no memory"):
            await client.done()
        assert client.app.engine.stats().cached == 0
        assert (await client.done()).cached_tokens == 0


async def test_pages_of_a_prompt_that_failed_are_not_given_to_those_who_waited_for_them() -> None:
    gate = Gate()
    engine = Faulty(chunk_time=1.0, delay=gate)
    engine.at = 40
    async with serving(engine, chunk_size=40) as client:
        first = asyncio.create_task(client.done())
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT[:80], 1, 2]))
        await client.status(lambda status: status.load.requests_without_token == 2)
        gate.open()
        with pytest.raises(Exception, match="no memory"):
            await first
        done = await other
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT[:80], 1, 2], 1)[0]


async def test_prompts_that_begin_alike_are_computed_once_though_they_come_together() -> None:
    layers = FakeEngine().spec.kv_format.layers
    async with gated(chunk_size=40) as (client, gate):
        before = prefilled()
        first = asyncio.create_task(client.done())
        await gate.reached()
        others = [asyncio.create_task(client.done([*PROMPT[:80], 1, 2, i])) for i in range(3)]
        await client.status(lambda status: status.load.requests_without_token >= 3)
        gate.pass_layers(2 * layers)
        gate.open()
        assert (await first).cached_tokens == 0
        for i, other in enumerate(others):
            done = await other
            assert by_tier(done) == {"pool": 80}
            assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT[:80], 1, 2, i], 1)[0]
        assert since(before) == {"computed": 109, "pool": 240}


@pytest.mark.parametrize("begun", [True, False])
async def test_a_short_prompt_waits_for_a_long_one_only_while_that_is_at_it(begun: bool) -> None:
    short, long = [*PROMPT[:64], *[1] * 16], [*PROMPT[:64], *[2] * 336]
    async with gated() as (client, gate):
        running = asyncio.create_task(client.done(long if begun else [3] * 16))
        await gate.reached()
        if not begun:
            others = asyncio.create_task(client.done(long))
            await client.status(lambda status: status.load.pages_used == 26)
        waiting = asyncio.create_task(client.done(short))
        await client.status(
            lambda status: status.load.requests_without_token == 2 if begun else status.load.pages_used == 31
        )
        gate.open()
        await running
        assert by_tier(await waiting) == ({"pool": 64} if begun else {})
        if not begun:
            await others


@pytest.mark.parametrize(("length", "common", "cached"), [(60, 50, {}), (90, 48, {"pool": 48})])
async def test_a_prompt_that_begins_alike_waits_until_a_page_is_whole_unless_none_will_be(
    length: int, common: int, cached: dict[str, int]
) -> None:
    async with gated(sizes={"page_size": 64}, chunk_size=60) as (client, gate):
        first = asyncio.create_task(client.done(PROMPT[:length]))
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT[:common], 1, 2]))
        if cached:
            await client.status(lambda status: status.load.requests_without_token == 2)
        else:
            await client.status(lambda status: status.load.pages_used == 2)
        gate.open()
        await first
        assert by_tier(await other) == cached


async def test_one_that_waited_for_another_goes_on_when_that_one_ends() -> None:
    async with gated() as (client, gate):
        first, reading = client.begin()
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT, 1]))
        await client.status(lambda status: status.load.pages_used == 7 and status.load.requests_without_token == 2)
        await client.cancel(first, reading)
        gate.open()
        done = await other
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT, 1], 1)[0]
