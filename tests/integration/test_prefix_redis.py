"""The Redis prefix cache against real servers that stall, die, restart, lie, fill up and forget."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.kv.format import KvFormat
from baton.kv.prefix.redis.cache import LOOKUP_LANES, RedisPrefixCache
from baton.kv.prefix.redis.nodes import RedisCalls
from tests.prefix_redis import (
    BLOCKS,
    BUDGET_S,
    CLOCK,
    CODEC,
    DIGESTS,
    FORMAT,
    KEYS,
    dropped,
    faults,
    fill,
    found,
    hits,
    open_cache,
)
from tests.redis_server import Server, running


@pytest.fixture
async def cache(server: Server) -> AsyncIterator[RedisPrefixCache]:
    cache = open_cache(server.url)
    yield cache
    await cache.close()


async def test_records_expire(server: Server) -> None:
    cache = open_cache(server.url, ttl_s=77)
    await fill(cache)
    with server.client() as client:
        assert 0 < client.ttl(KEYS[0]) <= 77
    await cache.close()


async def test_a_too_long_value_is_read_only_in_part(server: Server, cache: RedisPrefixCache) -> None:
    """A writer without the secret may put one there once the look-up is over."""
    await fill(cache)
    assert await found(cache) == 6
    with server.client() as client:
        client.set(KEYS[1], CODEC.encode(DIGESTS[1], BLOCKS[1]) + bytes(8 << 20))
        client.config_resetstat()
        before = faults("truncated")
        assert len(await cache.fetch(DIGESTS)) == 1
        assert faults("truncated") == before + 1
        assert client.info("stats")["total_net_output_bytes"] < 1 << 20


async def test_a_key_of_another_type_is_a_miss_and_ends_a_fetch(
    server: Server, cache: RedisPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads are by position: those of the next window would be taken for the missing ones."""
    monkeypatch.setattr("baton.kv.prefix.redis.cache.WINDOW_BYTES", 2 * CODEC.record_bytes)
    await fill(cache)
    before = faults("wrong_type")
    with server.client() as client:
        client.delete(KEYS[1])
        client.rpush(KEYS[1], b"a list")
    assert await hits(cache) == (1, 1)
    assert faults("wrong_type") == before + 2


async def test_eviction_between_look_up_and_fetch_shortens_the_hit(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    assert await found(cache) == 6
    with server.client() as client:
        client.delete(KEYS[4])
    before = faults("evicted")
    assert len(await cache.fetch(DIGESTS)) == 4
    assert faults("evicted") == before + 1


async def test_a_worker_that_only_writes_notices_that_the_server_is_back(
    server: Server, cache: RedisPrefixCache
) -> None:
    server.kill()
    await cache.check()
    server.start()
    CLOCK.pause_over()
    assert cache.put(DIGESTS[0], BLOCKS[0])
    await cache.flush()
    assert await hits(cache) == (1, 1)


async def test_a_stall_costs_one_budget_not_one_each_time(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    hasty, before = open_cache(server.url, budget_s=BUDGET_S), faults("timeout")
    with server.stalled():
        for _ in range(3):
            assert await hits(hasty) == (0, 0)
        assert faults("timeout") == before + 1, "all but the first look-up were not tried"
        CLOCK.pause_over()
        assert await hits(hasty) == (0, 0)
        assert faults("timeout") == before + 2, "one try after each pause"
    async with asyncio.timeout(60):
        while await hits(hasty) != (6, 6):
            CLOCK.pause_over()
    await hasty.close()


async def test_a_late_answer_is_not_taken_for_that_to_another_question(server: Server) -> None:
    cache = open_cache(server.url, budget_s=6.0)
    await fill(cache)
    with server.stalled():
        assert await cache.fetch(DIGESTS) == []
        CLOCK.pause_over()
        asking = asyncio.create_task(found(cache))
        await asyncio.sleep(0.1)
    assert await asking == 6, "asked while the server still stood, answered after what was asked before"
    await cache.close()


async def test_the_write_queue_is_bounded_and_drops(server: Server) -> None:
    cache = open_cache(server.url, queue_bytes=3 * CODEC.payload_bytes)
    before = dropped()
    taken = [cache.put(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True)]
    assert taken == [True] * 3 + [False] * 3
    assert dropped() == before + 3
    await cache.flush()
    assert await found(cache) == 3
    assert cache.put(DIGESTS[3], BLOCKS[3])
    await cache.close()
    assert not cache.put(DIGESTS[4], BLOCKS[4])
    assert await hits(cache) == (0, 0)


async def test_close_does_not_wait_for_a_stalled_server(server: Server) -> None:
    cache = open_cache(server.url)
    with server.stalled():
        assert cache.put(DIGESTS[0], BLOCKS[0])
        async with asyncio.timeout(30):  # half of the budget
            await cache.close()


async def test_close_leaves_no_connection(server: Server) -> None:
    cache = open_cache(server.url)
    await fill(cache)
    await asyncio.gather(*(cache.lookup(DIGESTS) for _ in range(4)))
    with server.client() as client:
        assert len(client.client_list()) > 1
        await cache.close()
        async with asyncio.timeout(60):
            while len(await asyncio.to_thread(client.client_list)) > 1:
                pass  # the server sees the end of a connection in its own time


async def test_a_user_who_may_not_write_still_reads(tmp_path: Path) -> None:
    with running("valkey", tmp_path, tcp=True) as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "writer", "on", ">p@ss", "~baton:*", "+@all")
        client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~baton:*", "+@read", "+ping")
        client.execute_command("ACL", "SETUSER", "default", "off")
        writer = open_cache(server.url.replace("redis://", "redis://writer:p%40ss@"))
        await fill(writer)
        reader = open_cache(server.url.replace("redis://", "redis://reader:word@"))
        nobody = open_cache(server.url)
        before, lost = faults("auth"), dropped()
        assert reader.put(os.urandom(32), BLOCKS[0])
        await reader.flush()
        assert (faults("auth"), dropped()) == (before + 1, lost + 1)
        assert await hits(reader) == (6, 6)
        assert await hits(nobody) == (0, 0)
        assert faults("auth") == before + 2
        for cache in (writer, reader, nobody):
            await cache.close()


async def test_a_lost_store_is_logged_once_and_so_is_its_return(
    server: Server, cache: RedisPrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [record.levelname for record in caplog.records if record.name == "baton.kv.prefix.redis.nodes"]

    caplog.set_level("INFO")
    await cache.check()
    assert said() == []
    server.kill()
    for _ in range(3):
        await cache.check()
        CLOCK.pause_over()
    assert said() == ["WARNING"]
    server.start()
    await cache.check()
    await cache.check()
    assert said() == ["WARNING", "INFO"]


async def test_look_ups_are_in_parts(server: Server, cache: RedisPrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.prefix.redis.cache.LOOKUP_KEYS", 2)
    monkeypatch.setattr("baton.kv.prefix.redis.cache.LOOKUP_LANES", 1)
    await fill(cache)
    assert await hits(cache) == (6, 6)
    with server.client() as client:
        client.delete(KEYS[3])
        client.config_resetstat()
        assert await hits(cache) == (3, 3)
        assert client.info("commandstats")["cmdstat_strlen"]["calls"] == 4, "none behind the part with the first miss"


async def test_records_move_in_parts(server: Server, cache: RedisPrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    call_keys = RedisCalls.call_keys

    async def noted(calls: RedisCalls, lane: str, keys: Sequence[bytes], *rest: Any) -> list[Any]:
        asked.append((lane, len(keys)))
        return await call_keys(calls, lane, keys, *rest)

    monkeypatch.setattr(RedisCalls, "call_keys", noted)
    monkeypatch.setattr("baton.kv.prefix.redis.cache.MAX_RECORDS", 2)
    assert await cache.save(DIGESTS[:5], BLOCKS[:5]) == 5
    assert await cache.fetch(DIGESTS[:5]) == BLOCKS[:5]
    assert sorted(asked) == [("fetch", 1), ("fetch", 2), ("fetch", 2), ("write", 1), ("write", 2), ("write", 2)]


async def test_parts_share_one_budget(server: Server, cache: RedisPrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.prefix.redis.cache.LOOKUP_KEYS", 1)
    call_keys, budgets, together = RedisCalls.call_keys, list[float](), asyncio.Barrier(LOOKUP_LANES)

    async def noted(calls: RedisCalls, lane: str, keys: list[bytes], command: Any, budget_s: float) -> list[Any]:
        budgets.append(budget_s)
        if len(budgets) > 1:
            await asyncio.wait_for(together.wait(), 60)
        return await call_keys(calls, lane, keys, command, budget_s)

    await fill(cache)
    with server.client() as client:
        client.delete(KEYS[3], KEYS[4])
    monkeypatch.setattr(RedisCalls, "call_keys", noted)
    assert (await cache.lookup(DIGESTS[: 1 + LOOKUP_LANES])).blocks == 3
    assert len(set(budgets)) == 1 + LOOKUP_LANES
    assert budgets == sorted(budgets, reverse=True), "later parts have what earlier ones left"


@pytest.mark.parametrize("keys", [2, 256])
async def test_touch_extends_the_ttl_of_records(server: Server, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr("baton.kv.prefix.redis.cache.LOOKUP_KEYS", keys)
    cache = open_cache(server.url, ttl_s=1000)
    await fill(cache)
    with server.client() as client:
        for key in KEYS:
            client.expire(key, 10)
        cache.touch(DIGESTS[:3])
        async with asyncio.timeout(60):
            while await asyncio.to_thread(client.ttl, KEYS[2]) <= 10:
                pass  # nobody is told when it is done
        assert [client.ttl(key) > 10 for key in KEYS] == [True] * 3 + [False] * 3
    await cache.close()


async def test_clearing_leaves_what_others_wrote(server: Server, cache: RedisPrefixCache) -> None:
    other = RedisPrefixCache(server.url, KvFormat(FORMAT.parts, FORMAT.layers, 8), "secret")
    other_block = bytes(2 * CODEC.payload_bytes)
    assert other.put(DIGESTS[0], other_block)
    await other.flush()
    await fill(cache)
    with server.client() as client:
        client.set("somebody", "else's")
        assert await cache.clear(shared=False) == []
        assert client.dbsize() == 8
        (cleared,) = await cache.clear(shared=True)
        assert (cleared.name, cleared.blocks, cleared.bytes) == ("redis", 6, 6 * CODEC.record_bytes)
        assert client.dbsize() == 2
    assert await hits(cache) == (0, 0)
    assert [bytes(payload) for payload in await other.fetch(DIGESTS[:1])] == [other_block]
    await other.close()


async def test_stats_say_what_is_out_of_reach(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    with server.client() as client:
        client.config_set("maxmemory", 1 << 30)
    await hits(cache)
    (tier,) = await cache.stats()
    assert (tier.name, tier.blocks, tier.capacity_bytes, tier.hits, tier.misses) == ("redis", 6, 1 << 30, 6, 0)
    assert tier.bytes > 6 * CODEC.record_bytes
    assert tier.state == ""
    server.kill()
    (tier,) = await cache.stats()
    assert tier.state.startswith("out of reach: ")
    assert (tier.blocks, tier.hits) == (0, 6)


async def test_a_server_that_still_loads_is_asked_no_more(tmp_path: Path) -> None:
    with running("valkey", tmp_path, tcp=True) as server:
        cache = open_cache(server.url)
        await fill(cache)
        with server.client() as client:
            client.mset({f"large {number}": os.urandom(2048) for number in range(200)})
            client.save()
        server.kill()
        server.args = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        server.start(until=b"Server initialized")
        before = faults("loading")
        async with asyncio.timeout(60):
            while faults("loading") == before:
                assert await found(cache) == 0
                CLOCK.pause_over()
        assert await hits(cache) == (0, 0)
        (tier,) = await cache.stats()
        assert tier.state.startswith("out of reach: ")
        assert faults("loading") <= before + 2, "the whole server is meant, not each key"
        await cache.close()
