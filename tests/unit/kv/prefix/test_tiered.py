"""Host memory before a shared store: who is asked, who serves, what is written when, and what is kept fresh."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.prefix.contract import FetchRate, Hits, Payload
from baton.kv.prefix.host import HostPrefixCache
from baton.kv.prefix.tiered import BlockState, StoreTier, TieredPrefixCache, WriteFilter
from baton.ledger import CacheTier
from tests.prefix_cache import MemoryPrefixCache

SIZE = 64
TIER = "redis"
"""Of the shared store."""
DIGESTS = [os.urandom(32) for _ in range(10)]
SLICE = 3
"""Blocks that are looked at before others run."""
BLOCKS = {digest: os.urandom(SIZE) for digest in DIGESTS}


class Store(MemoryPrefixCache):
    """The shared one: notes what it is asked, and can be full, or held up in a fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups: list[list[bytes]] = []
        self.puts: list[bytes] = []
        self.touched: list[bytes] = []
        self.full = False
        self.come, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        self.lookups.append(list(digests))
        found = await super().lookup(digests)
        return Hits(tuple((TIER, blocks) for _, blocks in found.runs))

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        self.come.set()
        await self.go.wait()
        return await super().fetch(digests)

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        return [digest not in self.blocks for digest in digests]

    def put(self, digest: bytes, payload: Payload) -> bool:
        if self.full:
            return False
        self.puts.append(digest)
        return super().put(digest, payload)

    def touch(self, digests: Sequence[bytes]) -> None:
        self.touched += digests

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        return [replace(tier, name=TIER) for tier in await super().clear(shared=shared)] if shared else []

    async def stats(self) -> list[CacheTier]:
        return [replace(tier, name=TIER) for tier in await super().stats()]

    def fetch_rates(self) -> dict[str, FetchRate]:
        return {TIER: FetchRate(0.001, 1e9)}


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.prefix.host.SLICE_BLOCKS", SLICE)


@pytest.fixture
async def store() -> Store:
    return Store()


def tiered(store: Store, writes: str = "first", blocks: int = 100, touch_fraction: float = 0.0) -> TieredPrefixCache:
    stores = [StoreTier(store, writes)]
    return TieredPrefixCache(HostPrefixCache(blocks * SIZE), stores, touch_fraction=touch_fraction)


async def request(cache: TieredPrefixCache, digests: Sequence[bytes], hits: int = 0) -> list[bytes]:
    """Publish as a worker does at the end of a request; returns the blocks that it copied out."""
    wanted = [digest for digest, wants in zip(digests, await cache.select_writes(digests, hits), strict=True) if wants]
    for digest in wanted:
        cache.put(digest, BLOCKS[digest])
    return wanted


async def only_stored(store: Store, *indexes: int) -> None:
    for index in indexes:
        MemoryPrefixCache.put(store, DIGESTS[index], BLOCKS[DIGESTS[index]])


async def test_the_store_is_asked_once_and_only_for_what_host_lacks(store: Store) -> None:
    cache = tiered(store)
    await request(cache, DIGESTS[:4])
    assert (await cache.lookup(DIGESTS[:4])).runs == (("host", 4),)
    assert store.lookups == []
    assert (await cache.lookup(DIGESTS)).runs == (("host", 4),)
    assert store.lookups == [DIGESTS[4:]]


async def test_runs_alternate_and_every_block_comes_from_where_it_is(store: Store) -> None:
    cache = tiered(store, writes="never")
    await only_stored(store, 0, 1, 4, 7, 9)
    for index in (2, 3, 5, 6):
        cache.put(DIGESTS[index], BLOCKS[DIGESTS[index]])
    hits = await cache.lookup(DIGESTS)
    assert hits.runs == ((TIER, 2), ("host", 2), (TIER, 1), ("host", 2), (TIER, 1))
    assert await cache.fetch(DIGESTS) == [BLOCKS[digest] for digest in DIGESTS[:8]]
    assert store.lookups == [[DIGESTS[i] for i in (0, 1, 4, 7, 8, 9)]]
    assert store.puts == []
    host, shared = await cache.stats()
    assert (host.name, host.hits, host.misses) == ("host", 4, 6)
    assert (shared.name, shared.hits, shared.misses) == (TIER, 4, 2)


async def test_a_fetch_longer_than_host_memory_leaves_its_beginning_there(store: Store) -> None:
    cache = tiered(store, blocks=3)
    await only_stored(store, *range(10))
    assert (await cache.lookup(DIGESTS)).blocks == 10
    for start in range(0, 10, 2):
        assert len(await cache.fetch(DIGESTS[start : start + 2])) == 2
    assert (await cache.lookup(DIGESTS)).runs == (("host", 3), (TIER, 7))


async def test_nothing_is_served_past_a_block_that_is_gone(store: Store) -> None:
    cache = tiered(store, writes="never")
    await only_stored(store, *range(7))
    for digest in DIGESTS[7:]:
        cache.put(digest, BLOCKS[digest])
    assert (await cache.lookup(DIGESTS)).runs == ((TIER, 7), ("host", 3))
    del store.blocks[DIGESTS[4]]
    assert await cache.fetch(DIGESTS) == [BLOCKS[digest] for digest in DIGESTS[:4]]
    assert await cache.fetch(DIGESTS[4:]) == []


async def test_blocks_evicted_during_a_fetch_are_served_all_the_same(store: Store) -> None:
    cache = tiered(store, writes="never", blocks=3)
    await request(cache, DIGESTS[:3])
    await only_stored(store, 3, 4)
    assert (await cache.lookup(DIGESTS)).blocks == 5
    store.go.clear()
    fetching = asyncio.create_task(cache.fetch(DIGESTS))
    await store.come.wait()
    await cache.clear(shared=False)
    store.go.set()
    assert await fetching == [BLOCKS[digest] for digest in DIGESTS[:5]]


async def test_policy_first_writes_blocks_at_once_and_only_once(store: Store) -> None:
    cache = tiered(store, "first")
    assert await request(cache, DIGESTS) == DIGESTS
    assert await request(cache, DIGESTS) == []
    assert store.puts == DIGESTS


async def test_policy_second_writes_blocks_at_their_second_request(store: Store) -> None:
    cache = tiered(store, "second")
    assert await request(cache, DIGESTS[:6]) == DIGESTS[:6]
    assert store.puts == []
    assert await request(cache, DIGESTS[:4], hits=4) == []
    assert store.puts == DIGESTS[:4], "from host memory"
    assert await request(cache, DIGESTS) == DIGESTS[6:]
    assert store.puts == DIGESTS[:6]


async def test_policy_second_counts_blocks_that_only_the_pages_have(store: Store) -> None:
    cache = tiered(store, "second", blocks=0)
    assert await request(cache, DIGESTS[:4]) == []
    assert await request(cache, DIGESTS, hits=4) == DIGESTS[:4]
    assert store.puts == DIGESTS[:4]
    assert await request(cache, DIGESTS, hits=10) == DIGESTS[4:]
    assert await request(cache, DIGESTS) == []


async def test_hits_in_pages_are_not_copied_to_host_memory(store: Store) -> None:
    cache = tiered(store)
    await request(cache, DIGESTS)
    await cache.clear(shared=False)
    assert await request(cache, DIGESTS, hits=6) == DIGESTS[6:]
    assert store.puts == DIGESTS


async def test_blocks_found_in_the_store_are_not_written(store: Store) -> None:
    cache = tiered(store, blocks=0)
    await only_stored(store, *range(5))
    await cache.lookup(DIGESTS)
    store.blocks.clear()
    assert await request(cache, DIGESTS) == DIGESTS[5:], "nobody has missed the first five yet"


async def test_blocks_dropped_by_a_full_store_are_offered_again_from_host_memory(store: Store) -> None:
    cache = tiered(store)
    store.full = True
    assert cache.put(DIGESTS[0], BLOCKS[DIGESTS[0]]), "host memory has it"
    assert await request(cache, DIGESTS[:3]) == DIGESTS[1:3]
    store.full = False
    assert await request(cache, DIGESTS[:3], hits=3) == []
    assert store.puts == DIGESTS[:3]


async def test_a_store_that_refuses_has_nothing_copied_for_it(store: Store) -> None:
    cache = tiered(store, blocks=6)
    store.full = True
    assert await request(cache, DIGESTS) == DIGESTS
    assert await request(cache, DIGESTS, hits=10) == []
    assert await request(cache, DIGESTS, hits=8) == DIGESTS[8:], "what was computed may fit in host memory"


async def test_a_put_fails_only_if_host_memory_and_store_drop_the_block(store: Store) -> None:
    cache = tiered(store, blocks=0)
    store.full = True
    assert not cache.put(DIGESTS[0], BLOCKS[DIGESTS[0]])
    store.full = False
    assert cache.put(DIGESTS[0], BLOCKS[DIGESTS[0]])
    assert cache.put(DIGESTS[0], BLOCKS[DIGESTS[0]]), "it is stored"
    assert store.puts == DIGESTS[:1]


@pytest.mark.parametrize("touch_fraction", [0.0, 1.0])
async def test_hits_keep_the_store_fresh(store: Store, touch_fraction: float) -> None:
    cache = tiered(store, touch_fraction=touch_fraction)
    await request(cache, DIGESTS[:3])
    await cache.fetch(DIGESTS)
    cache.touch(DIGESTS[7:])
    assert store.touched == (DIGESTS[:3] + DIGESTS[7:] if touch_fraction else [])
    store.touched.clear()
    await only_stored(store, *range(6))
    assert (await cache.lookup(DIGESTS)).blocks == 6
    assert store.touched == [], "what was found may be damaged"
    await cache.fetch(DIGESTS)
    assert store.touched == DIGESTS[:6], "a fetch from the store always counts"


@pytest.mark.parametrize("writes", ["first", "second", "never"])
async def test_a_refused_record_is_written_again_with_all_behind_it(store: Store, writes: str) -> None:
    write_filter = WriteFilter()
    cache = TieredPrefixCache(HostPrefixCache(0), [StoreTier(store, writes, write_filter)])
    await only_stored(store, *range(6))
    assert (await cache.lookup(DIGESTS[:6])).blocks == 6
    assert await request(cache, DIGESTS[:6]) == []
    write_filter.mark_refused(DIGESTS[2:3])
    del store.blocks[DIGESTS[2]]
    assert await request(cache, DIGESTS[:6]) == ([] if writes == "never" else DIGESTS[2:3]), "the store has the others"
    store.blocks.clear()
    write_filter.mark_refused(DIGESTS[2:3])
    assert await request(cache, DIGESTS[:6]) == ([] if writes == "never" else DIGESTS[2:6]), "they are behind it"


async def test_a_refused_record_is_not_taken_for_stored_until_it_was_read(store: Store) -> None:
    write_filter = WriteFilter()
    cache = TieredPrefixCache(HostPrefixCache(0), [StoreTier(store, write_filter=write_filter)])
    await only_stored(store, *range(6))
    await cache.lookup(DIGESTS[:6])
    for _ in range(2):
        write_filter.mark_refused(DIGESTS[:1])
        await cache.lookup(DIGESTS[:6])
        assert write_filter.state(DIGESTS[0]) is BlockState.REFUSED, "it has the size of a record still"
    await cache.fetch(DIGESTS[:6])
    assert {write_filter.state(digest) for digest in DIGESTS[:6]} == {BlockState.STORED}, "another worker has mended it"
    write_filter.mark_refused(DIGESTS[:1])
    store.blocks.clear()
    await cache.lookup(DIGESTS[:6])
    assert {write_filter.state(digest) for digest in DIGESTS[:6]} == {BlockState.SEEN_AGAIN}


async def test_touch_refreshes_only_a_fraction_of_hits(store: Store) -> None:
    cache = tiered(store, touch_fraction=1 / 8)
    for _ in range(8000):
        cache.touch(DIGESTS[:1])
    assert 700 < len(store.touched) < 1300, "six standard deviations are 177"


steps = st.tuples(
    st.sampled_from(["request", "hits", "lookup", "lose", "lose host", "full"]), st.integers(0, 9), st.integers(1, 10)
)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["first", "second", "never"]), st.integers(0, 8), st.lists(steps, max_size=40))
async def test_a_look_up_always_tells_the_truth(writes: str, blocks: int, sequence: list[tuple[str, int, int]]) -> None:
    store = Store()
    cache, here = tiered(store, writes, blocks), set[bytes]()
    cache.watch(lambda stored, dropped: (here.update(stored), here.difference_update(dropped)))
    for step, first, upto in sequence:
        digests = DIGESTS[first:upto]
        if step == "lose":
            for digest in digests:
                store.blocks.pop(digest, None)
        elif step == "lose host":
            await cache.clear(shared=False)
        elif step == "full":
            store.full = not store.full
        elif step == "lookup":
            there = here | store.blocks.keys()
            run = next((i for i, digest in enumerate(digests) if digest not in there), len(digests))
            assert (await cache.lookup(digests)).blocks == run
            assert await cache.fetch(digests) == [BLOCKS[digest] for digest in digests[:run]]
        else:
            hits = first if step == "hits" else 0
            copied = await request(cache, DIGESTS[:upto], hits)
            assert writes != "never" or not set(copied) & set(DIGESTS[:hits])
        assert len(here) <= blocks
        assert writes != "never" or not store.puts


@pytest.mark.parametrize("writes", ["first", "second"])
async def test_a_long_prompt_is_saved_when_first_seen_and_not_in_host_memory(store: Store, writes: str) -> None:
    cache = tiered(store, writes)
    await only_stored(store, 0)
    await cache.lookup(DIGESTS[:1])
    assert await cache.select_saves(DIGESTS) == [False] + [True] * 9
    assert await cache.save(DIGESTS[1:4], [BLOCKS[digest] for digest in DIGESTS[1:4]]) == 3
    assert list(store.blocks) == DIGESTS[:4]
    assert (await cache.stats())[0].blocks == 0
    assert await cache.select_saves(DIGESTS) == [False] * 4 + [True] * 6
    await cache.remove(DIGESTS[2:4])
    assert await cache.select_saves(DIGESTS) == [False] * 2 + [True] * 8


async def test_workers_that_never_write_save_nothing(store: Store) -> None:
    assert await tiered(store, "never").select_saves(DIGESTS) == []


async def test_blocks_that_the_store_did_not_save_are_not_taken_for_stored(store: Store) -> None:
    class Full(Store):
        async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
            return 1

    cache = tiered(Full())
    assert await cache.save(DIGESTS[:3], [BLOCKS[digest] for digest in DIGESTS[:3]]) == 1
    assert await cache.select_saves(DIGESTS[:3]) == [False, True, True]


async def test_a_long_prompt_that_could_not_be_saved_was_seen_once(store: Store) -> None:
    cache = tiered(store, "second", blocks=0)
    assert await cache.select_saves(DIGESTS) == [True] * 10
    assert await request(cache, DIGESTS) == []
    assert await request(cache, DIGESTS) == DIGESTS


async def test_blocks_used_here_are_saved_again_if_the_store_has_lost_them(store: Store) -> None:
    cache = tiered(store)
    assert await cache.save(DIGESTS, [BLOCKS[digest] for digest in DIGESTS]) == 10
    del store.blocks[DIGESTS[2]]
    assert await cache.select_saves(DIGESTS) == [False] * 10, "nobody has asked"
    assert await cache.select_saves(DIGESTS, 5) == [False] * 2 + [True] * 3 + [False] * 5


async def test_others_run_while_a_long_chain_is_looked_at(store: Store) -> None:
    cache, turns = tiered(store), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    for call in (cache.lookup(DIGESTS), cache.select_writes(DIGESTS), cache.select_saves(DIGESTS)):
        before = turns
        await call
        assert turns - before >= len(DIGESTS) // SLICE
    counter.cancel()


def test_the_filter_forgets_the_oldest() -> None:
    write_filter = WriteFilter(max_blocks=4)
    assert list(write_filter.observe(DIGESTS[:2])) == [BlockState.SEEN_ONCE] * 2
    assert list(write_filter.observe(DIGESTS[1:3])) == [BlockState.SEEN_AGAIN, BlockState.SEEN_ONCE]
    write_filter.mark_stored(DIGESTS[3:8])
    assert list(write_filter.observe(DIGESTS[3:8])) == [BlockState.STORED] * 5
    assert write_filter.state(DIGESTS[0]) is BlockState.UNSEEN
    write_filter.mark_missed(DIGESTS[6:])
    assert [write_filter.state(digest) for digest in DIGESTS[5:9]] == [
        BlockState.STORED,
        BlockState.SEEN_AGAIN,
        BlockState.SEEN_AGAIN,
        BlockState.UNSEEN,
    ]
    write_filter.clear()
    assert list(write_filter.observe(DIGESTS[5:6])) == [BlockState.SEEN_ONCE]


async def test_stores_are_asked_in_their_order_each_for_what_the_ones_before_it_lack(store: Store) -> None:
    class Disk(HostPrefixCache):
        async def lookup(self, digests: Sequence[bytes]) -> Hits:
            return Hits(tuple(("disk", blocks) for _, blocks in (await super().lookup(digests)).runs))

    cache = TieredPrefixCache(HostPrefixCache(0), [StoreTier(Disk(1 << 20)), StoreTier(store, "second")])
    assert await request(cache, DIGESTS[:2]) == DIGESTS[:2]
    assert store.puts == [], "each store has its own rule"
    await only_stored(store, *range(2, 6))
    assert (await cache.lookup(DIGESTS)).runs == (("disk", 2), (TIER, 4))
    assert store.lookups == [DIGESTS[2:]]
    assert await cache.fetch(DIGESTS) == [BLOCKS[digest] for digest in DIGESTS[:6]]
    assert await cache.select_saves(DIGESTS[:6]) == [True] * 2 + [False] * 4, "of the store that workers share"
    assert await cache.save(DIGESTS[:2], [BLOCKS[digest] for digest in DIGESTS[:2]]) == 2
    assert store.puts == DIGESTS[:2]
