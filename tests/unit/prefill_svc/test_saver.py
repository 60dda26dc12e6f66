"""Prompts that are saved while they are computed: their choice, their wait for the store, and failures."""

import asyncio
from collections.abc import Sequence
from unittest import mock

import pytest

from baton.engine.fake import FakeEngine
from baton.kv.prefix.contract import Payload
from baton.request import CachePolicy, SamplingParams
from baton.worker.prefix_cache import BlockCopier
from prefill_svc.job import PrefillJob, PrefillRequest
from prefill_svc.prefix import LongPromptSaver
from prefill_svc.scheduler import PrefillScheduler
from tests.engine_calls import prefill_chunk
from tests.prefix_cache import MemoryPrefixCache

WAIT_S = 60.0
CHUNK, CHUNKS = 32, 6
IDS = [(7 * i) % 1000 for i in range(CHUNK * CHUNKS)]


class Store(MemoryPrefixCache):
    """Takes at most `most` blocks, and holds every save until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1000
        self.come, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        self.come.set()
        await self.go.wait()
        left = max(0, self.most - len(self.blocks))
        return await super().save(digests[:left], payloads[:left])


class Rig:
    def __init__(self, *, long_chunks: int = 4, wait_s: float = WAIT_S, cache: CachePolicy | None = None) -> None:
        self.engine, self.store = FakeEngine(), Store()
        self.block = self.engine.spec.kv_format.block_size
        blocks = BlockCopier(self.engine, self.store)
        with mock.patch("prefill_svc.prefix.SAVE_WAIT_S", wait_s):
            self.saver = LongPromptSaver(self.store, blocks, self.block, long_chunks)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = PrefillRequest("r", 0, "", IDS, (), (0,), params, cache=cache or CachePolicy.READ_WRITE)
        self.job = PrefillJob.create(request, PrefillScheduler(self.engine.spec, CHUNK, 8).admit(len(IDS)), 0.0)
        self.job.handle = self.engine.reserve("r", len(IDS))
        self.job.prefix.digests = blocks.digests(IDS, b"")

    def compute(self) -> None:
        job, end = self.job, self.job.computed_tokens + CHUNK
        prefill_chunk(self.engine, job.allocated_handle, IDS, job.computed_tokens, end, on_layer=lambda _: None)
        job.computed_tokens = end

    async def chunk(self) -> None:
        """The next chunk, and what follows it."""
        self.compute()
        async with asyncio.timeout(WAIT_S):
            await self.saver.save(self.job)

    async def settled(self) -> int:
        """The number of stored blocks when the save under way has ended."""
        assert self.job.prefix.saving is not None
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({self.job.prefix.saving})
        return len(self.store.blocks)

    def right(self, blocks: int) -> bool:
        """Whether the store has just these leading blocks, with the KV of the job's pages."""
        payloads = self.engine.read_blocks(self.job.allocated_handle, 0, blocks)
        return dict(self.store.blocks) == dict(zip(self.job.prefix.digests[:blocks], payloads, strict=True))


async def test_a_long_prompt_is_saved_chunk_by_chunk() -> None:
    rig = Rig()
    for chunk in range(1, CHUNKS):
        await rig.chunk()
        assert await rig.settled() == chunk * CHUNK // rig.block
    rig.compute()
    await rig.saver.finish(rig.job)
    assert rig.right(len(rig.job.prefix.digests))
    assert rig.job.prefix.saved == len(rig.job.prefix.digests)


@pytest.mark.parametrize(
    ("long_chunks", "cache", "saved"),
    [
        (CHUNKS, CachePolicy.READ_WRITE, True),
        (CHUNKS + 1, CachePolicy.READ_WRITE, False),
        (0, CachePolicy.READ_WRITE, False),
        (CHUNKS, CachePolicy.WRITE, True),
        (CHUNKS, CachePolicy.READ, False),
    ],
)
async def test_only_long_prompts_that_may_write_are_saved(long_chunks: int, cache: CachePolicy, saved: bool) -> None:
    rig = Rig(long_chunks=long_chunks, cache=cache)
    for _ in range(2):
        await rig.chunk()
    await rig.saver.finish(rig.job)
    assert len(rig.store.blocks) == (4 if saved else 0)


async def test_tokens_that_were_cached_make_no_prompt_long() -> None:
    rig = Rig(long_chunks=CHUNKS)
    rig.job.prefix.origins.append(("pool", CHUNK))
    rig.job.computed_tokens = CHUNK
    await rig.chunk()
    assert rig.job.prefix.saving is None


async def test_a_chunk_waits_for_the_save_of_the_one_before_it() -> None:
    rig = Rig()
    rig.store.go.clear()
    await rig.chunk()
    await rig.store.come.wait()
    second = asyncio.create_task(rig.chunk())
    for _ in range(20):  # turns of the loop, enough for a chunk that does not wait
        await asyncio.sleep(0)
    assert not second.done()
    rig.store.go.set()
    await second
    assert await rig.settled() == 4


async def test_a_prompt_whose_saves_keep_up_does_not_lose_its_turn_at_the_engine() -> None:
    rig = Rig()
    await rig.chunk()
    await rig.settled()
    rig.compute()
    with pytest.raises(StopIteration):
        rig.saver.save(rig.job).send(None)
    assert await rig.settled() == 4


async def test_a_store_that_hangs_delays_each_chunk_for_a_moment_and_loses_nothing() -> None:
    rig = Rig(wait_s=0.001)
    rig.store.go.clear()
    await rig.chunk()
    await rig.store.come.wait()
    for _ in range(CHUNKS - 2):
        await rig.chunk()
    assert rig.store.blocks == {}
    rig.store.go.set()
    assert await rig.settled() == 2, "the save that was under way"
    rig.compute()
    await rig.saver.save(rig.job)
    assert await rig.settled() == len(rig.job.prefix.digests), "all that has become final since"
    assert rig.right(len(rig.job.prefix.digests))


async def test_a_prompt_that_is_computed_leaves_a_store_that_hangs() -> None:
    rig = Rig(wait_s=0.001)
    rig.store.go.clear()
    for _ in range(CHUNKS):
        await rig.chunk()
    async with asyncio.timeout(WAIT_S):
        await rig.saver.finish(rig.job)
    assert rig.job.prefix.saving.done(), "nobody reads the pages"
    assert rig.job.prefix.saved == 0


async def test_a_save_that_fails_is_made_with_the_next_chunk() -> None:
    rig = Rig()
    rig.store.most = 1
    await rig.chunk()
    assert await rig.settled() == 1
    await rig.chunk()
    assert await rig.settled() == 1, "full"
    rig.store.most = 1000
    await rig.chunk()
    assert await rig.settled() == 6
    assert rig.right(6)


async def test_blocks_that_the_store_has_are_not_written_again() -> None:
    rig = Rig()
    rig.store.blocks[rig.job.prefix.digests[1]] = b"there"
    await rig.chunk()
    assert await rig.settled() == 2
    assert rig.store.blocks[rig.job.prefix.digests[1]] == b"there"
    assert rig.job.prefix.saved == 2


async def test_own_saved_blocks_are_removed_but_not_those_of_others() -> None:
    rig = Rig()
    rig.store.blocks[rig.job.prefix.digests[0]] = b"there"
    for _ in range(2):
        await rig.chunk()
    await rig.settled()
    assert len(rig.store.blocks) == 4
    await rig.saver.remove(rig.job)
    assert list(rig.store.blocks) == rig.job.prefix.digests[:1]
