"""What every prefix cache that stores must do, over the dictionary and real servers alike."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.kv.format import KvFormat, KvPart
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix import MemoryPrefixCache, NullPrefixCache, PrefixCache, open_prefix_cache
from tests.redis_server import BINARIES, running

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=3, block_size=4)
SIZE = FORMAT.token_bytes * FORMAT.block_size
DIGESTS = block_digests(chain_root("model", FORMAT.digest), list(range(40)), 4)
BLOCKS = [os.urandom(SIZE) for _ in DIGESTS]


@pytest.fixture(params=["memory", *BINARIES])
async def cache(request: pytest.FixtureRequest) -> AsyncIterator[PrefixCache]:
    if request.param == "memory":
        yield MemoryPrefixCache()
        return
    with tempfile.TemporaryDirectory() as directory, running(request.param, Path(directory)) as server:
        cache = open_prefix_cache(server.url, FORMAT, "secret")
        yield cache
        await cache.close()


async def fill(cache: PrefixCache, indexes: range | list[int]) -> None:
    assert all(cache.put(DIGESTS[i], BLOCKS[i]) for i in indexes)
    await cache.flush()


async def test_an_empty_cache_misses(cache: PrefixCache) -> None:
    assert cache.stores
    assert await cache.lookup(DIGESTS) == 0
    assert await cache.fetch(DIGESTS) == []


async def test_no_digests_are_no_hits(cache: PrefixCache) -> None:
    assert await cache.lookup([]) == 0
    assert await cache.fetch([]) == []


@pytest.mark.parametrize("stored", [1, 5, 10])
async def test_what_was_put_is_found(cache: PrefixCache, stored: int) -> None:
    await fill(cache, range(stored))
    assert await cache.lookup(DIGESTS) == stored
    assert [bytes(payload) for payload in await cache.fetch(DIGESTS)] == BLOCKS[:stored]


async def test_a_run_ends_at_the_first_miss(cache: PrefixCache) -> None:
    await fill(cache, [0, 1, 3, 4])
    assert await cache.lookup(DIGESTS) == 2
    assert [bytes(payload) for payload in await cache.fetch(DIGESTS)] == BLOCKS[:2]
    assert await cache.lookup(DIGESTS[2:]) == 0
    assert [bytes(payload) for payload in await cache.fetch(DIGESTS[3:5])] == BLOCKS[3:5]


async def test_putting_again_changes_nothing(cache: PrefixCache) -> None:
    await fill(cache, range(3))
    await fill(cache, range(3))
    assert [bytes(payload) for payload in await cache.fetch(DIGESTS)] == BLOCKS[:3]


async def test_payloads_may_be_views(cache: PrefixCache) -> None:
    assert cache.put(DIGESTS[0], memoryview(BLOCKS[0]))
    await cache.flush()
    assert bytes((await cache.fetch(DIGESTS[:1]))[0]) == BLOCKS[0]


async def test_flush_without_work_returns_and_close_may_be_repeated(cache: PrefixCache) -> None:
    await cache.flush()
    await fill(cache, [0])
    assert await cache.lookup(DIGESTS[:1]) == 1
    await cache.close()
    await cache.close()


async def test_no_cache_finds_nothing_and_keeps_nothing() -> None:
    cache: PrefixCache = NullPrefixCache()
    assert not cache.stores
    assert not cache.put(DIGESTS[0], BLOCKS[0])
    await cache.flush()
    assert await cache.lookup(DIGESTS) == 0
    assert await cache.fetch(DIGESTS) == []
    await cache.close()
