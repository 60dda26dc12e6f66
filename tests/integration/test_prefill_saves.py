"""Long prompts in the prefill service with a real Valkey: saved while they are computed, whatever the server does."""

import asyncio
from typing import Any

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import NoToken
from baton.request import CachePolicy
from tests.metrics import sample
from tests.prefill import PROMPT, WAIT_S, Client, by_tier, fetch_all, flushed, read, serving, status_of
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
            call = client.call(cache=CachePolicy.WRITE)
            reading = asyncio.create_task(read(call))
            await computed(client, 2 * CHUNK)
            call.cancel()
            await asyncio.wait({reading})
            await client.pages_back()


async def computed(client: Client, tokens: int) -> None:
    """Return when the only prompt has no more than so many tokens done, and waits."""
    await client.status(lambda status: 0 < status.load.pending_tokens <= len(PROMPT) - tokens)
