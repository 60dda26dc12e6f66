"""The prefill service and its prefix caches: pages, host memory, a real server, and a decode worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import Cancelled
from baton.kv.prefix.contract import FetchRate, Payload
from baton.kv.prefix.fetch_cost import FetchCostModel, FetchDecision
from baton.request import CachePolicy, SamplingParams
from baton.telemetry.metrics import TRANSFER_FAULTS
from tests.metrics import count, sample
from tests.peers import exporter
from tests.prefill import (
    PROMPT,
    WAIT_S,
    Client,
    Gate,
    by_tier,
    decode,
    decoder,
    fetch_all,
    flushed,
    gated,
    prefilled,
    serving,
    since,
)
from tests.prefix_cache import MemoryPrefixCache
from tests.redis_server import Server

HOST = {"kv_home": "device", "host_memory": 64 << 20}


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


@pytest.mark.parametrize("tier", ["pool", "host", "redis", "peer"])
@pytest.mark.parametrize(("again", "cached"), [(PROMPT, 96), (PROMPT[:96], 95), (PROMPT[:5], 0)])
async def test_a_prefix_is_not_computed_twice(valkey: Server, tier: str, again: list[int], cached: int) -> None:
    settings = {"host": HOST, "redis": {"redis": valkey.url}}.get(tier, {})
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(serving(**settings))
        second, source = client, None
        if tier == "peer":
            second = await stack.enter_async_context(serving(chunk_size=3))
            exporting, held = await stack.enter_async_context(exporter())
            source = exporting.offer(held, len(again) // 16 * 16) if len(again) >= 16 else None
        else:
            assert (await client.done()).cached_tokens == 0
            await flushed(client)
        if tier == "redis":
            second = await stack.enter_async_context(serving(redis=valkey.url, chunk_size=3))
        if tier == "host":
            client.app.engine.drop_cached()
        before = prefilled()
        with decoder(5) as engine:
            handle = engine.reserve("r", 110)
            pulling = asyncio.create_task(second.fetch(engine, handle, "t", len(again)))
            done = await second.done(again, transfer_id="t", source=source)
            assert by_tier(done) == ({tier: cached} if cached else {})
            assert since(before) == {"computed": len(again) - cached, **({tier: cached} if cached else {})}
            handoff = await pulling
            assert decode(engine, handle, handoff, 4) == expected_tokens(again, 5)


async def test_all_tiers_give_their_part(valkey: Server) -> None:
    async with (
        serving(redis=valkey.url) as other,
        serving(redis=valkey.url, **HOST) as client,
        exporter() as (exporting, held),
    ):
        await client.done(PROMPT[:34])
        await flushed(client)
        client.app.engine.drop_cached()
        await client.done(PROMPT[:16])
        await other.done(PROMPT[:70])
        await flushed(other)
        done = await client.done(source=exporting.offer(held, 96))
        assert by_tier(done) == {"pool": 16, "host": 16, "redis": 32, "peer": 32}
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]
        assert exporting.released == 1


class Vanishing(MemoryPrefixCache):
    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        return (await super().fetch(digests))[:1]


async def test_a_peer_makes_up_for_blocks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.prefix_cache.open_prefix_cache", lambda *_, **__: Vanishing())
    async with serving() as client, exporter() as (exporting, held):
        await client.done(PROMPT[:70])
        await flushed(client)
        client.app.engine.drop_cached()
        done = await client.done(source=exporting.offer(held, 96))
        assert by_tier(done) == {"host": 16, "peer": 80}
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_replays_find_their_prompt_and_count_only_it_as_cached() -> None:
    tokens = expected_tokens(PROMPT[:40], 30)
    params = SamplingParams(max_tokens=50, temperature=0.0)
    async with serving() as client:
        for cached in (0, 40):
            done = await client.done(PROMPT[:40], output=tokens, params=params)
            assert done.cached_tokens == done.cached.pool == cached
            assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT[:40], 31)[-1]


async def test_prompt_logprobs_need_the_whole_prompt_computed_and_leave_it_for_others() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
    async with serving(**HOST) as client:
        for _ in range(2):
            done = await client.done(params=params)
            assert done.cached_tokens == 0
        assert len(await client.report(params=params)) == 100
        assert by_tier(await client.done()) == {"pool": 96}


@pytest.mark.parametrize("policy", CachePolicy)
async def test_a_request_uses_the_cache_as_it_says(valkey: Server, policy: CachePolicy) -> None:
    mine = [5, *PROMPT]
    async with serving(redis=valkey.url, **HOST) as client, exporter() as (exporting, held):
        await client.done()
        await flushed(client)
        for _ in range(2):
            cached = 96 if policy.reads else 0
            assert (await client.done(cache=policy)).cached_tokens == cached
            await flushed(client)
            client.app.engine.drop_cached()
        if not policy.reads:
            assert (await client.done(cache=policy, source=exporting.offer(held, 96))).cached_tokens == 0
        with valkey.client() as redis:
            keys = redis.dbsize()
            await client.done(mine, cache=policy)
            await flushed(client)
            assert redis.dbsize() == (keys + 6 if policy.writes else keys)
        assert (await client.done(mine)).cached_tokens == (96 if policy.writes else 0)


async def test_loaded_blocks_of_an_aborted_job_stay() -> None:
    gate = Gate()
    gate.open()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate), **HOST) as client:
        await client.done()
        await flushed(client)
        client.app.engine.drop_cached()
        gate.close()
        call, reading = client.begin()
        await gate.reached()
        await client.cancel(call, reading)
        gate.open()
        await client.pages_back()
        assert by_tier(await client.done()) == {"pool": 96}


class HeldCache(MemoryPrefixCache):
    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        await self.go.wait()
        return await super().fetch(digests)


async def test_many_loaded_blocks_are_shared_slice_by_slice(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class Publishing(FakeEngine):
        def publish(self, handle: Any, digests: Sequence[bytes]) -> None:
            published.append(len(digests))
            super().publish(handle, digests)

    monkeypatch.setattr("baton.worker.prefix_cache.PUBLISH_BLOCKS", 2)
    published: list[int] = []
    async with serving(redis=valkey.url) as client:
        await client.done()
        await flushed(client)
    async with serving(Publishing(), redis=valkey.url) as client:
        assert by_tier(await client.done()) == {"redis": 96}
        assert by_tier(await client.done()) == {"pool": 96}
    assert published[:3] == [2, 4, 6]


class Evicting(FakeEngine):
    """Notes each slice, and how many turns of the loop have passed before it."""

    def __init__(self) -> None:
        super().__init__(pages=14)
        self.turns: list[int] = []
        self.on_slice: Callable[[], object] = lambda: None
        self._turns = 0

    def evict_for(self, *args: Any) -> bool:
        if not super().evict_for(*args):
            return False
        self.turns.append(self._turns)
        asyncio.get_running_loop().call_soon(self._turn)
        self.on_slice()
        return True

    def _turn(self) -> None:
        self._turns += 1


REPLACING = [*PROMPT[:32], *PROMPT[:31:-1], *range(90)]
"""A prompt that begins like PROMPT, and whose pages replace other cached blocks."""


@contextlib.asynccontextmanager
async def evicting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Evicting, Client]]:
    """A worker that evicts two pages at a time, whose pages are full of the cached blocks of two prompts."""
    monkeypatch.setattr("baton.kv.pool.SLICE_PAGES", 2)
    monkeypatch.setattr("prefill_svc.prefix.SLICE_NODES", 2)
    engine = Evicting()
    async with serving(engine) as client:
        await client.done()
        await client.done([*range(200, 290)])
        assert not engine.turns, "nothing was cached that had to go"
        yield engine, client


async def test_blocks_that_a_long_prompt_replaces_are_evicted_a_slice_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with evicting(monkeypatch) as (engine, client):
        assert by_tier(await client.done(REPLACING)) == {"pool": 32}
        assert engine.turns == [0, 1, 2]


async def test_no_more_is_evicted_for_a_prompt_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with evicting(monkeypatch) as (engine, client):

        def abort() -> None:
            for job in list(client.app.worker._live_jobs):
                client.app.worker.abort(job, Cancelled("no longer wanted"))

        engine.on_slice = abort
        with pytest.raises(grpc.aio.AioRpcError, match="no longer wanted"):
            await client.done(REPLACING)
        await client.pages_back()
        assert engine.turns == [0]


async def test_the_load_tells_what_is_left_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[HeldCache] = []

    def open_cache(*_: Any, **__: Any) -> HeldCache:
        caches.append(HeldCache())
        return caches[-1]

    monkeypatch.setattr("baton.worker.prefix_cache.open_prefix_cache", open_cache)
    monkeypatch.setattr(FetchCostModel, "decide", lambda self, hits, *_: FetchDecision(hits.blocks, hits.blocks // 2))
    async with serving() as client:
        await client.done()
        await flushed(client)
        client.app.engine.drop_cached()
        again = asyncio.create_task(client.done())
        await client.status(lambda status: status.load.pages_used == 7 and status.load.pending_tokens == 100 - 48)
        caches[0].go.set()
        assert by_tier(await again) == {"host": 48}


async def test_an_aborted_job_leaves_what_it_has_computed() -> None:
    layers = FakeEngine().spec.kv_format.layers
    async with gated(chunk_size=40) as (client, gate):
        call, reading = client.begin()
        gate.pass_layers(layers)
        await gate.reached(layers + 1)
        await client.cancel(call, reading)
        gate.open()
        await client.pages_back()
        assert by_tier(await client.done()) == {"pool": 32}


async def test_blocks_evicted_after_the_lookup_are_looked_up_again() -> None:
    gate = Gate()
    engine = FakeEngine(chunk_time=1.0, delay=gate, pages=16)
    async with serving(engine, **HOST) as client:
        gate.open()
        await client.done()
        await flushed(client)
        gate.close()
        big = asyncio.create_task(client.done([3] * 160))
        await gate.reached()
        waiting = asyncio.create_task(client.done())
        await client.status(lambda status: status.load.requests_without_token == 2)
        engine.drop_cached()
        gate.open()
        await big
        assert by_tier(await waiting) == {"host": 96}


class Rated(MemoryPrefixCache):
    """Says that it gives so many bytes a second."""

    bytes_per_s = 1.0

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        return {"host": FetchRate(0.0, self.bytes_per_s)}


@pytest.mark.parametrize(("bytes_per_s", "cached", "decision"), [(1.0, 0, "none"), (1e15, 96, "all")])
async def test_only_what_is_quicker_to_fetch_than_to_compute_is_fetched(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, cached: int, decision: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("baton.worker.prefix_cache.open_prefix_cache", lambda *_, **__: Rated())
    monkeypatch.setattr(Rated, "bytes_per_s", bytes_per_s)
    async with serving() as client:
        await client.done()
        await flushed(client)
        client.app.engine.drop_cached()
        before = decided(decision)
        assert (await client.done()).cached_tokens == cached
        assert decided(decision) == before + 1


def decided(decision: str) -> float:
    return sample("baton_prefix_decisions_total", decision=decision)


async def test_watchers_are_told_of_blocks() -> None:
    async with serving() as client:
        await client.done()
        told = await client.status(lambda status: bool(status.prefixes.stored))
        assert told.prefixes.reset
        assert len(told.prefixes.stored) == 6 * 8
        assert client.app.engine.stats().cached == 6


@pytest.mark.parametrize("fault", ["gone", "unknown", "stranger", "silent", "malformed"])
async def test_a_peer_that_fails_is_only_slower(fault: str) -> None:
    async with serving(cache_budget_s=0.1) as client, exporter() as (exporting, held):
        source = exporting.offer(held, 96)
        if fault == "gone":
            source.export.shards[0].kv_address = "127.0.0.1:1"
        elif fault == "unknown":
            source.export.transfer_id = "another"
        elif fault == "stranger":
            source.export.incarnation = "another"
        elif fault == "malformed":
            source.export.shards[0].kv_address = "nowhere"
        else:
            source = exporting.source("announced", 96)
            exporting.exports.announce("announced")
        done = await client.done(source=source)
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_a_peer_that_holds_another_prefix_is_a_miss() -> None:
    """It sends as many tokens as were named, of another prompt; and one that says nothing of what it holds."""
    faults = TRANSFER_FAULTS.labels("wrong_prefix")
    before = count(faults)
    async with serving() as client, exporter([*PROMPT[:95], PROMPT[95] + 1, *PROMPT[96:]]) as (exporting, held):
        for prompt in ([*PROMPT[:95], PROMPT[95] + 1], PROMPT[:80] + PROMPT[:16]):
            done = await client.done(source=exporting.offer(held, 96, prompt))
            assert done.cached_tokens == 0
            assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]
            client.app.engine.drop_cached()
    assert count(faults) == before + 2


async def test_a_call_cancelled_during_a_fetch_from_a_peer_leaves_nothing() -> None:
    async with serving(cache_budget_s=WAIT_S) as client, exporter() as (exporting, _):
        exporting.exports.announce("announced")
        source = exporting.source("announced", 96)
        call = client.call(transfer_id="t", source=source)
        await client.status(lambda status: status.load.pages_used == 7)
        call.cancel()
        async with asyncio.timeout(WAIT_S / 2):
            await client.pages_back()


async def test_a_peer_that_says_more_than_it_has_is_only_slower() -> None:
    async with serving() as client, exporter() as (exporting, held):
        source = exporting.offer(held, 48)
        source.tokens = 96
        assert (await client.done(source=source)).cached_tokens == 0
        client.app.engine.drop_cached()
        source = exporting.offer(held, 50)
        assert by_tier(await client.done([*PROMPT[:50], 8], source=source)) == {"peer": 48}
