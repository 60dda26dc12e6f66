"""Host memory: bounded, least recently used first, the end of a chain before its beginning; against a naive model."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.prefix.host import HostPrefixCache

SIZE = 64


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even short chains are looked at in several slices."""
    monkeypatch.setattr("baton.kv.prefix.host.SLICE_BLOCKS", 1)


def chain(*words: str) -> list[bytes]:
    """Digests of a chain whose blocks are named by words."""
    return list(accumulate(words, lambda parent, word: hashlib.sha256(parent + word.encode()).digest(), initial=b""))[
        1:
    ]


def payload(digest: bytes) -> bytes:
    return digest * (SIZE // 32)


async def write(cache: HostPrefixCache, digests: Sequence[bytes], upto: int | None = None) -> list[bool]:
    """Write a chain as a worker does that computed it."""
    wanted = [digest for digest, wanted in zip(digests, await cache.select_writes(digests), strict=True) if wanted]
    return [cache.put(digest, payload(digest)) for digest in wanted[:upto]]


LONG = chain(*"abcdefgh")


async def test_a_block_larger_than_the_bound_is_not_kept() -> None:
    cache = HostPrefixCache(SIZE)
    assert cache.put(LONG[0], payload(LONG[0]))
    assert not cache.put(LONG[1], bytes(SIZE + 1))
    assert (await cache.lookup(LONG)).blocks == 1


async def test_many_look_ups_leave_no_trace() -> None:
    cache = HostPrefixCache(8 * SIZE)
    await write(cache, LONG)
    for _ in range(1000):
        await cache.lookup(LONG)
    assert sum(len(run.digests) for run in cache._runs) < 5000
    await cache.select_writes([os.urandom(32) for _ in range(70_000)])
    assert len(cache._parents) == 1 << 16
    assert (await cache.lookup(LONG)).blocks == 8


async def test_blocks_put_after_a_clear_between_two_slices_can_be_evicted() -> None:
    cache, others = HostPrefixCache(4 * SIZE), chain(*"wxyz")
    await write(cache, LONG[:4])
    marking = asyncio.create_task(cache.mark_used(LONG[:4]))
    await asyncio.sleep(0)
    await cache.clear(shared=False)
    assert cache.put(LONG[3], payload(LONG[3]))
    await marking
    assert await write(cache, others) == [True] * 4
    assert LONG[3] not in cache


async def test_a_block_used_after_all_before_it_was_evicted_between_two_slices_is_the_latest() -> None:
    cache, others = HostPrefixCache(4 * SIZE), chain(*"wxyz")
    await write(cache, LONG[:4])
    marking = asyncio.create_task(cache.mark_used(LONG[:4]))
    await asyncio.sleep(0)
    await cache.lookup(LONG[3:4])
    assert [cache.put(digest, payload(digest)) for digest in others[:3]] == [True] * 3
    assert [digest in cache for digest in LONG[:4]] == [False] * 3 + [True]
    await marking
    assert cache.put(others[3], payload(others[3]))
    assert LONG[3] in cache


class Model:
    """The rules, spelled out: each block has a place (run, position); the least run loses its last block."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.places: dict[bytes, tuple[int, int]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.numbers = count()

    def use(self, digests: Sequence[bytes], wanted: Sequence[bool]) -> None:
        run, before = next(self.numbers), None
        for digest, follows in zip(digests, wanted, strict=True):
            if digest in self.places:
                self.places[digest] = (run, next(self.numbers))
            else:
                self.parents.pop(digest, None)
                if follows and before is not None:
                    self.parents[digest] = before
            before = digest if follows or digest in self.places else None

    def put(self, digest: bytes) -> bool:
        if digest in self.places:
            return True
        parent = self.parents.pop(digest, None)
        if parent is not None and parent not in self.places:
            return False
        run = next(self.numbers) if parent is None else self.places[parent][0]
        while len(self.places) >= self.most:
            oldest = min(place[0] for place in self.places.values())
            if oldest == run:
                return False
            del self.places[max((at, digest) for digest, at in self.places.items() if at[0] == oldest)[1]]
        self.places[digest] = (run, next(self.numbers))
        return True


words = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map(lambda parts: chain(*parts))
steps = st.one_of(
    st.tuples(st.just("lookup"), words, st.just(0)),
    st.tuples(st.just("wants"), words, st.integers(0, 6)),
    st.tuples(st.just("put"), words, st.integers(0, 5)),
    st.tuples(st.just("write"), words, st.integers(0, 6)),
    st.tuples(st.just("clear"), words, st.just(0)),
)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.lists(steps, max_size=60))
async def test_the_host_cache_equals_a_simple_model(most: int, sequence: list[tuple[str, list[bytes], int]]) -> None:
    cache, model, told = HostPrefixCache(most * SIZE + SIZE // 2), Model(most), set()

    def changed(stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        assert not told & set(stored)
        told.update(stored)
        assert told >= set(dropped)
        told.difference_update(dropped)

    cache.watch(changed)
    for step, digests, number in sequence:
        if step == "lookup":
            hits = next((i for i, digest in enumerate(digests) if digest not in model.places), len(digests))
            assert (await cache.lookup(digests)).blocks == hits
            assert await cache.fetch(digests) == [payload(digest) for digest in digests[:hits]]
            model.use(digests[:hits], [False] * hits)
        elif step == "clear":
            await cache.clear(shared=False)
            model.places.clear()
        elif step == "put":
            digest = digests[min(number, len(digests) - 1)]
            assert cache.put(digest, payload(digest)) == model.put(digest)
        else:
            first = number if step == "wants" else 0
            wanted = [i >= first and digest not in model.places for i, digest in enumerate(digests)]
            assert await cache.select_writes(digests, first) == wanted
            model.use(digests, wanted)
            if step == "write":
                mine = [digest for digest, wants in zip(digests, wanted, strict=True) if wants][:number]
                assert [cache.put(digest, payload(digest)) for digest in mine] == [model.put(digest) for digest in mine]
        assert told == set(model.places)
        tier = (await cache.stats())[0]
        assert (tier.blocks, tier.bytes) == (len(told), len(told) * SIZE)
        assert tier.bytes <= tier.capacity_bytes
