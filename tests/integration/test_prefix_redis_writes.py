"""Records in a real server: written late or not at all, damaged and mended, cleared; what it says is not quoted."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from baton.kv.prefix.contract import PrefixCache
from baton.kv.prefix.redis.cache import RedisLimits, key_prefix
from baton.kv.prefix.redis.nodes import Command, Node, RedisCalls
from baton.kv.prefix.redis.record import HEADER_BYTES, RecordCodec
from baton.worker.prefix_cache import open_prefix_cache
from tests.prefix_redis import BLOCKS, CODEC, DIGESTS, FORMAT, KEYS, dropped, faults, fill, found, open_cache
from tests.redis_server import Server

LIMITS = RedisLimits(budget_s=20.0, ttl_s=1000)


def flipped(record: bytes, at: int) -> bytes:
    """The record with one bit changed."""
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


def worker(url: str, writes: str = "first") -> PrefixCache:
    """The cache of one worker that has no host memory."""
    return open_prefix_cache(url, FORMAT, "secret", limits=LIMITS, writes=writes)


async def ask(cache: PrefixCache) -> int:
    """One request: look up, fetch, compute the rest, put what is wanted; how many blocks were usable."""
    found = (await cache.lookup(DIGESTS)).blocks
    payloads = await cache.fetch(DIGESTS[:found])
    assert [bytes(payload) for payload in payloads] == BLOCKS[: len(payloads)]
    wants = await cache.select_writes(DIGESTS, len(payloads))
    for digest, block, wanted in zip(DIGESTS, BLOCKS, wants, strict=True):
        assert not wanted or cache.put(digest, block)
    await cache.flush()
    return len(payloads)


FORGED = RecordCodec(FORMAT, "guess")
GOOD = [CODEC.encode(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True)]
DAMAGES = {
    "payload": ("corrupt", flipped(GOOD[0], HEADER_BYTES)),
    "secret": ("forged", FORGED.encode(DIGESTS[0], BLOCKS[0])),
    "cut": ("truncated", GOOD[0][:-1]),
    "longer": ("truncated", GOOD[0] + b"x"),
}
"""Damages that a fetch refuses, or a look-up by the length; tests/unit/kv/prefix/test_record.py has all reasons."""


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_next_computation_mends_a_damaged_record(server: Server, damage: str) -> None:
    reason, record = DAMAGES[damage]
    first, second = worker(server.url), worker(server.url)
    await ask(first)
    assert await ask(second) == 6
    with server.client() as client:
        client.set(KEYS[0], record)
        before = faults(reason)
        assert await ask(first) == 0
        assert faults(reason) == before + 1
        assert 0 < client.ttl(KEYS[0]) <= LIMITS.ttl_s, "written anew"
    for cache in (second, first, worker(server.url)):
        assert await ask(cache) == 6
    assert faults(reason) == before + 1
    await second.close()
    await first.close()


@pytest.mark.parametrize("writes", ["first", "second"])
async def test_many_damaged_records_of_a_chain_are_mended_at_once(server: Server, writes: str) -> None:
    """As after a change of the secret: one record is refused, those behind it are known by their size only."""
    first, other = worker(server.url), worker(server.url, writes)
    await ask(first)
    await ask(other)
    with server.client() as client:
        for key, digest, block in zip(KEYS, DIGESTS, BLOCKS, strict=True):
            client.set(key, FORGED.encode(digest, block))
    assert await ask(other) == 0
    assert await ask(first) == 6
    await other.close()
    await first.close()


async def test_a_refused_record_is_not_kept_alive(server: Server) -> None:
    cache = worker(server.url, "never")
    with server.client() as client:
        for key, record in zip(KEYS, GOOD, strict=True):
            client.set(key, record, ex=10)
        client.set(KEYS[2], flipped(GOOD[2], HEADER_BYTES), ex=10)
        for _ in range(3):
            assert await ask(cache) == 2
        async with asyncio.timeout(60):
            while await asyncio.to_thread(client.ttl, KEYS[1]) <= 10:
                pass  # nobody reports when a touch is done
        assert [client.ttl(key) > 10 for key in KEYS] == [True] * 2 + [False] * 4
    await cache.close()


WRITE_LIMITS = RedisLimits(budget_s=60.0, pause_s=0.001, max_pause_s=0.001)


async def request(cache: PrefixCache, hits: int) -> int:
    """The end of a request whose first `hits` blocks were found nearer by; how many it had to copy."""
    wanted = [index for index, wants in enumerate(await cache.select_writes(DIGESTS, hits)) if wants]
    assert all(cache.put(DIGESTS[index], BLOCKS[index]) for index in wanted)
    return len(wanted)


@pytest.mark.parametrize(("writes", "memory"), [("first", 0), ("first", 1 << 20), ("second", 0), ("second", 1 << 20)])
async def test_a_write_that_failed_is_made_with_the_next_sighting(valkey: Server, writes: str, memory: int) -> None:
    cache = open_prefix_cache(valkey.url, FORMAT, "secret", cache_memory=memory, limits=WRITE_LIMITS, writes=writes)
    with valkey.client() as client:
        if writes == "second":
            await request(cache, 0)
            await cache.flush()
            assert client.dbsize() == 0, "seen once"
        client.config_set("maxmemory", 1)
        before, lost = faults("oom"), dropped()
        await request(cache, 0)
        await cache.flush()
        assert (client.dbsize(), faults("oom"), dropped()) == (0, before + len(BLOCKS), lost + len(BLOCKS))
        client.config_set("maxmemory", 0)
        # No look-up has missed them: they are hits in the worker's pages.
        assert await request(cache, len(BLOCKS)) == (0 if memory else len(BLOCKS)), "host memory gives what it has"
        await cache.flush()
        assert client.dbsize() == len(BLOCKS)
        assert await request(cache, len(BLOCKS)) == 0
    await cache.close()


async def test_blocks_queued_at_a_server_that_went_away_are_not_taken_for_stored(valkey: Server) -> None:
    cache = open_prefix_cache(valkey.url, FORMAT, "secret", limits=WRITE_LIMITS)
    valkey.kill()
    await request(cache, 0)
    await cache.flush()
    valkey.start()
    async with asyncio.timeout(60):
        while (await cache.stats())[-1].state:
            await cache.check()
    assert await request(cache, len(BLOCKS)) == len(BLOCKS)
    await cache.flush()
    assert (await cache.lookup(DIGESTS)).blocks == len(BLOCKS)
    await cache.close()


@pytest.mark.parametrize("memory", [0, 1 << 20])
async def test_blocks_that_the_server_lost_are_rewritten(
    valkey: Server, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv.prefix.tiered.random.random", lambda: 0.0)
    cache = open_prefix_cache(valkey.url, FORMAT, "secret", cache_memory=memory, limits=WRITE_LIMITS)
    await request(cache, 0)
    await cache.flush()
    assert await request(cache, len(BLOCKS)) == 0
    with valkey.client() as client:
        client.delete(*KEYS[2:])
        # All of it is a hit in the worker's pages.
        cache.touch(DIGESTS)
        async with asyncio.timeout(60):
            while client.dbsize() < len(KEYS):
                await asyncio.sleep(0)
                assert await request(cache, len(BLOCKS)) in (0, 0 if memory else len(KEYS[2:]))
    assert (await cache.lookup(DIGESTS)).blocks == len(BLOCKS)
    await cache.close()


def many(server: Server, keys: int) -> None:
    """Put as many keys of ours, and one of somebody else's."""
    with server.client() as client:
        client.mset({f"{key_prefix(FORMAT)}{number}": "" for number in range(keys)} | {"other": ""})


Scanned = Callable[[float], Awaitable[None]]
"""Told of the budget of each batch of keys that is about to be looked at."""


def watch_batches(monkeypatch: pytest.MonkeyPatch, scanned: Scanned) -> None:
    """Make clearing look at few keys at a time, and tell of each batch."""
    at = RedisCalls.call_node

    async def watched(self: RedisCalls, node: Node, lane: str, commands: Sequence[Command], budget_s: float) -> Any:
        if commands[0][0] == "SCAN":
            await scanned(budget_s)
        return await at(self, node, lane, commands, budget_s)

    monkeypatch.setattr(RedisCalls, "call_node", watched)
    monkeypatch.setattr("baton.kv.prefix.redis.cache.CLEAR_KEYS", 20)


async def test_clearing_may_take_long_and_opens_no_breaker(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has the whole time of one."""
    go_on, budgets = asyncio.Semaphore(0), list[float]()

    async def scanned(budget_s: float) -> None:
        budgets.append(budget_s)
        await go_on.acquire()

    watch_batches(monkeypatch, scanned)
    many(valkey, 1000)
    cache, before, states = open_cache(valkey.url), faults("timeout"), []
    await fill(cache)
    clearing = asyncio.create_task(cache.clear(shared=True))
    while not clearing.done():
        states.append((await cache.stats())[-1].state)
        go_on.release()
    (tier,) = await clearing
    assert len(budgets) > 10
    assert len(set(budgets)) == 1, "none has less for what came before"
    assert (tier.blocks, tier.state, faults("timeout")) == (1000 + len(BLOCKS), "", before)
    told = [int(state.split()[1]) for state in states if state.startswith("clearing: ")]
    assert told == sorted(told)
    assert len(set(told)) > 3
    with valkey.client() as client:
        assert client.keys() == [b"other"]
    await cache.close()


async def test_a_server_that_stops_midway_is_left_and_told(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = itertools.count()

    async def scanned(_: float) -> None:
        if next(batches) == 3:
            valkey.kill()

    watch_batches(monkeypatch, scanned)
    many(valkey, 1000)
    cache = open_cache(valkey.url)
    (tier,) = await cache.clear(shared=True)
    assert 0 < tier.blocks < 1000
    assert tier.state.startswith("not all of it; out of reach: ")
    await cache.close()


async def test_deletions_that_are_refused_are_counted_and_told(valkey: Server) -> None:
    cache = open_cache(valkey.url)
    await fill(cache)
    with valkey.client() as client:
        client.replicaof("127.0.0.1", 1)
        before = faults("readonly")
        (tier,) = await cache.clear(shared=True)
        assert (tier.blocks, faults("readonly")) == (0, before + len(BLOCKS))
        assert tier.state.startswith("refused: ")
        client.replicaof("NO", "ONE")
    assert await found(cache) == len(KEYS)
    await cache.close()


async def test_a_server_that_repeats_the_password_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """As any does that knows no AUTH: its operator has renamed it, or it is a proxy."""

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"-ERR unknown command 'AUTH', with args beginning with: 'mine' 'hush' \r\n")

    listener = await asyncio.start_server(repeat, "127.0.0.1", 0)
    cache = open_cache(f"redis://mine:hush@127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    await cache.check()
    (tier,) = await cache.stats()
    assert tier.state == "out of reach: unknown command 'AUTH'"
    assert "unknown command 'AUTH'" in caplog.text
    assert "hush" not in caplog.text
    await cache.close()
    listener.close()


async def test_clearing_keeps_no_look_up_waiting() -> None:
    scanning = asyncio.Event()

    async def think(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if b"SCAN" in data:
                scanning.set()
            else:
                writer.write((b":0\r\n" if b"STRLEN" in data else b"+OK\r\n") * data.count(b"*"))

    listener = await asyncio.start_server(think, "127.0.0.1", 0)
    # Long enough for a look-up on a busy machine; the clearing waits for its end.
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", budget_s=2.0)
    before = faults("busy")
    clearing = [asyncio.create_task(cache.clear(shared=True)) for _ in range(16)]
    await scanning.wait()
    await cache.lookup(DIGESTS)
    assert faults("busy") == before
    await asyncio.gather(*clearing)
    await cache.close()
    listener.close()
