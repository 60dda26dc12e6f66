"""The end of a prompt between a cache and pages: how it is named, when it is put, and what is loaded of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.kv.hashing import chain_root, end_digest
from baton.kv.prefix import MemoryPrefixCache, NullPrefixCache, Payload
from baton.kv.prefix.end import PromptEnd
from baton.worker.blocks import MOST_WRITE_BACKS, Blocks, EndOf
from tests.contract.engines import GREEDY, ignore, state

IDS = [(7 * i) % 1000 for i in range(100)]
LENGTHS = (1, 5, 15, 16, 17, 96, 100)
HIDDEN = b"hide"
WAIT_S = 10


class Cache(MemoryPrefixCache):
    """Notes what is counted as seen and what is put; takes only `most` blocks."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.seen: list[list[bytes]] = []
        self.put_digests: list[bytes] = []
        self._most = most

    def wants(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        self.seen.append(list(digests))
        return super().wants(digests, hits)

    def put(self, digest: bytes, payload: Payload) -> bool:
        self.put_digests.append(digest)
        return len(self.blocks) < self._most and super().put(digest, payload)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def computed(engine: FakeEngine, length: int = len(IDS)) -> tuple[KvHandle, bytes]:
    handle = engine.reserve("a", length)
    wanted = state(IDS[:length], GREEDY)
    return handle, engine.prefill_chunk(handle, IDS, 0, length, on_layer=ignore, sample=[wanted]).hidden


def end_of(blocks: Blocks, length: int = len(IDS), hidden: bytes = HIDDEN) -> EndOf:
    ids = IDS[:length]
    return EndOf(blocks.end_name(ids, blocks.digests(ids, b""), b""), length, hidden)


def with_hidden(engine: FakeEngine, size: int) -> FakeEngine:
    """An engine whose hidden states have so many bytes."""
    engine._spec = replace(engine.spec, hidden_bytes=size)
    return engine


def kv(engine: FakeEngine, handle: KvHandle, tokens: range) -> list[bytes]:
    if not tokens:
        return []
    spec = engine.spec.kv_format
    layers = [engine.read_kv(handle, layer, tokens, range(spec.heads)) for layer in range(spec.layers)]
    return [bytes(part.data) for parts in layers for part in parts]


def test_a_name_follows_the_last_full_block_or_the_root(engine: FakeEngine) -> None:
    blocks = Blocks(engine, Cache())
    for salt in (b"", b"salt"):
        root = chain_root(engine.spec.fingerprint, engine.spec.kv_format.digest, salt)
        for length in range(len(IDS) + 1):
            ids = IDS[:length]
            parents = [root, *blocks.digests(ids, salt)]
            tail = ids[length // 16 * 16 :]
            assert blocks.end_name(ids, parents[1:], salt) == end_digest(parents[-1], tail)


def test_no_two_prompts_and_salts_share_a_name(engine: FakeEngine) -> None:
    blocks, names = Blocks(engine, Cache()), set()
    prompts = [IDS[:length] for length in range(40)] + [[*IDS[:length], 999] for length in range(40)]
    for ids in prompts:
        for salt in (b"", b"a"):
            names.add(blocks.end_name(ids, blocks.digests(ids, salt), salt))
    # A prompt shorter than a block has the root before it, which the salt is in.
    assert len(names) == 2 * len(prompts)


@pytest.mark.parametrize("length", LENGTHS)
async def test_an_end_is_put_after_its_blocks_and_loaded_into_other_pages(engine: FakeEngine, length: int) -> None:
    blocks, (source, hidden) = Blocks(engine, cache := Cache()), computed(engine, length)
    end, digests = end_of(blocks, length, hidden), blocks.digests(IDS[:length], b"")
    assert await blocks.write_back(source, digests, 0, lambda: True, end=end)
    assert cache.put_digests == [*digests, end.name]
    assert len(cache.blocks[end.name]) == engine.spec.kv_format.block_bytes
    found = await blocks.fetch_end(end.name, length)
    assert found is not None
    assert bytes(found.hidden) == hidden
    target = engine.reserve("b", length)
    before = kv(engine, target, range(length // 16 * 16))
    await blocks.load_end(target, found, length)
    tail = range(length // 16 * 16, length)
    assert kv(engine, target, tail) == kv(engine, source, tail)
    assert kv(engine, target, range(tail.start)) == before, "only what follows the blocks is written"


@pytest.mark.parametrize("kind", ["found", "known", "no end"])
async def test_blocks_alone_are_put_if_their_end_was_found_or_is_known(engine: FakeEngine, kind: str) -> None:
    """One that was found has no hidden state, and counts as seen all the same."""
    blocks, (source, hidden) = Blocks(engine, cache := Cache()), computed(engine)
    digests, end = blocks.digests(IDS, b""), end_of(blocks, hidden=b"" if kind == "found" else hidden)
    if kind == "known":
        cache.blocks[end.name] = b"known"
    given = None if kind == "no end" else end
    assert not await blocks.write_back(source, digests, 0, lambda: True, end=given)
    assert cache.put_digests == digests
    assert cache.seen == [digests if kind == "no end" else [*digests, end.name]]


async def test_an_end_is_put_though_all_blocks_were_found(engine: FakeEngine) -> None:
    blocks, (source, hidden) = Blocks(engine, cache := Cache()), computed(engine)
    end = end_of(blocks, hidden=hidden)
    assert await blocks.write_back(source, blocks.digests(IDS, b""), 6, lambda: True, end=end)
    assert cache.put_digests == [end.name]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_end_fits_if_its_kv_and_its_hidden_state_do(engine: FakeEngine, length: int) -> None:
    kv_format = engine.spec.kv_format
    room = kv_format.block_bytes - length % 16 * kv_format.token_bytes
    for size, fits in ((1, True), (room, True), (room + 1, False), (0, False)):
        assert Blocks(with_hidden(engine, size), Cache()).end_fits(length) == fits, f"{size} bytes"


async def test_an_end_that_fills_its_block_comes_out_again(engine: FakeEngine) -> None:
    kv_format = engine.spec.kv_format
    source, _ = computed(engine)
    hidden = bytes(i % 256 for i in range(12 * kv_format.token_bytes))
    blocks = Blocks(with_hidden(engine, len(hidden)), Cache())
    digests, end = blocks.digests(IDS, b""), end_of(blocks, hidden=hidden)
    assert blocks.end_fits(100)
    assert await blocks.write_back(source, digests, 6, lambda: True, end=end)
    found = await blocks.fetch_end(end.name, 100)
    assert found is not None
    assert bytes(found.hidden) == hidden


async def test_a_cache_that_takes_no_more_has_no_end(engine: FakeEngine) -> None:
    for most, tried in ((2, 3), (6, 7)):
        blocks, (source, hidden) = Blocks(engine, cache := Cache(most)), computed(engine)
        end = end_of(blocks, hidden=hidden)
        assert not await blocks.write_back(source, blocks.digests(IDS, b""), 0, lambda: True, end=end)
        assert len(cache.put_digests) == tried
        engine.free(source)


async def test_nothing_is_put_where_nothing_is_stored_or_after_a_stop(engine: FakeEngine) -> None:
    source, hidden = computed(engine)
    null = Blocks(engine, NullPrefixCache())
    assert not await null.write_back(source, null.digests(IDS, b""), 0, lambda: True, end=end_of(null, hidden=hidden))
    blocks = Blocks(engine, cache := Cache())
    end, digests = end_of(blocks, hidden=hidden), blocks.digests(IDS, b"")
    assert not await blocks.write_back(source, digests, 6, lambda: False, end=end)
    blocks.stop()
    assert not await blocks.write_back(source, digests, 6, lambda: True, end=end)
    assert cache.put_digests == []


async def test_a_job_that_is_over_meanwhile_leaves_its_end(engine: FakeEngine) -> None:
    blocks, (source, hidden) = Blocks(engine, cache := Cache()), computed(engine)
    digests, going = blocks.digests(IDS, b""), iter([True, False])
    end = end_of(blocks, hidden=hidden)
    assert not await blocks.write_back(source, digests, 0, lambda: next(going), end=end)
    assert cache.put_digests == digests


async def test_more_write_backs_than_may_run_drop_their_ends(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, (source, hidden) = Blocks(engine, cache := Cache()), computed(engine)
    digests, end = blocks.digests(IDS, b""), end_of(blocks, hidden=hidden)
    waiting, read = threading.Semaphore(0), engine.read_blocks

    def slow(handle: KvHandle, start: int, count: int, size: int = 0) -> list[bytes]:
        assert waiting.acquire(timeout=WAIT_S)
        return read(handle, start, count, size)

    monkeypatch.setattr(engine, "read_blocks", slow)
    running = [
        asyncio.create_task(blocks.write_back(source, digests, 6, lambda: True, end=end))
        for _ in range(MOST_WRITE_BACKS)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        assert not await blocks.write_back(source, digests, 6, lambda: True, end=end)
    assert cache.put_digests == []
    waiting.release(MOST_WRITE_BACKS)
    assert await asyncio.gather(*running) == [True] * MOST_WRITE_BACKS


async def test_an_end_that_is_not_there_is_not_found(engine: FakeEngine) -> None:
    blocks = Blocks(engine, cache := Cache())
    kv_format, name = engine.spec.kv_format, b"n" * 32
    assert await blocks.fetch_end(name, 100) is None
    cache.blocks[name] = PromptEnd(bytes(4 * kv_format.token_bytes), HIDDEN).pack(kv_format.block_bytes)
    found = await blocks.fetch_end(name, 100)
    assert found is not None
    assert (bytes(found.kv), bytes(found.hidden)) == (bytes(4 * kv_format.token_bytes), HIDDEN)
