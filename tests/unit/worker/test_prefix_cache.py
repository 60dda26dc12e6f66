"""Blocks between a cache and pages: what is named, loaded and written back, and in what portions."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix.contract import Payload
from baton.worker import prefix_cache
from baton.worker.prefix_cache import MAX_WRITE_BACKS, BlockCopier
from tests.engine_calls import prefill_chunk
from tests.prefix_cache import MemoryPrefixCache

IDS = [(7 * i) % 1000 for i in range(100)]
WAIT_S = 60.0


class Cache(MemoryPrefixCache):
    """Remembers what was fetched and put; takes only `most` blocks."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self.fetched_twice = asyncio.Event()
        self.put_digests: list[bytes] = []
        self._most = most

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        self.fetched.append(len(digests))
        if len(self.fetched) == 2:
            self.fetched_twice.set()
        return await super().fetch(digests)

    def put(self, digest: bytes, payload: Payload) -> bool:
        self.put_digests.append(digest)
        return len(self.blocks) < self._most and super().put(digest, payload)


class SlowEngine(FakeEngine):
    """Holds each write until `go`, and tells that it has come; `written` are first tokens and numbers of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.go = threading.Event(), threading.Event()
        self.written: list[tuple[int, int]] = []

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: Sequence[Payload]) -> None:
        self.written.append((token_start, len(payloads)))
        self.writing.set()
        assert self.go.wait(WAIT_S)
        super().write_blocks(handle, token_start, payloads)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def computed(engine: FakeEngine, owner: str = "a") -> KvHandle:
    handle = engine.reserve(owner, len(IDS))
    prefill_chunk(engine, handle, IDS, 0, len(IDS), on_layer=lambda _: None)
    return handle


def two_blocks_a_slice(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "SLICE_BYTES", 2 * engine.spec.kv_format.block_bytes)


def kv(engine: FakeEngine, handle: KvHandle, tokens: range) -> list[bytes]:
    spec = engine.spec.kv_format
    layers = [engine.read_kv(handle, layer, tokens, range(spec.heads)) for layer in range(spec.layers)]
    return [bytes(part.data) for parts in layers for part in parts]


async def test_names_are_those_of_the_chain_however_many(engine: FakeEngine) -> None:
    found = BlockCopier(engine, Cache())
    for ids in (IDS, IDS * 100, []):
        root = chain_root(engine.spec.fingerprint, engine.spec.kv_format.digest, b"salt")
        assert await found.hash_blocks(ids, b"salt") == block_digests(root, ids, 16)


@pytest.mark.parametrize("blocks_a_copy", [1, 2, 5])
async def test_written_back_blocks_are_loaded_into_other_pages(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, blocks_a_copy: int
) -> None:
    two_blocks_a_slice(engine, monkeypatch)
    monkeypatch.setattr(prefix_cache, "COPY_BYTES", blocks_a_copy * engine.spec.kv_format.block_bytes)
    cache = Cache()
    both, source, told = BlockCopier(engine, cache), computed(engine), list[int]()
    digests = await both.hash_blocks(IDS, b"")
    await both.write_back(source, digests, 0, lambda: True)
    assert cache.put_digests == digests
    target = engine.reserve("b", len(IDS))
    assert await both.load(target, digests, range(1, 6), lambda: True, told.append) == 6
    assert told == [3, 5, 6]
    assert cache.fetched == [2, 2, 1]
    assert kv(engine, target, range(16, 96)) == kv(engine, source, range(16, 96))


async def test_only_what_the_cache_wants_is_written_back(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks_a_slice(engine, monkeypatch)
    cache = Cache()
    both, source = BlockCopier(engine, cache), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    cache.blocks[digests[3]] = b"known"
    await both.write_back(source, digests, 1, lambda: True)
    assert cache.put_digests == [digests[1], digests[2], digests[4], digests[5]]
    assert cache.blocks[digests[3]] == b"known"


async def test_a_full_cache_and_a_job_that_is_over_end_a_write_back(engine: FakeEngine) -> None:
    both, source = BlockCopier(engine, cache := Cache(most=2)), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    await both.write_back(source, digests, 0, lambda: False)
    assert cache.put_digests == []
    await both.write_back(source, digests, 0, lambda: True)
    assert cache.put_digests == digests[:3]


async def test_more_write_backs_than_may_run_are_dropped(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    both, source = BlockCopier(engine, cache := Cache()), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    waiting = threading.Semaphore(0)
    read = engine.read_blocks
    monkeypatch.setattr(engine, "read_blocks", lambda *args: (waiting.acquire(timeout=WAIT_S), read(*args))[1])
    running = [asyncio.create_task(both.write_back(source, digests, 0, lambda: True)) for _ in range(MAX_WRITE_BACKS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await both.write_back(source, digests, 0, lambda: True)
    assert cache.put_digests == []
    waiting.release(1000)
    await asyncio.gather(*running)
    assert len(cache.put_digests) == MAX_WRITE_BACKS * len(digests)


async def test_a_block_that_is_gone_shortens_a_load(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks_a_slice(engine, monkeypatch)
    both, source = BlockCopier(engine, cache := Cache()), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    await both.write_back(source, digests, 0, lambda: True)
    del cache.blocks[digests[3]]
    assert await both.load(engine.reserve("b", 96), digests, range(6), lambda: True) == 3
    assert await both.load(engine.reserve("c", 96), digests, range(3, 6), lambda: True) == 3


async def test_the_next_slice_is_fetched_while_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine()
    two_blocks_a_slice(engine, monkeypatch)
    both, source = BlockCopier(engine, cache := Cache()), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    await both.write_back(source, digests, 0, lambda: True)
    loading = asyncio.create_task(both.load(engine.reserve("b", 96), digests, range(6), lambda: True))
    async with asyncio.timeout(WAIT_S):
        assert await asyncio.to_thread(engine.writing.wait, WAIT_S)
        await cache.fetched_twice.wait()
        assert cache.fetched == [2, 2]
        engine.go.set()
        assert await loading == 6


@pytest.mark.parametrize("how", ["cancel", "cancel twice", "over", "stop"])
async def test_a_load_ends_after_the_copy_in_progress_and_not_before(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine()
    monkeypatch.setattr(prefix_cache, "COPY_BYTES", 2 * engine.spec.kv_format.block_bytes)
    both, source = BlockCopier(engine, Cache()), computed(engine)
    digests = await both.hash_blocks(IDS, b"")
    await both.write_back(source, digests, 0, lambda: True)
    going = [True]
    target = engine.reserve("b", 96)
    loading = asyncio.create_task(both.load(target, digests, range(6), lambda: going[0]))
    assert await asyncio.to_thread(engine.writing.wait, WAIT_S)
    if "cancel" in how:
        loading.cancel()
        await asyncio.sleep(0.01)
        if how == "cancel twice":
            loading.cancel()
    elif how == "over":
        going[0] = False
    else:
        both.stop()
    await asyncio.sleep(0.01)
    assert not loading.done(), "two blocks are being written"
    engine.go.set()
    done = (await asyncio.gather(loading, return_exceptions=True))[0]
    assert isinstance(done, asyncio.CancelledError) if "cancel" in how else done == 0
    # A load that is cancelled alone, and whose job goes on, is waited for to the end.
    assert engine.written == ([(0, 2), (32, 2), (64, 2)] if "cancel" in how else [(0, 2)])
