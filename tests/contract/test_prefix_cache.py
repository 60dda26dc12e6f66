"""Contract of every prefix cache that stores, over the dictionary, host memory, real servers, and tiers of them."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from baton.kv.format import KvFormat, KvPart
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix.contract import PrefixCache
from baton.kv.prefix.host import HostPrefixCache
from baton.kv.prefix.redis.cache import RedisLimits, RedisPrefixCache
from baton.worker.prefix_cache import open_prefix_cache
from tests.prefix_cache import MemoryPrefixCache
from tests.redis_server import BINARIES, running

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=3, block_size=4)
SIZE = FORMAT.token_bytes * FORMAT.block_size
DIGESTS = block_digests(chain_root("model", FORMAT.digest), list(range(40)), 4)
BLOCKS = [os.urandom(SIZE) for _ in DIGESTS]
ROOMY = 1 << 20
FEW = 3 * SIZE
PATIENT = RedisLimits(budget_s=20.0)

IN_PROCESS = ("memory", "host")
SHARED = (*BINARIES, *(f"tiered {name}" for name in BINARIES), "tiered few", "tiered none")


@pytest.fixture(params=[*IN_PROCESS, *SHARED])
async def cache(request: pytest.FixtureRequest) -> AsyncIterator[PrefixCache]:
    kind = request.param
    if kind == "memory":
        yield MemoryPrefixCache()
    elif kind == "host":
        yield HostPrefixCache(ROOMY)
    else:
        tier, _, name = kind.rpartition(" ")
        binary = name if name in BINARIES else next(iter(BINARIES))
        memory = {"few": FEW, "none": 0}.get(name, ROOMY)
        with tempfile.TemporaryDirectory() as directory, running(binary, Path(directory)) as server:
            if tier:
                cache = open_prefix_cache(server.url, FORMAT, "secret", cache_memory=memory, limits=PATIENT)
            else:
                cache = RedisPrefixCache(server.url, FORMAT, "secret", PATIENT)
            yield cache
            await cache.close()


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether others see what is put."""
    return request.node.callspec.params["cache"] in SHARED


async def fill(cache: PrefixCache, indexes: Sequence[int]) -> None:
    assert all(cache.put(DIGESTS[i], BLOCKS[i]) for i in indexes)
    await cache.flush()


async def found(cache: PrefixCache, digests: Sequence[bytes]) -> int:
    hits = await cache.lookup(digests)
    assert all(blocks > 0 for _, blocks in hits.runs)
    tiers = [tier for tier, _ in hits.runs]
    assert all(one != other for one, other in pairwise(tiers))
    return hits.blocks


async def fetched(cache: PrefixCache, digests: Sequence[bytes]) -> list[bytes]:
    return [bytes(payload) for payload in await cache.fetch(digests)]


async def test_an_empty_cache_misses(cache: PrefixCache) -> None:
    assert cache.enabled
    for digests in (DIGESTS, []):
        assert await found(cache, digests) == 0
        assert await cache.fetch(digests) == []
        assert await cache.select_writes(digests) == [True] * len(digests)
        cache.touch(digests)


async def test_blocks_are_found_after_repeated_puts_and_touches(cache: PrefixCache) -> None:
    for stored in (1, 1, 5, 10):
        await fill(cache, range(stored))
        for _ in range(10):
            cache.touch(DIGESTS)
        await cache.flush()
        assert await found(cache, DIGESTS) == stored
        assert await fetched(cache, DIGESTS) == BLOCKS[:stored]


async def test_a_run_ends_at_the_first_miss(cache: PrefixCache) -> None:
    await fill(cache, [0, 1, 3, 4])
    assert await found(cache, DIGESTS) == 2
    assert await fetched(cache, DIGESTS) == BLOCKS[:2]
    assert await found(cache, DIGESTS[2:]) == 0
    assert await fetched(cache, DIGESTS[2:]) == []
    assert await fetched(cache, DIGESTS[3:5]) == BLOCKS[3:5]


async def test_payloads_may_be_views(cache: PrefixCache) -> None:
    await fill(cache, [0])
    whole = BLOCKS[1] + BLOCKS[2]
    assert cache.put(DIGESTS[1], memoryview(whole)[:SIZE])
    assert cache.put(DIGESTS[2], memoryview(whole)[SIZE:])
    await cache.flush()
    assert await fetched(cache, DIGESTS) == BLOCKS[:3]


async def test_new_blocks_are_wanted_and_hits_only_for_others(cache: PrefixCache, shared: bool) -> None:
    assert await cache.select_writes(DIGESTS) == [True] * 10
    assert await cache.select_writes(DIGESTS, 4) == [shared] * 4 + [True] * 6


async def test_a_part_of_the_wanted_blocks_may_be_put(cache: PrefixCache) -> None:
    for upto in (4, 4, 10):
        wanted = await cache.select_writes(DIGESTS)
        await fill(cache, [i for i in range(upto) if wanted[i]])
        assert await found(cache, DIGESTS) == upto
        assert await fetched(cache, DIGESTS) == BLOCKS[:upto]


async def test_saved_blocks_are_found_by_others_at_once_until_they_are_removed(
    cache: PrefixCache, shared: bool
) -> None:
    if isinstance(cache, HostPrefixCache):
        assert await cache.select_saves(DIGESTS) == []
        assert await cache.save(DIGESTS, BLOCKS) == 0
        await cache.remove(DIGESTS)
        assert await found(cache, DIGESTS) == 0
        return
    assert await cache.select_saves(DIGESTS) == [True] * 10
    assert await cache.save(DIGESTS[:3], BLOCKS[:3]) == 3
    assert await cache.save(DIGESTS[3:6], [memoryview(block) for block in BLOCKS[3:6]]) == 3
    assert (await cache.lookup(DIGESTS)).runs == (("redis" if shared else "host", 6),), (
        "nothing is kept in this process"
    )
    assert await fetched(cache, DIGESTS) == BLOCKS[:6]
    await cache.remove(DIGESTS[2:])
    if shared:
        await cache.clear(shared=False)  # host memory has kept what was fetched
    assert await found(cache, DIGESTS) == 2
    assert (await cache.select_saves(DIGESTS))[2:] == [True] * 8


async def test_rates_are_of_known_tiers(cache: PrefixCache) -> None:
    await fill(cache, range(10))
    await cache.fetch(DIGESTS)
    names = {tier.name for tier in await cache.stats()}
    assert all(rate.bytes_per_s > 0 and rate.latency_s >= 0 for rate in cache.fetch_rates().values())
    assert set(cache.fetch_rates()) <= names


async def test_a_watcher_knows_what_this_process_holds(cache: PrefixCache) -> None:
    held: set[bytes] = set()

    def changed(stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        assert stored or dropped
        assert not held & set(stored)
        assert held >= set(dropped)
        held.update(stored)
        held.difference_update(dropped)

    await fill(cache, range(3))
    cache.watch(changed)
    assert held in (set(), set(DIGESTS[:3]))
    await fill(cache, range(10))
    assert held <= set(DIGESTS)
    assert len(held) == sum(tier.blocks for tier in await cache.stats() if tier.name in IN_PROCESS)
    await cache.clear(shared=False)
    assert not held
    cache.watch(None)
    await fill(cache, range(3))
    assert not held


async def test_counts_of_tiers_add_up(cache: PrefixCache) -> None:
    await fill(cache, range(7))
    hits = 0
    for digests in (DIGESTS, DIGESTS[:5], DIGESTS[8:]):
        hits += await found(cache, digests)
    assert hits == 12
    tiers = await cache.stats()
    assert sum(tier.hits for tier in tiers) == hits
    assert tiers[-1].misses == 3 + 2
    assert all(tier.blocks * SIZE == tier.bytes for tier in tiers if tier.name in IN_PROCESS)


async def test_cleared_blocks_are_gone(cache: PrefixCache, shared: bool) -> None:
    await fill(cache, range(6))
    await cache.clear(shared=False)
    assert await found(cache, DIGESTS) == 6 * shared, "others share it"
    await fill(cache, range(6))
    cleared = await cache.clear(shared=True)
    assert max(tier.blocks for tier in cleared) == 6
    assert max(tier.bytes for tier in cleared) >= 6 * SIZE
    assert await found(cache, DIGESTS) == 0
    assert await cache.fetch(DIGESTS) == []
    assert await cache.select_writes(DIGESTS) == [True] * 10
    await fill(cache, range(6))
    assert await fetched(cache, DIGESTS) == BLOCKS[:6]


async def test_many_at_once_never_get_a_wrong_block(cache: PrefixCache) -> None:
    async def use(number: int) -> None:
        for turn in range(4):
            upto = (3 * number + turn) % 10 + 1
            wanted = await cache.select_writes(DIGESTS[:upto])
            for i in range(upto):
                if wanted[i]:
                    cache.put(DIGESTS[i], BLOCKS[i])
                    await asyncio.sleep(0)
            hits = await found(cache, DIGESTS)
            got = await fetched(cache, DIGESTS[:hits])
            assert got == BLOCKS[: len(got)]
            if number == turn == 2:
                await cache.clear(shared=True)

    await asyncio.gather(*(use(number) for number in range(6)))


async def test_flush_without_work_returns_and_close_may_be_repeated(cache: PrefixCache) -> None:
    await cache.check()
    await cache.flush()
    await cache.close()
    await cache.close()
    assert await found(cache, DIGESTS) == 0


async def test_no_cache_finds_nothing_and_keeps_nothing() -> None:
    cache: PrefixCache = PrefixCache()
    assert not cache.enabled
    assert await cache.select_writes(DIGESTS) == [False] * 10
    assert not cache.put(DIGESTS[0], BLOCKS[0])
    assert await cache.select_saves(DIGESTS) == []
    assert await cache.save(DIGESTS, BLOCKS) == 0
    await cache.remove(DIGESTS)
    cache.watch(lambda *_: pytest.fail("nothing changes"))
    cache.touch(DIGESTS)
    await cache.check()
    await cache.flush()
    assert await found(cache, DIGESTS) == 0
    assert await cache.fetch(DIGESTS) == []
    assert not cache.fetch_rates()
    assert await cache.stats() == await cache.clear(shared=True) == []
    await cache.close()
