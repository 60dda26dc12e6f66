"""Changes of prefixes: reports of the tiers from any thread, merged, and sent to each watcher of a worker's status."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from baton.config.worker import WorkerConfig
from baton.engine.fake import FakeEngine
from baton.errors import InvalidRequest
from baton.kv.hashing import block_digests
from baton.kv.prefix.contract import BlocksChanged, PrefixCache
from baton.pb import worker_pb2
from baton.worker import status
from baton.worker.status import (
    PrefixChange,
    PrefixChangeFeed,
    StatusHub,
    WorkerLoad,
    WorkerRole,
    WorkerStatus,
    new_identity,
    status_from_proto,
    status_to_proto,
)

DIGESTS = block_digests(bytes(32), range(640), 16)
NAMES = [digest[:8] for digest in DIGESTS]


class HostTier(PrefixCache):
    """A cache whose host memory the test speaks for."""

    def __init__(self) -> None:
        self.changed: BlocksChanged | None = None

    def watch(self, changed: BlocksChanged | None) -> None:
        self.changed = changed

    def tell(self, stored: Sequence[bytes] = (), dropped: Sequence[bytes] = ()) -> None:
        assert self.changed
        self.changed(stored, dropped)


class Waited(asyncio.Event):
    """Tells when someone begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.entered.set()
        return await super().wait()


class Rig:
    def __init__(self) -> None:
        self.engine, self.host, self.calls = FakeEngine(page_size=16, pages=64), HostTier(), 0
        self.feed = PrefixChangeFeed(self.engine, self.host, self.changed)
        identity = new_identity(WorkerConfig(), WorkerRole.DECODE, self.engine.spec, "")
        self.hub = StatusHub(identity, WorkerLoad, self.feed)
        self.hub.advertise(":7001")

    def changed(self) -> None:
        self.calls += 1
        self.hub.notify()

    def publish(self, blocks: int) -> None:
        handle = self.engine.reserve("r", 16 * blocks)
        self.engine.publish(handle, DIGESTS[:blocks])
        self.engine.free(handle)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.feed.close()
    assert made.host.changed is None
    made.engine.close()


def sorted_change(reset: bool, stored: Sequence[bytes] = (), dropped: Sequence[bytes] = ()) -> PrefixChange:
    """A message, in whatever order its names come."""
    return PrefixChange(reset, tuple(sorted(stored)), tuple(sorted(dropped)))


class Watcher:
    """Blocks that a watcher believes the worker to hold."""

    def __init__(self, rig: Rig) -> None:
        self._watch = rig.hub.watch()
        self.held: set[bytes] = set()
        self.changes: list[PrefixChange] = []

    async def next(self) -> PrefixChange | None:
        status = status_from_proto(status_to_proto(await asyncio.wait_for(anext(self._watch), 60)))
        change = status.prefixes
        if change is not None:
            assert not set(change.stored) & set(change.dropped)
            change = sorted_change(change.reset, change.stored, change.dropped)
            self.changes.append(change)
            self.held = (set() if change.reset else self.held) - set(change.dropped) | set(change.stored)
        return change

    async def until(self, held: Sequence[bytes]) -> None:
        async with asyncio.timeout(60):
            while self.held != set(held):
                await self.next()

    async def close(self) -> None:
        await self._watch.aclose()


async def test_the_first_change_has_all_blocks_and_later_ones_the_differences(rig: Rig) -> None:
    rig.publish(3)
    first, late = Watcher(rig), Watcher(rig)
    assert await first.next() == sorted_change(True, NAMES[:3])
    rig.publish(5)
    assert await first.next() == sorted_change(False, NAMES[3:5])
    assert await late.next() == sorted_change(True, NAMES[:5])
    rig.engine.drop_cached()
    assert await first.next() == sorted_change(False, (), NAMES[:5])
    await late.until([])
    await first.close()
    await late.close()
    assert not rig.feed._subscribers


async def test_a_change_by_any_thread_wakes_a_watcher_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Watcher(rig)
    assert await router.next() == sorted_change(True)
    rig.hub._changed = waits = Waited()
    monkeypatch.setattr("baton.worker.status.MAX_INTERVAL_S", 0.05)
    assert await router.next() is None
    monkeypatch.setattr("baton.worker.status.MAX_INTERVAL_S", 60.0)
    pending = asyncio.create_task(router.next())
    await asyncio.wait_for(waits.entered.wait(), 60)
    thread = threading.Thread(target=rig.publish, args=(2,))
    thread.start()
    assert await pending == sorted_change(False, NAMES[:2])
    thread.join(60)
    await router.close()


async def test_a_block_is_held_while_any_tier_has_it(rig: Rig) -> None:
    router = Watcher(rig)
    await router.next()
    rig.publish(2)
    rig.host.tell(DIGESTS[:4])
    await router.until(NAMES[:4])
    calls = rig.calls
    rig.engine.drop_cached()
    rig.host.tell([], DIGESTS[5:9])
    await asyncio.sleep(0)
    assert rig.calls == calls
    rig.host.tell([], DIGESTS[1:3])
    await router.until([NAMES[0], NAMES[3]])
    rig.publish(1)
    rig.host.tell([], DIGESTS[:1])
    rig.host.tell(DIGESTS[2:3])
    await router.until([NAMES[0], *NAMES[2:4]])
    assert not any(change.reset for change in router.changes[1:])
    await router.close()


async def test_a_long_change_comes_in_parts_and_a_lagging_watcher_gets_a_reset(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_NAMES", 4)
    monkeypatch.setattr("baton.worker.status.MAX_INTERVAL_S", 60.0)
    rig.host.tell(DIGESTS[:11])
    merged = []
    for _ in range(4):
        await asyncio.sleep(0)
        merged.append(sum(map(len, rig.feed._tiers)))
    assert merged == [4, 8, 11, 11], "others run in between"
    router = Watcher(rig)
    lengths = [len(change.stored) for change in [await router.next() for _ in range(3)] if change]
    assert lengths == [4, 4, 3]
    assert [change.reset for change in router.changes] == [True, False, False]
    assert router.held == set(NAMES[:11])
    for _ in range(5):
        rig.host.tell([], DIGESTS[:11])
        rig.host.tell(DIGESTS[20:36])
        rig.host.tell([], DIGESTS[20:36])
        rig.host.tell(DIGESTS[:3])
    (subscriber,) = rig.feed._subscribers
    rig.feed._merge()
    assert sum(map(len, subscriber._unsent)) <= 3 + 4
    await router.until(NAMES[:3])
    assert router.changes[3] == sorted_change(True, NAMES[:3])
    await router.close()


async def test_changes_after_the_loop_are_dropped() -> None:
    made: list[Callable[[], None]] = []

    def elsewhere() -> None:
        async def make() -> None:
            rig = Rig()
            made.append(lambda: rig.publish(2))

        asyncio.run(make())

    await asyncio.to_thread(elsewhere)
    made[0]()


@pytest.mark.parametrize("field", ["stored", "dropped"])
def test_names_that_are_cut_are_refused(field: str) -> None:
    identity = new_identity(WorkerConfig(), WorkerRole.DECODE, FakeEngine(pages=1).spec, "")
    change = PrefixChange(True, tuple(NAMES[:2]), tuple(NAMES[2:3]))
    identity = replace(identity, shards=(replace(identity.shards[0], kv_address=":7001"),))
    status = WorkerStatus(identity, WorkerLoad(), draining=False, prefixes=change)
    message = status_to_proto(status)
    assert status_from_proto(message) == status
    setattr(message.prefixes, field, b"x" * 12)
    with pytest.raises(InvalidRequest, match=rf"prefixes\.{field}: must be names of 8 bytes each.*12 bytes"):
        status_from_proto(message)
    message.ClearField("prefixes")
    assert status_from_proto(message).prefixes is None
    assert worker_pb2.PrefixChanges() == message.prefixes
