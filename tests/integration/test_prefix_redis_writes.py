"""Damaged records in a real server: refused, written again by the next computation, and never kept alive."""

import asyncio

import pytest

from baton.kv.prefix.contract import PrefixCache
from baton.kv.prefix.redis.cache import RedisLimits
from baton.kv.prefix.redis.record import HEADER_BYTES, RecordCodec
from baton.worker.prefix_cache import open_prefix_cache
from tests.prefix_redis import BLOCKS, CODEC, DIGESTS, FORMAT, KEYS, faults
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
