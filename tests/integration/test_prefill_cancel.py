"""Memory is back within a second of a cancel, in every state of a prefill; tested with five-fold slack."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from baton.engine.fake import FakeEngine
from baton.kv.prefix.contract import Payload
from baton.ledger import LedgerEntry
from baton.pb import kv_pb2, prefill_pb2
from baton.rpc.channel import kv_channel
from baton.worker import prefix_cache
from tests.prefill import PROMPT, WAIT_S, Client, Gate, read, serving, status_of
from tests.prefix_cache import MemoryPrefixCache
from tests.unit.transfer.support import Gate as CopyGate

LEASE_S = 600.0
"""Longer than any test waits: what is freed sooner is freed by something else."""

LONG = [(7 * i) % 1000 for i in range(1000)]


class SlowCache(MemoryPrefixCache):
    """Says that it has all, and answers the operation named `slow` only once `go` is set."""

    slow = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.come, self.go = asyncio.Event(), asyncio.Event()

    async def lookup(self, digests: Sequence[bytes]) -> int:
        await self._held("lookup")
        return await super().lookup(digests)  # type: ignore[return-value]

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        await self._held("fetch")
        return await super().fetch(digests)

    async def _held(self, name: str) -> None:
        if self.slow == name:
            self.come.set()
            await self.go.wait()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[SlowCache]:
    """The caches of the workers that the test starts."""
    made: list[SlowCache] = []

    def open_cache(*_: Any, **__: Any) -> SlowCache:
        made.append(SlowCache())
        return made[-1]

    monkeypatch.setattr("baton.worker.prefix_cache.open_prefix_cache", open_cache)
    return made


@contextlib.asynccontextmanager
async def freed(client: Client) -> AsyncIterator[None]:
    """All pages are back in time after the block, and nobody is listed any more."""
    yield
    async with asyncio.timeout(WAIT_S):
        await client.pages_back()
    ledger = await client.app.worker.ledger()
    assert (list(ledger.entries), ledger.violation) == ([], "")


async def owners(client: Client) -> list[LedgerEntry]:
    """The ledger's entries, over the wire's own way of making them."""
    ledger = await client.app.worker.ledger()
    assert ledger.violation == ""
    return list(ledger.entries)


async def abandon(client: Client, transfer_id: str, incarnation: str = "") -> None:
    incarnation = incarnation or client.app.status.identity.incarnation
    await client.prefill.Abandon(prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=incarnation))


async def cancelled(client: Client, reading: "asyncio.Task[Any]", call: Any) -> None:
    noticed = client.watch_aborts()
    call.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    async with asyncio.timeout(WAIT_S):
        await noticed.wait()


@pytest.mark.parametrize("by", ["cancel", "abandon"])
async def test_queued(by: str) -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        first = client.call()
        reading = asyncio.create_task(read(first))
        await gate.reached()
        second = client.call(PROMPT[::-1], transfer_id="t")
        waiting = asyncio.create_task(status_of(second) if by == "abandon" else read(second))
        await client.status(lambda status: status.load.pages_used == 14)
        entry = next(entry for entry in await owners(client) if entry.detail == "transfer t")
        assert (entry.kind, entry.state, entry.pages) == ("kv", "preparing", 7)
        if by == "cancel":
            await cancelled(client, waiting, second)
        else:
            await abandon(client, "t", incarnation="of a stranger")
            assert len(await owners(client)) == 2
            await abandon(client, "t")
            assert (await waiting)[0] is grpc.StatusCode.CANCELLED
        async with asyncio.timeout(WAIT_S):
            await client.status(lambda status: status.load.pages_used == 7)
        async with freed(client):
            await cancelled(client, reading, first)
            gate.open()


@pytest.mark.parametrize("slow", ["lookup", "fetch"])
async def test_while_the_prefix_cache_is_slow(slow: str, caches: list[SlowCache]) -> None:
    async with serving() as client:
        await client.done()
        await client.pages_back()
        client.app.engine.drop_cached()
        cache = caches[0]
        cache.slow = slow
        call = client.call(transfer_id="t")
        reading = asyncio.create_task(read(call))
        await cache.come.wait()
        (entry,) = await owners(client)
        assert (entry.state, entry.pages) == ("preparing", 7 if slow == "fetch" else 0)
        async with freed(client):
            await cancelled(client, reading, call)
        cache.go.set()
        cache.slow = ""
        assert (await client.done()).cached.host == 96


class SlowCopies(FakeEngine):
    """Holds copies into pages (`writes`) or out of them (`reads`)."""

    writes: Callable[[], None] | None = None
    reads: Callable[[], None] | None = None
    written = 0

    def write_blocks(self, *args: Any) -> None:
        if self.writes is not None:
            self.written += 1
            self.writes()
        super().write_blocks(*args)

    def read_kv(self, *args: Any) -> Any:
        found = super().read_kv(*args)
        if self.reads is not None:
            self.reads()
        return found


async def test_loading_stops_after_the_copy_under_way(caches: list[SlowCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "COPY_BYTES", 1)
    engine = SlowCopies(layers=8)
    async with serving(engine) as client:
        await client.done()
        await client.pages_back()
        engine.drop_cached()
        door = engine.writes = CopyGate()
        call = client.call(transfer_id="t")
        reading = asyncio.create_task(read(call))
        await asyncio.to_thread(door.reached.wait, WAIT_S)
        await cancelled(client, reading, call)
        assert engine.stats().used == 7, "a write is in flight"
        async with freed(client):
            door.open()
        assert engine.written == 1


async def test_computing_stops_after_the_layer_before_and_after_the_first_chunk() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, layers=8), chunk_size=50) as client:
        for layers in (1, 12):
            call = client.call(transfer_id=f"t{layers}")
            reading = asyncio.create_task(read(call))
            for _ in range(layers - 1):
                gate.pass_layers(1)
            await gate.reached(layers)
            await cancelled(client, reading, call)
            (entry,) = await owners(client)
            assert (entry.state, entry.pages) == ("prefilling", 7)
            async with freed(client):
                gate.pass_layers(1)


async def test_held_kv_is_given_back_by_abandon_and_nothing_is_exported_under_the_id_again() -> None:
    async with serving(lease_s=LEASE_S) as client:
        await client.done(transfer_id="t")
        (entry,) = await owners(client)
        assert (entry.kind, entry.state, entry.pages) == ("export", "held", 7)
        assert entry.deadline_s is not None
        assert 0 < entry.deadline_s <= LEASE_S
        await abandon(client, "t", incarnation="of a stranger")
        assert len(await owners(client)) == 1
        async with freed(client):
            await abandon(client, "t")
        await abandon(client, "t")
        await abandon(client, "unknown")
        for transfer_id in ("t", "unknown"):
            code, details = await status_of(client.call(transfer_id=transfer_id))
            assert (code, details) == (grpc.StatusCode.ABORTED, f"transfer {transfer_id} was abandoned")
        assert await owners(client) == []


@pytest.fixture
def big() -> FakeEngine:
    """An engine whose KV is larger than all buffers on the way: 8 MiB for LONG."""
    return FakeEngine(head_dim=256, layers=2, heads=2, pages=128)


async def stalled_reader(client: Client, channel: grpc.aio.Channel, transfer_id: str) -> Any:
    """A consumer that has begun and reads no more."""
    fetch = channel.unary_stream("/baton.v1.Kv/FetchKv", request_serializer=kv_pb2.FetchKvRequest.SerializeToString)
    incarnation = client.app.status.identity.incarnation
    call = fetch(kv_pb2.FetchKvRequest(transfer_id=transfer_id, incarnation=incarnation))
    assert await call.read()
    return call


@pytest.mark.parametrize("by", ["abandon", "lease", "cancel of the prefill"])
async def test_a_consumer_that_does_not_read_holds_no_pages(by: str, big: FakeEngine) -> None:
    gate = Gate()
    engine = big
    if by == "cancel of the prefill":
        engine = FakeEngine(head_dim=256, layers=2, heads=2, pages=128, chunk_time=1.0, delay=gate)
    async with (
        serving(engine, lease_s=3.0 if by == "lease" else LEASE_S, chunk_size=500) as client,
        kv_channel(client.app.addresses.kv) as channel,
    ):
        prefilling = client.call(LONG, transfer_id="t")
        reading = asyncio.create_task(read(prefilling))
        gate.pass_layers(2)
        if by == "cancel of the prefill":
            await gate.reached(3)
        else:
            await reading
        call = await stalled_reader(client, channel, "t")
        async with freed(client):
            if by == "abandon":
                await abandon(client, "t")
            elif by == "cancel of the prefill":
                await cancelled(client, reading, prefilling)
                gate.open()
        call.cancel()


async def test_pages_with_a_read_in_flight_are_listed_as_draining_until_it_ends() -> None:
    engine = SlowCopies()
    async with serving(engine, lease_s=LEASE_S) as client, kv_channel(client.app.addresses.kv) as channel:
        await client.done(transfer_id="t")
        door = engine.reads = CopyGate()
        fetching = asyncio.create_task(stalled_reader(client, channel, "t"))
        await asyncio.to_thread(door.reached.wait, WAIT_S)
        await abandon(client, "t")
        (entry,) = await owners(client)
        assert (entry.kind, entry.state, entry.pages) == ("draining", "ended", 7)
        async with freed(client):
            door.open()
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await fetching
