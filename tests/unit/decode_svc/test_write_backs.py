"""Write-back: what is copied, what gives way, and that nothing is held for longer than a copy takes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import OutOfPages
from baton.telemetry import metrics
from baton.worker.prefix_cache import MAX_WRITE_BACKS, BlockCopier
from decode_svc.attempts import PublishedBlocks
from decode_svc.scheduler import BatchPages
from decode_svc.write_backs import MAX_WAITING_COPIES, WriteBacks
from tests.decoding import digests
from tests.engine_calls import prefill_chunk
from tests.metrics import count
from tests.prefix_cache import MemoryPrefixCache
from tests.property.attempts import payloads

IDS = list(range(40, 57))
PAGES = 16


class Held(FakeEngine):
    """An engine whose reads wait for a gate, and tell that they do."""

    def __init__(self) -> None:
        super().__init__(page_size=4, pages=PAGES, block_size=4)
        self.gate, self.reading = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        self.reading.release()
        assert self.gate.wait(60)
        return super().read_blocks(handle, token_start, count)

    def published(self, ids: Sequence[int] = IDS) -> list[bytes]:
        """Leave these tokens' blocks in the pool, and return their names."""
        handle = self.reserve("r", len(ids))
        prefill_chunk(self, handle, ids, 0, len(ids), on_layer=lambda layer: None)
        names = digests(self, ids)
        self.publish(handle, names)
        self.free(handle)
        return names


class Rig:
    """Write-backs into a dictionary."""

    def __init__(self) -> None:
        self.engine = Held()
        self.cache = MemoryPrefixCache()
        self.batch_pages, self.changes = BatchPages(), 0
        self.backs = WriteBacks(
            self.engine,
            BlockCopier(self.engine, self.cache),
            self.batch_pages,
            enabled=True,
            changed=self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1

    async def reading(self) -> None:
        assert await asyncio.to_thread(self.engine.reading.acquire, timeout=60)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.engine.gate.set()
    await rig.backs.close()
    assert len(rig.backs) == 0
    assert rig.engine.audit() == {}


def dropped() -> float:
    return count(metrics.PREFIX_BLOCKS, "any", "dropped")


async def test_the_new_blocks_of_a_sequence_are_copied_and_nothing_stays_pinned(rig: Rig) -> None:
    names = rig.engine.published()
    rig.backs.add(PublishedBlocks("r/0", names, 1))
    assert rig.engine.stats().used == 4
    (entry,) = rig.backs.entries(0.0)
    assert (entry.owner, entry.kind, entry.state, entry.pages) == ("r/0/write_back", "write_back", "ended", 4)
    assert rig.engine.audit() == {"r/0/write_back": 4}
    await rig.backs.wait_finished()
    assert rig.cache.blocks == dict(zip(names[1:], payloads(rig.engine, IDS)[1:], strict=True))
    assert rig.engine.stats().used == 0
    assert rig.changes == 1


@pytest.mark.parametrize("first", [4, 9])
async def test_without_a_new_block_nothing_is_pinned(rig: Rig, first: int) -> None:
    rig.backs.add(PublishedBlocks("r/0", rig.engine.published(), first))
    assert len(rig.backs) == 0


async def test_blocks_evicted_meanwhile_are_not_copied(rig: Rig) -> None:
    names = rig.engine.published()
    thief = rig.engine.reserve("thief", (PAGES - 2) * 4)
    before = dropped()
    rig.backs.add(PublishedBlocks("short", names, 0))
    await rig.backs.wait_finished()
    assert list(rig.cache.blocks) == names[:2]
    rig.backs.add(PublishedBlocks("gone", names, 2))
    assert len(rig.backs) == 0
    assert dropped() == before + 2
    rig.engine.free(thief)


async def test_a_reservation_gets_the_pages_of_copies_and_the_copies_end(rig: Rig) -> None:
    names = rig.engine.published()
    rig.engine.gate.clear()
    rig.backs.add(PublishedBlocks("r/0", names, 0))
    await rig.reading()
    with pytest.raises(OutOfPages):
        rig.engine.reserve("wants", PAGES * 4)
    assert await asyncio.to_thread(rig.backs.release_pages)
    assert not rig.backs.release_pages()
    rig.engine.gate.set()
    await rig.backs.wait_finished()
    assert rig.cache.blocks == {}
    rig.engine.free(rig.engine.reserve("wants", PAGES * 4))


async def test_nothing_is_pinned_while_pages_are_kept_for_the_batch(rig: Rig) -> None:
    rig.batch_pages.kept_pages, before = 1, dropped()
    rig.backs.add(PublishedBlocks("r/0", rig.engine.published(), 0))
    assert len(rig.backs) == 0
    assert dropped() == before + 4


async def test_a_few_are_copied_at_a_time_some_wait_and_the_rest_is_dropped(rig: Rig) -> None:
    names = rig.engine.published()
    rig.engine.gate.clear()
    before = dropped()
    for number in range(MAX_WRITE_BACKS + MAX_WAITING_COPIES + 3):
        rig.backs.add(PublishedBlocks(f"r{number}/0", names, 0))
    assert len(rig.backs.entries(0.0)) == MAX_WRITE_BACKS
    assert len(rig.backs) == MAX_WRITE_BACKS + MAX_WAITING_COPIES
    assert dropped() == before + 3 * 4
    assert rig.engine.stats().used == 4
    rig.engine.gate.set()
    await rig.backs.wait_finished()
    assert len(rig.backs) == 0
    assert list(rig.cache.blocks) == names


async def test_a_copy_that_fails_holds_nothing_and_the_next_goes_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    names, put = rig.engine.published(), rig.cache.put

    def failing(digest: bytes, payload: object) -> bool:
        rig.cache.put = put  # type: ignore[method-assign]
        raise RuntimeError("told so by the test")

    rig.cache.put = failing  # type: ignore[method-assign]
    rig.backs.add(PublishedBlocks("r/0", names, 0))
    await rig.backs.wait_finished()
    assert "r/0/write_back failed" in caplog.text
    rig.backs.add(PublishedBlocks("s/0", names, 0))
    await rig.backs.wait_finished()
    assert list(rig.cache.blocks) == names


async def test_closing_waits_for_the_read_in_progress_and_for_nothing_else(rig: Rig) -> None:
    names = rig.engine.published()
    rig.engine.gate.clear()
    for number in range(MAX_WRITE_BACKS + 2):
        rig.backs.add(PublishedBlocks(f"r{number}/0", names, 0))
    await rig.reading()
    closing = asyncio.create_task(rig.backs.close())
    await asyncio.sleep(0)
    assert not closing.done()
    rig.engine.gate.set()
    await closing
    assert rig.cache.blocks == {}
    rig.backs.add(PublishedBlocks("late/0", names, 0))
    assert len(rig.backs) == 0
