"""A prompt asked again, whose blocks and end are cached, is not computed: from host memory, and from a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.kv.prefix import MemoryPrefixCache, Payload
from baton.kv.prefix.redis import key_prefix
from baton.kv.prefix.worth import Decision, Worth
from baton.request import CachePolicy, SamplingParams
from prefill_svc.ends import AT_ONCE
from tests.prefill import (
    PROMPT,
    WAIT_S,
    Gate,
    by_tier,
    decode,
    decoder,
    fetch_all,
    prefilled,
    serving,
    since,
)
from tests.prompt_ends import ask, calls, ends, ends_since, pulled, soil
from tests.redis_server import Server

HOST = {"cache_memory": 64 << 20}
LENGTHS = (5, 15, 16, 17, 96, 100)
SEEDED = SamplingParams(n=6, max_tokens=8, temperature=0.9, seed=11, logprobs=2)


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


def whole(tier: str, pages: str, length: int) -> dict[str, int]:
    """What a prompt has from where, once its end is cached: Redis is not asked for that alone."""
    blocks = length // 16 * 16
    if pages == "dropped":
        return {tier: length} if tier == "host" or blocks else {}
    rest = {tier: length - blocks} if tier == "host" else {}
    counts = {"pool": blocks if tier == "host" else min(blocks, length - 1), **rest}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pages", ["kept", "dropped"])
@pytest.mark.parametrize("tier", ["host", "redis"])
async def test_the_third_time_a_prompt_is_not_computed(valkey: Server, tier: str, pages: str, length: int) -> None:
    """But for what Redis alone has, where it is not asked for blocks."""
    prompt, blocks = PROMPT[:length], length // 16 * 16
    spared = {tier if pages == "dropped" else "pool": min(blocks, length - 1)} if blocks else {}
    last = whole(tier, pages, length)
    used = (0, int(sum(last.values()) == length))
    settings = HOST if tier == "host" else {"redis": valkey.url}
    async with serving(**settings) as client:
        for time, cached, put_used in ((1, {}, (0, 0)), (2, spared, (1, 0)), (3, last, used), (4, last, used)):
            before, counted = prefilled(), ends()
            done, handoff, tokens = await pulled(client, prompt, f"t{time}")
            assert by_tier(done) == cached, f"time {time}"
            computed = length - sum(cached.values())
            assert since(before) == {**({"computed": computed} if computed else {}), **cached}
            assert ends_since(counted) == put_used
            assert handoff.cached_tokens == done.cached_tokens == length - computed
            assert tokens == expected_tokens(prompt, 5)
            if pages == "dropped":
                client.app.engine.drop_cached()


@pytest.mark.parametrize("tail", [0, 5])
async def test_a_long_prompt_is_not_computed_the_second_time(valkey: Server, tail: int) -> None:
    """Nor by another worker; one that has most of it in common with others is as any short one."""
    prompt = [(7 * i) % 1000 for i in range(AT_ONCE * 16 + tail)]
    other = [*prompt[:96], *range(AT_ONCE * 16 - 96 + tail)]
    async with serving(redis=valkey.url, **HOST) as first, serving(redis=valkey.url) as second:
        await ask(first, prompt)
        for client in (first, second):
            before = prefilled()
            done, _, tokens = await pulled(client, prompt, "t")
            assert done.cached_tokens == len(prompt)
            assert "computed" not in since(before)
            assert tokens == expected_tokens(prompt, 5)
        for cached in (96, len(other) // 16 * 16 - (not tail), len(other)):
            assert (await ask(first, other)).cached_tokens == cached


@pytest.mark.parametrize("length", [16, 37, 96, 100])
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 3}, HOST])
async def test_another_worker_finds_the_end_at_its_first_time(
    valkey: Server, length: int, settings: dict[str, Any]
) -> None:
    prompt = PROMPT[:length]
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url, **settings) as second:
        await ask(first, prompt, 2)
        before = prefilled()
        done, _, tokens = await pulled(second, prompt, "t")
        assert by_tier(done) == {"redis": length}
        assert since(before) == {"redis": length}
        assert tokens == expected_tokens(prompt, 5)


async def test_another_worker_goes_on_to_find_it_when_it_has_the_blocks(valkey: Server) -> None:
    """As one does that was started anew: it never put the end itself, and has it in host memory from then on."""
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url, **HOST) as second:
        await ask(first, times=2)
        for cached in ({"redis": 100}, {"pool": 96, "host": 4}, {"pool": 96, "host": 4}):
            before = prefilled()
            assert by_tier(await ask(second)) == cached
            assert since(before) == cached
        valkey.kill()
        assert by_tier(await ask(second)) == cached
        second.app.engine.drop_cached()
        assert by_tier(await ask(second)) == {"host": 100}


@pytest.mark.parametrize(("length", "pool"), [(100, 96), (96, 95)])
async def test_without_host_memory_the_last_tokens_are_computed_and_nothing_is_read(
    valkey: Server, length: int, pool: int
) -> None:
    """What Redis has of a prompt whose blocks are in the pages would cost a round trip of its own."""
    prompt = PROMPT[:length]
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url) as second:
        await ask(first, prompt, 2)
        assert by_tier(await ask(second, prompt)) == {"redis": length}
        asked = calls(valkey, "strlen", "get")
        for name in ("t1", "t2"):
            before = prefilled()
            done, _, tokens = await pulled(second, prompt, name)
            assert by_tier(done) == {"pool": pool}
            assert since(before) == {"pool": pool, "computed": length - pool}
            assert tokens == expected_tokens(prompt, 5)
        assert calls(valkey, "strlen", "get") == asked


async def test_progress_tells_that_all_is_there() -> None:
    async with serving(**HOST) as client:
        await ask(client, times=2)
        events = await client.events()
        told = [(event.progress.computed_tokens, event.progress.cached_tokens) for event in events[:-1]]
        assert told == [(100, 100)]


@pytest.mark.parametrize(("length", "cached"), [(100, 96), (96, 95)])
async def test_without_its_end_the_last_token_of_a_prompt_is_computed(valkey: Server, length: int, cached: int) -> None:
    prompt = PROMPT[:length]
    async with serving(redis=valkey.url) as client:
        with valkey.client() as redis:
            await ask(client, prompt)
            blocks = set(redis.scan_iter())
            await ask(client, prompt)
            (end,) = set(redis.scan_iter()) - blocks
            redis.delete(end)
            client.app.engine.drop_cached()
            before = prefilled()
            done, _, tokens = await pulled(client, prompt, "t")
            assert by_tier(done) == {"redis": cached}
            assert since(before)["computed"] == length - cached
            assert tokens == expected_tokens(prompt, 5)
            assert redis.exists(end), "it is put again at once"
        client.app.engine.drop_cached()
        assert by_tier(await client.done(prompt)) == {"redis": length}


@pytest.mark.parametrize("length", [96, 100])
async def test_from_a_block_that_is_lost_on_all_is_computed(valkey: Server, length: int) -> None:
    prompt = PROMPT[:length]
    async with serving(redis=valkey.url) as client:
        await ask(client, prompt, 2)
        kv_format = client.app.engine.spec.kv_format
        with valkey.client() as redis:
            digest = client.app.worker._preparing.blocks.digests(prompt, b"")[3]
            assert redis.delete(f"{key_prefix(kv_format)}{digest.hex()}") == 1
        client.app.engine.drop_cached()
        before = prefilled()
        done, _, tokens = await pulled(client, prompt, "t")
        assert by_tier(done) == {"redis": 48}
        assert since(before) == {"computed": length - 48, "redis": 48}
        assert tokens == expected_tokens(prompt, 5)


class Vanishing(MemoryPrefixCache):
    """Finds more than it gives: one block of many, and an end, which is asked for alone."""

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        return (await super().fetch(digests))[:1]


@pytest.mark.parametrize("length", [96, 100])
async def test_an_end_is_of_no_use_without_the_blocks_before_it(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr("baton.worker.start.open_prefix_cache", lambda *_, **__: Vanishing())
    prompt = PROMPT[:length]
    async with serving() as client:
        await ask(client, prompt, 2)
        client.app.engine.drop_cached()
        counted = ends()
        done, _, tokens = await pulled(client, prompt, "t")
        assert by_tier(done) == {"host": 16}
        assert ends_since(counted)[1] == 0
        assert tokens == expected_tokens(prompt, 5)


@pytest.mark.parametrize(("worth", "cached"), [(0, 0), (3, 48)])
async def test_an_end_whose_blocks_are_not_worth_it_is_left(
    monkeypatch: pytest.MonkeyPatch, worth: int, cached: int
) -> None:
    async with serving(**HOST) as client:
        await ask(client, times=2)
        client.app.engine.drop_cached()
        monkeypatch.setattr(Worth, "decide", lambda self, hits, *_: Decision(hits.blocks, worth))
        done, _, tokens = await pulled(client, PROMPT, "t")
        assert by_tier(done) == ({"host": cached} if cached else {})
        assert tokens == expected_tokens(PROMPT, 5)


async def test_pages_that_lost_their_blocks_after_the_look_up_are_loaded_with_the_end() -> None:
    gate = Gate()
    engine = FakeEngine(chunk_time=1.0, delay=gate, pages=16)
    async with serving(engine, **HOST) as client:
        gate.open()
        await ask(client, times=2)
        gate.close()
        big = asyncio.create_task(client.done([3] * 160))
        await gate.reached()
        waiting = asyncio.create_task(client.done())
        await client.status(lambda status: status.load.waiting == 2)
        engine.drop_cached()
        gate.open()
        await big
        done = await waiting
        assert by_tier(done) == {"host": 100}
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


@pytest.mark.parametrize("policy", CachePolicy)
async def test_only_who_reads_uses_an_end_and_only_who_writes_puts_it(valkey: Server, policy: CachePolicy) -> None:
    async with serving(redis=valkey.url, **HOST) as client:
        with valkey.client() as redis:
            await ask(client, times=3, cache=policy)
            assert redis.dbsize() == (7 if policy.writes else 0)
            done = await ask(client, times=1 if policy.writes else 3)
            assert (redis.dbsize(), done.cached_tokens) == (7, 100)
        assert (await ask(client, cache=policy)).cached_tokens == (100 if policy.reads else 0)


async def test_reading_alone_puts_no_end(valkey: Server) -> None:
    async with serving(redis=valkey.url) as client:
        await ask(client)
        done = await ask(client, times=3, cache=CachePolicy.READ)
        with valkey.client() as redis:
            assert (redis.dbsize(), done.cached_tokens) == (6, 96)


async def test_prompt_logprobs_use_no_end() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
    async with serving(**HOST) as client:
        await ask(client, times=2)
        before = prefilled()
        done = await ask(client, params=params)
        assert (done.cached_tokens, len(done.prompt_tokens)) == (0, 100)
        assert since(before) == {"computed": 100}
        assert (await ask(client)).cached_tokens == 100


@pytest.mark.parametrize("length", [5, 16, 100])
async def test_tenants_do_not_share_ends(valkey: Server, length: int) -> None:
    prompt = PROMPT[:length]
    async with serving(redis=valkey.url, **HOST) as client:
        await ask(client, prompt, 2, salt=b"a")
        for salt in (b"b", b""):
            client.app.engine.drop_cached()
            counted = ends()
            assert (await ask(client, prompt, salt=salt)).cached_tokens == 0
            assert ends_since(counted) == (0, 0)
        assert (await ask(client, prompt, salt=b"a")).cached_tokens == length


@pytest.mark.parametrize("length", [5, 96, 100])
async def test_prompts_that_take_turns_keep_their_own_ends(length: int) -> None:
    prompts = [[first, *PROMPT[1:length]] for first in (0, 1, 2)]
    async with serving(**HOST) as client:
        for time in (1, 2, 3):
            for prompt in prompts:
                done, _, tokens = await pulled(client, prompt, f"{time} {prompt[0]}")
                assert tokens == expected_tokens(prompt, 5)
                assert (done.cached_tokens == length) == (time == 3)


@pytest.mark.parametrize("prompt", [[*PROMPT[:99], 1], PROMPT[:99], [*PROMPT, 1], PROMPT[:96]])
@pytest.mark.parametrize("pages", ["kept", "dropped"])
async def test_other_prompts_with_the_same_blocks_have_ends_of_their_own(prompt: list[int], pages: str) -> None:
    async with serving(**HOST) as client:
        await ask(client, times=2)
        for _ in range(2):
            if pages == "dropped":
                client.app.engine.drop_cached()
            done = await ask(client, prompt)
            assert done.cached_tokens == min(96, len(prompt) - 1)
            assert done.first_tokens[0].token.token_id == expected_tokens(prompt, 1)[0]


@pytest.mark.parametrize("length", [5, 96, 100])
async def test_all_choices_of_a_prompt_are_sampled_from_its_end(length: int) -> None:
    prompt, choices = PROMPT[:length], (0, 1, 5)
    async with serving(**HOST) as client:
        first, _, whole = [await ask(client, prompt, params=SEEDED, choices=choices) for _ in range(3)]
        assert (first.cached_tokens, whole.cached_tokens) == (0, length)
        assert [token.choice_index for token in whole.first_tokens] == list(choices)
        assert whole.first_tokens == first.first_tokens
        assert len({token.token.token_id for token in whole.first_tokens}) == 3
        # The end is that of the prompt, however it was sampled.
        greedy = await ask(client, prompt)
        assert greedy.cached_tokens == length
        assert greedy.first_tokens[0].token.token_id == expected_tokens(prompt, 1)[0]


@pytest.mark.parametrize(("prompt", "output"), [(40, 30), (40, 24), (3, 5)])
async def test_a_replay_has_an_end_too_and_counts_only_its_prompt_as_cached(prompt: int, output: int) -> None:
    ids = PROMPT[:prompt]
    tokens = expected_tokens(ids, output + 5)
    params = SamplingParams(max_tokens=50, temperature=0.0)
    async with serving(**HOST) as client:
        await ask(client, ids, 2, output=tokens[:output], params=params)
        soil(client)
        before = prefilled()
        with decoder(5) as engine:
            handle = engine.reserve("r", prompt + output + 10)
            pulling = asyncio.create_task(client.fetch(engine, handle, "t", prompt + output))
            done = await client.done(ids, output=tokens[:output], params=params, transfer_id="t")
            assert decode(engine, handle, await pulling, 4) == tokens
        assert by_tier(done) == {name: count for name, count in _replayed(prompt, output).items() if count}
        assert "computed" not in since(before)


def _replayed(prompt: int, output: int) -> dict[str, int]:
    pool = min(prompt, (prompt + output) // 16 * 16)
    return {"pool": pool, "host": prompt - pool}


async def test_a_call_cancelled_while_its_end_is_fetched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held()
    monkeypatch.setattr("baton.worker.start.open_prefix_cache", lambda *_, **__: held)
    async with serving() as client:
        await ask(client, times=2)
        held.go.clear()
        call = client.call(transfer_id="t")
        async with asyncio.timeout(WAIT_S):
            await held.come.wait()
        call.cancel()
        await client.status(lambda status: status.load.waiting == 0)
        held.go.set()
        await client.pages_back()
        assert (await client.done()).cached_tokens == 100


class _Held(MemoryPrefixCache):
    """Gives nothing while `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.come, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        self.come.set()
        await self.go.wait()
        return await super().fetch(digests)


async def test_a_dead_redis_costs_an_end_and_no_more(valkey: Server) -> None:
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url) as client:
        await ask(first, times=2)
        await ask(client, PROMPT[:48])
        valkey.kill()
        done, _, tokens = await pulled(client, PROMPT, "t")
        assert by_tier(done) == {"pool": 48}
        assert tokens == expected_tokens(PROMPT, 5)
