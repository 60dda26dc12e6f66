"""Damaged records in a real server: refused, deleted, written again by the next computation, and never kept alive."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.prefix import PrefixCache, open_prefix_cache
from baton.kv.prefix.record import HEADER_BYTES, RecordCodec
from baton.kv.prefix.redis import RedisLimits
from tests.prefix_redis import BLOCKS, CODEC, DIGESTS, FORMAT, KEYS, faults, fill, open_cache, removed
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
"""What a fetch refuses, and what a look-up does by the length; tests/unit/kv/prefix/test_record.py has all reasons."""


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_next_computation_mends_a_damaged_record(server: Server, damage: str) -> None:
    reason, record = DAMAGES[damage]
    first, second = worker(server.url), worker(server.url)
    await ask(first)
    assert await ask(second) == 6
    with server.client() as client:
        client.set(KEYS[0], record)
        before, gone = faults(reason), removed()
        assert await ask(first) == 0
        assert (faults(reason), removed()) == (before + 1, gone + 1)
        assert 0 < client.ttl(KEYS[0]) <= LIMITS.ttl_s, "written anew"
    for cache in (second, first, worker(server.url)):
        assert await ask(cache) == 6
    assert faults(reason) == before + 1
    await second.close()
    await first.close()


async def test_a_worker_that_never_writes_deletes_what_it_refuses(server: Server) -> None:
    """Look-ups of others miss it, so that they write it."""
    reader, writer = worker(server.url, "never"), worker(server.url)
    await ask(writer)
    with server.client() as client:
        client.set(KEYS[0], flipped(GOOD[0], HEADER_BYTES))
        assert await ask(reader) == 0
        assert not client.exists(KEYS[0])
    assert await ask(writer) == 0
    assert await ask(reader) == 6
    await reader.close()
    await writer.close()


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


async def test_the_good_record_of_another_worker_is_not_deleted(server: Server) -> None:
    cache = worker(server.url)
    with server.client() as client:
        for damaged, seen in (
            (flipped(GOOD[0], HEADER_BYTES), 1),
            (GOOD[0][:-1], 0),
            (FORGED.encode(DIGESTS[0], BLOCKS[0]), 1),
        ):
            client.set(KEYS[0], damaged)
            if seen:
                assert await cache.fetch(DIGESTS[:1]) == []
            else:
                assert (await cache.lookup(DIGESTS[:1])).blocks == 0
            # Nothing has been awaited since the record was refused: its removal has not begun.
            good = CODEC.encode(DIGESTS[0], BLOCKS[0])
            client.set(KEYS[0], good)
            await cache.flush()
            assert client.get(KEYS[0]) == good
    await cache.close()


async def test_a_refused_record_is_not_kept_alive(valkey: Server) -> None:
    """Here it can't be deleted: this user's rights are those from before anything was."""
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "old", "on", ">word", "~baton:*", "+@read", "+set", "+expire", "+ping")
        old = worker(valkey.url.replace("redis://", "redis://old:word@"), "never")
        for key, record in zip(KEYS, GOOD, strict=True):
            client.set(key, record, ex=10)
        client.set(KEYS[2], flipped(GOOD[2], HEADER_BYTES), ex=10)
        before = faults("auth")
        for _ in range(3):
            assert await ask(old) == 2
        async with asyncio.timeout(60):
            while await asyncio.to_thread(client.ttl, KEYS[1]) <= 10:
                pass  # nobody reports when a touch is done
        assert [client.ttl(key) > 10 for key in KEYS] == [True] * 2 + [False] * 4
    assert faults("auth") == before + 3
    await old.close()


async def test_a_record_that_is_damaged_again_and_again_costs_one_command_each_time(server: Server) -> None:
    cache = open_cache(server.url, budget_s=20.0)
    await fill(cache)
    turns = 20
    with server.client() as client:
        for turn in range(turns):
            client.set(KEYS[0], flipped(GOOD[0], HEADER_BYTES) if turn % 2 else GOOD[0][:-1])
            looked = await cache.lookup(DIGESTS)
            assert await cache.fetch(DIGESTS[: looked.blocks]) == []
            await cache.flush()
            assert not client.exists(KEYS[0])
        assert client.info("commandstats")["cmdstat_eval"]["calls"] == turns
    await cache.close()
