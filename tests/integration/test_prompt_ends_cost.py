"""What ends of prompts cost: no round trip and no fetch for nothing, and no memory that grows with the jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix import MemoryPrefixCache, Payload
from baton.kv.prefix.contract import FetchRate, Hits
from baton.kv.prefix.redis import RedisPrefixCache
from baton.request import CachePolicy, TokenInfo
from prefill_svc.ends import AT_ONCE
from prefill_svc.job import Job
from prefill_svc.preparing import MOST_ENDS
from tests.prefill import PROMPT, WAIT_S, Client, Gate, by_tier, fetch_all, prefilled, serving, since
from tests.prompt_ends import ask, calls, ends, ends_since, pulled
from tests.redis_server import Server

HOST = {"cache_memory": 64 << 20}


async def prepared(client: Client, jobs: int) -> list[Job]:
    """The jobs of a worker, once there are so many and all have been looked up, and loaded if they got pages."""
    await client.status(lambda status: status.load.waiting + status.load.running == jobs)
    found: list[Job] = list(client.app.worker._jobs.values())
    while tasks := {job.preparing for job in found if job.preparing is not None and not job.preparing.done()}:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait(tasks)
    return found


async def test_blocks_that_host_memory_has_cost_no_question_to_redis(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new prompt on an old prefix has no end; Redis need not be asked for that."""
    fetch_all(monkeypatch)
    async with serving(redis=valkey.url, **HOST) as client:
        await ask(client)
        asked = calls(valkey, "strlen", "get")
        for tail in ([], [5], [5, 6]):
            client.app.engine.drop_cached()
            assert by_tier(await ask(client, [*PROMPT[:96], *tail])) == {"host": 96 - (not tail)}
        assert calls(valkey, "strlen", "get") == asked
        await ask(client, [*PROMPT, *range(12)])
        assert calls(valkey, "strlen", "get") == asked + 2, "for the last block, and for the end along with it"


@pytest.mark.parametrize("pool", [0, 32])
async def test_an_end_is_not_fetched_if_the_hits_are_not_worth_it(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, pool: int
) -> None:
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url) as second:
        await ask(first, times=2)
        monkeypatch.setattr(RedisPrefixCache, "rates", lambda _: {"redis": FetchRate(1.0, 1e3)})
        second.app.worker._scheduler.rate.add(100_000, 1.0)
        if pool:
            await ask(second, PROMPT[:pool])
        fetched, counted = calls(valkey, "get"), ends()
        done = await ask(second)
        assert by_tier(done) == ({"pool": pool} if pool else {})
        assert calls(valkey, "get") == fetched
        assert ends_since(counted)[1] == 0


class Counted(MemoryPrefixCache):
    """Gives nothing until `all_asked` look-ups have been answered."""

    def __init__(self) -> None:
        super().__init__()
        self.all_asked, self.go = 0, asyncio.Event()

    async def lookup(self, digests: Sequence[bytes], end: bytes = b"") -> Hits:
        hits = await super().lookup(digests, end)
        self.all_asked -= 1
        if self.all_asked <= 0:
            self.go.set()
        return hits

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        await self.go.wait()
        return await super().fetch(digests)


async def test_only_some_jobs_hold_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others compute their last tokens: jobs that wait for pages must not fill the memory, whoever comes first."""
    fetch_all(monkeypatch)
    cache = Counted()
    monkeypatch.setattr("baton.worker.start.open_prefix_cache", lambda *_, **__: cache)
    gate, callers = Gate(), 3 * MOST_ENDS
    engine = FakeEngine(chunk_time=1.0, delay=gate, pages=20)
    async with serving(engine) as client:
        gate.open()
        await ask(client, times=2)
        engine.drop_cached()
        gate.close()
        long = asyncio.create_task(client.done([9] * 310))
        await gate.reached()
        cache.all_asked = callers
        cache.go.clear()
        waiting = [asyncio.create_task(client.done()) for _ in range(callers)]
        jobs = await prepared(client, callers + 1)
        assert sum(job.end is not None for job in jobs) == MOST_ENDS
        gate.open()
        await long
        answers = await asyncio.gather(*waiting)
        assert {done.first_tokens[0].token.token_id for done in answers} == set(expected_tokens(PROMPT, 1))
        assert sorted(done.cached_tokens for done in answers) == [96] * (callers - MOST_ENDS) + [100] * MOST_ENDS
        assert by_tier(await ask(client)) == {"pool": 96, "host": 4}, "those that are over hold none"


@pytest.mark.parametrize("length", [96, 100])
async def test_a_prompt_that_is_cached_whole_waits_for_no_other(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    fetch_all(monkeypatch)
    gate, prompt = Gate(), PROMPT[:length]
    engine = FakeEngine(chunk_time=1.0, delay=gate)
    async with serving(engine, **HOST) as client:
        gate.open()
        await ask(client, prompt, 2)
        engine.drop_cached()
        gate.close()
        computing = asyncio.create_task(client.done(prompt, cache=CachePolicy.WRITE))
        await gate.reached()
        second = asyncio.create_task(client.done(prompt))
        _, job = await prepared(client, 2)
        assert job.pages is not None
        assert job.found == length
        gate.open()
        await computing
        assert by_tier(await second) == {"host": length}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 2, 33])
async def test_blocks_of_one_token(monkeypatch: pytest.MonkeyPatch, length: int, page_size: int) -> None:
    """All tokens are in blocks, so an end has no KV; without it the last block is of no use."""
    fetch_all(monkeypatch)
    prompt, pool = PROMPT[:length], length // page_size * page_size
    whole = {name: count for name, count in (("pool", pool), ("host", length - pool)) if count}
    but_last = {"pool": length - 1} if page_size == 1 and length > 1 else {"host": length - 1} if length > 1 else {}
    async with serving(FakeEngine(page_size=page_size, block_size=1, pages=64), **HOST) as client:
        for name, cached in (("t1", {}), ("t2", whole if length >= AT_ONCE else but_last), ("t3", whole)):
            before = prefilled()
            done, _, tokens = await pulled(client, prompt, name)
            assert by_tier(done) == cached
            assert since(before).get("computed", 0) == length - sum(cached.values())
            assert tokens == expected_tokens(prompt, 5)
        client.app.engine.drop_cached()
        assert by_tier(await ask(client, prompt)) == {"host": length}


async def test_second_writes_an_end_at_its_next_use_from_host_memory(valkey: Server) -> None:
    async with serving(redis=valkey.url, cache_writes="second", **HOST) as client:
        with valkey.client() as redis:
            for cached, keys in ((0, 0), (96, 6), (100, 7), (100, 7)):
                assert (await ask(client)).cached_tokens == cached
                assert redis.dbsize() == keys
        async with serving(redis=valkey.url) as other:
            assert by_tier(await ask(other)) == {"redis": 100}


async def test_jobs_hold_the_hidden_state_alone_once_the_end_is_in_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of it would keep a whole block."""
    fetch_all(monkeypatch)
    seen: list[Any] = []
    engine = FakeEngine()
    real = engine.sample

    def sample(hidden: bytes | memoryview, states: Sequence[Any]) -> tuple[TokenInfo, ...]:
        (job,) = client.app.worker._jobs.values()
        assert job.end is not None
        seen.append((type(hidden), len(hidden), job.end.kv))
        return real(hidden, states)

    monkeypatch.setattr(engine, "sample", sample)
    async with serving(engine, **HOST) as client:
        await ask(client, times=3)
    assert seen == [(bytes, engine.spec.hidden_bytes, b"")]


async def test_a_fetched_end_tells_no_rate(valkey: Server) -> None:
    """One record, which is there as soon as it begins to be: by that alone any link would seem quick."""
    kv_format = KvFormat(tuple(KvPart(name, "bfloat16", (8, 128)) for name in ("k", "v")), layers=8, block_size=16)
    cache, names = RedisPrefixCache(valkey.url, kv_format, "secret"), [os.urandom(32) for _ in range(4)]
    assert all(cache.put(name, os.urandom(kv_format.block_bytes)) for name in names)
    await cache.flush()
    assert len(await cache.fetch(names)) == 4
    rate = cache.rates()["redis"].bytes_per_s
    for name in names:
        assert len(await cache.fetch([name])) == 1
    assert cache.rates()["redis"].bytes_per_s == pytest.approx(rate, rel=1e-9)
    await cache.close()
