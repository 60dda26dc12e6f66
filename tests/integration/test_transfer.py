"""KV over real gRPC servers and sockets: layouts, overlap, slices, back-pressure, and every fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import (
    BatonError,
    EngineError,
    IncompleteTransfer,
    SourceUnreachable,
    StaleIncarnation,
    TransferError,
    WrongPrefix,
)
from baton.kv.format import PartData, Shard
from baton.pb import kv_pb2, kv_pb2_grpc
from baton.request import Handoff, RemoteExport
from baton.rpc.channel import kv_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.server import listen
from baton.telemetry.metrics import EXPORTS_OPEN, TRANSFER_BYTES, TRANSFER_FAULTS
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import fetch_from, fetch_prefix_from
from baton.transfer.transport import SERVICE, GrpcSource, KvServicer
from baton.transfer.wire import KvSlice
from tests.engine_calls import prefill_chunk
from tests.metrics import count
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    WHOLE,
    Engine,
    Gate,
    contents,
    faults,
    handoff,
    mark_all_final,
    prefilled,
    prompt,
    ready,
    whole,
)

TOKENS = 40
Mangle = Callable[[int, int, bytes], list[bytes]]


class FaultyServicer(KvServicer):
    """Passes frames on as `mangle(number of the stream, number of the frame, frame)` makes them."""

    def __init__(self, exports: ExportRegistry) -> None:
        super().__init__(exports)
        self.mangle: Mangle = lambda stream, number, frame: [frame]
        self.requests: list[kv_pb2.FetchKvRequest] = []
        self.requested = asyncio.Event()
        self.stopped = asyncio.Event()

    async def FetchKv(
        self, request: kv_pb2.FetchKvRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        self.requests.append(request)
        self.requested.set()
        stream, number = len(self.requests) - 1, 0
        try:
            async for frame in super().FetchKv(request, context):
                for mangled in self.mangle(stream, number, frame):
                    yield mangled
                number += 1
        finally:
            self.stopped.set()


class Pair:
    """A worker that exports and one that fetches, of different page sizes, over loopback."""

    def __init__(self, **sizes: Any) -> None:
        self.exporter = Engine(page_size=sizes.get("from_pages", 16), kv_dtype=sizes.get("dtype", "float32"))
        self.engine = Engine(page_size=sizes.get("to_pages", 64))
        token_bytes = self.exporter.spec.kv_format.token_bytes // LAYERS
        self.exports = ExportRegistry(
            self.exporter,
            INCARNATION,
            frame_bytes=sizes.get("frame_tokens", 8) * token_bytes,
            unknown_wait_s=0.05,
            lease_s=sizes.get("lease_s", 10.0),
            shards=sizes.get("shards", ()),
        )
        self.shard = sizes.get("shard", WHOLE)
        self.servicer = FaultyServicer(self.exports)
        self.handle = self.engine.reserve("decode", TOKENS)
        self.address = ""
        self.channel: grpc.aio.Channel

    async def fetch(self, transfer_id: str = "t", **changes: Any) -> Handoff:
        """Fetch all; `changes` are those of `source`."""
        timeout_s = changes.get("timeout_s", 30.0)
        sources = [self.source(transfer_id, **changes)]
        return await fetch_from(sources, self.engine, self.handle, whole(TOKENS), length=TOKENS, timeout_s=timeout_s)

    async def fetch_prefix(self, tokens: range, **changes: Any) -> None:
        options = {"length": TOKENS, "digest": b"name", "timeout_s": 30.0, **changes}
        await fetch_prefix_from([self.source()], self.engine, self.handle, tokens=tokens, **options)

    def source(
        self, transfer_id: str = "t", *, incarnation: str = INCARNATION, shard: Shard | None = None, **changes: Any
    ) -> GrpcSource:
        shard = shard or self.shard
        options = {"timeout_s": 30.0, "silence_timeout_s": 20.0, **changes}
        return GrpcSource(self.channel, RemoteExport(transfer_id, incarnation, (shard,)), shard, **options)

    def assert_equal(self, kv_slice: KvSlice | None = None) -> None:
        """The consumer's pages hold what a prefill of the same prompt gives."""
        kv_slice = kv_slice or whole(TOKENS)
        expected = Engine(kv_dtype="float32")
        assert contents(self.engine, self.handle, kv_slice) == contents(expected, prefilled(expected, TOKENS), kv_slice)


@asynccontextmanager
async def running(**sizes: Any) -> AsyncIterator[Pair]:
    pair, exports_open = Pair(**sizes), count(EXPORTS_OPEN)
    async with listen(
        "127.0.0.1:0", insecure=False, add=pair.servicer.add_to_server, services=[SERVICE], grace=0.0
    ) as listener:
        pair.address = listener.address
        try:
            async with kv_channel(listener.address) as pair.channel:
                yield pair
        finally:
            pair.exports.close()
            await pair.exports.wait_closed()
        assert count(EXPORTS_OPEN) == exports_open
    assert pair.exporter.copies == pair.engine.copies == 0


@asynccontextmanager
async def sharded(*layers: range) -> AsyncIterator[list[Pair]]:
    """Processes of one exporter, each of which has some layers; all else is as in a Pair."""
    shards = [Shard("", each, range(HEADS)) for each in layers]
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(shards=shards, shard=each)) for each in shards]


async def fetch_shards(*pairs: Pair) -> Handoff:
    """Fetch all from these processes of one exporter, into the first consumer's pages."""
    sources = [pair.source() for pair in pairs]
    return await fetch_from(sources, pairs[0].engine, pairs[0].handle, whole(TOKENS), length=TOKENS, timeout_s=30.0)


def flip(frame: bytes) -> bytes:
    return frame[:-1] + bytes((frame[-1] ^ 16,))


class Cable:
    """A TCP proxy that can be cut."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.server: asyncio.Server
        self.address = ""

    async def __aenter__(self) -> Cable:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self.server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, far_writer]
        self._tasks += [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


SIZES = (TOKENS, LAYERS, HEADS)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running() as pair:
        yield pair


def test_the_service_has_the_methods_of_its_declaration() -> None:
    added: list[Any] = []

    class Server:
        def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
            added.extend(handlers)

    engine = Engine()
    KvServicer(ExportRegistry(engine, INCARNATION)).add_to_server(Server())
    declared = kv_pb2.DESCRIPTOR.services_by_name["Kv"]
    assert added[0].service_name() == declared.full_name
    assert {f"/{declared.full_name}/{method.name}" for method in declared.methods} == set(added[0]._method_handlers)


async def test_a_committed_export_arrives_and_is_released(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    sent, received = (TRANSFER_BYTES.labels(way) for way in ("sent", "received"))
    before = count(sent), count(received)
    assert await pair.fetch() == handoff(TOKENS)
    pair.assert_equal()
    assert ends == ["t"]
    size = TOKENS * pair.engine.spec.kv_format.token_bytes
    assert (count(sent), count(received)) == (before[0] + size, before[1] + size)
    assert pair.exporter.stats().used == 0


async def test_frames_move_while_prefill_runs(pair: Pair) -> None:
    """The first chunk has been written on the consumer's side before the second is computed."""
    arrived = threading.Event()
    written: list[int] = []

    def count() -> None:
        written.append(1)
        if len(written) == 2 * LAYERS:
            arrived.set()

    pair.engine.before_write = count
    handle = pair.exporter.reserve("prefill", TOKENS)
    export = pair.exports.open("t", handle, TOKENS, on_closed=lambda: pair.exporter.free(handle))

    def prefill() -> None:
        for start, end in ((0, 16), (16, TOKENS)):
            prefill_chunk(
                pair.exporter,
                handle,
                prompt(TOKENS),
                start,
                end,
                on_layer=lambda layer, end=end: export.mark_final(layer, end),
            )
            assert arrived.wait(60)

    fetching = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(prefill)
    assert not fetching.done()
    export.commit(handoff(TOKENS))
    assert await fetching == handoff(TOKENS)
    pair.assert_equal()


async def test_a_transfer_is_complete_when_every_shard_is() -> None:
    """One has the first layers, the other the rest; each is asked for its own part, and released."""
    async with sharded(range(2), range(2, LAYERS)) as (first, second):
        ends = [ready(each.exports, each.exporter, "t", TOKENS)[1] for each in (first, second)]
        asked = [source.shard for source in (first.source(), second.source())]
        assert await fetch_shards(first, second) == handoff(TOKENS)
        first.assert_equal()
        for pair, shard in zip((first, second), asked, strict=True):
            (request,) = pair.servicer.requests
            assert range(request.layer_start, request.layer_end) == shard.layers
        assert ends == [["t"], ["t"]]


async def test_a_transfer_without_one_of_its_shards_fails() -> None:
    async with sharded(range(2), range(2, LAYERS)) as (first, second):
        for each in (first, second):
            ready(each.exports, each.exporter, "t", TOKENS)
        second.exports.release("t", INCARNATION, "was abandoned")
        with pytest.raises(TransferError, match="was abandoned"):
            await fetch_shards(first, second)
        for lacking in ((first,), (first, first, second)):
            with pytest.raises(IncompleteTransfer, match="do not cover the KV exactly once"):
                await fetch_shards(*lacking)


async def test_shards_that_are_not_those_of_the_exporter_are_refused(pair: Pair) -> None:
    """An exporter that has one shard, fetched as if it were two."""
    ready(pair.exports, pair.exporter, "t", TOKENS)
    halves = [pair.source(shard=Shard("", layers, range(HEADS))) for layers in (range(2), range(2, LAYERS))]
    with pytest.raises(IncompleteTransfer, match="the exporter has the shards"):
        await fetch_from(halves, pair.engine, pair.handle, whole(TOKENS), length=TOKENS, timeout_s=30)


@pytest.mark.parametrize("tokens", [range(TOKENS), range(8, 24)])
async def test_a_prefix_is_fetched_and_released(pair: Pair, tokens: range) -> None:
    ends: list[str] = []
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: ends.append("t"))
    export.commit_prefix(b"name")
    await pair.fetch_prefix(tokens)
    pair.assert_equal(KvSlice(tokens, range(LAYERS), range(HEADS)))
    assert ends == ["t"]


async def test_a_prefix_of_another_length_is_not_what_was_meant(pair: Pair) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.commit_prefix(b"name")
    with pytest.raises(IncompleteTransfer, match=r"covers \[40\] tokens, 24 are wanted"):
        await pair.fetch_prefix(range(8, 24), length=24)
    assert export.ended


@pytest.mark.parametrize("held", [b"", b"another"])
async def test_a_prefix_by_another_name_is_not_what_was_meant(pair: Pair, held: bytes) -> None:
    faults = TRANSFER_FAULTS.labels("wrong_prefix")
    before = count(faults)
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.commit_prefix(held)
    with pytest.raises(WrongPrefix, match=b"name".hex()):
        await pair.fetch_prefix(range(8, 24))
    assert export.ended
    assert count(faults) == before + 1


@given(
    from_pages=st.sampled_from([4, 16, 64]),
    to_pages=st.sampled_from([4, 16, 64]),
    frame_tokens=st.integers(1, 50),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    corners=st.tuples(*[st.tuples(st.integers(0, size), st.integers(0, size)) for size in SIZES]),
    chunks=st.lists(st.integers(1, TOKENS - 1), max_size=3),
    bad=st.sets(st.integers(0, 20), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_any_slice_arrives_in_any_layout(
    from_pages: int,
    to_pages: int,
    frame_tokens: int,
    dtype: str,
    corners: tuple[tuple[int, int], ...],
    chunks: list[int],
    bad: set[int],
) -> None:
    kv_slice = KvSlice(*(_span(sorted(corner), size) for corner, size in zip(corners, SIZES, strict=True)))

    async def run() -> None:
        sizes = {"from_pages": from_pages, "to_pages": to_pages, "frame_tokens": frame_tokens, "dtype": dtype}
        async with running(**sizes) as pair:
            pair.servicer.mangle = lambda stream, number, frame: (
                [flip(frame)] if stream == 0 and number in bad else [frame]
            )
            export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
            pulling = asyncio.create_task(
                fetch_from([pair.source()], pair.engine, pair.handle, kv_slice, length=TOKENS, timeout_s=30)
            )
            for end in [*sorted(chunks), TOKENS]:
                await asyncio.to_thread(mark_all_final, export, end)
            export.commit(handoff(TOKENS))
            try:
                assert await pulling == handoff(TOKENS)
            except IncompleteTransfer:
                assert bad  # a manifest whose digest was flipped contradicts what arrived
                return
            pair.assert_equal(kv_slice)

    asyncio.run(run())


def _span(bounds: list[int], size: int) -> range:
    start = min(bounds[0], size - 1)
    return range(start, max(bounds[1], start + 1))


async def test_a_slow_consumer_holds_the_exporter_back() -> None:
    """With the consumer stopped, the exporter reads what the transport takes, and two frames more."""
    async with running(frame_tokens=TOKENS) as pair:
        reads: list[int] = []
        pair.exporter.before_read = lambda: reads.append(1)
        pair.exporter.read_kv = _padded(pair.exporter.read_kv)  # type: ignore[method-assign]
        ready(pair.exports, pair.exporter, "t", TOKENS)
        stub = kv_pb2_grpc.KvStub(pair.channel)
        call = stub.FetchKv(kv_pb2.FetchKvRequest(transfer_id="t", incarnation=INCARNATION))
        await call.initial_metadata()
        for _ in range(20):
            await asyncio.to_thread(lambda: None)
        assert len(reads) < LAYERS
        call.cancel()


def _padded(read_kv: Callable[..., list[PartData]]) -> Callable[..., list[PartData]]:
    """Reads whose parts are too large for the transport's buffers."""

    def read(*args: Any) -> list[PartData]:
        return [
            PartData(part.name, part.dtype, (*part.shape, 1 << 14), bytes(len(part.data) << 14))
            for part in read_kv(*args)
        ]

    return read


async def test_exports_are_released_over_the_wire(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    stub = kv_pb2_grpc.KvStub(pair.channel)
    for transfer_id in ("t", "t", "unknown"):
        await stub.ReleaseKv(kv_pb2.ReleaseKvRequest(transfer_id=transfer_id, incarnation=INCARNATION))
    assert ends == ["t"]
    await _refused(stub.ReleaseKv(kv_pb2.ReleaseKvRequest()), "transfer_id: must not be empty")


@pytest.mark.parametrize("field", ["transfer_id", "incarnation"])
async def test_ids_that_are_long_are_refused_and_not_remembered(pair: Pair, field: str) -> None:
    stub = kv_pb2_grpc.KvStub(pair.channel)
    ids = {"transfer_id": "t", "incarnation": INCARNATION, field: "x" * (1 << 20)}
    for call in (stub.FetchKv(kv_pb2.FetchKvRequest(**ids)).read(), stub.ReleaseKv(kv_pb2.ReleaseKvRequest(**ids))):
        await _refused(call, f"^{field}: must have at most 128 printable ASCII characters, got 'xxx")
    assert not pair.exports._ended


async def test_a_caller_does_not_learn_the_incarnation_that_is_needed(pair: Pair) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    stub = kv_pb2_grpc.KvStub(pair.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="'guess'") as refused:
        await stub.FetchKv(kv_pb2.FetchKvRequest(transfer_id="t", incarnation="guess")).read()
    assert INCARNATION not in str(refused.value)
    assert INCARNATION not in str(refused.value.trailing_metadata())


@pytest.mark.parametrize(
    ("kv_slice", "complaint"),
    [
        ({"token_end": TOKENS + 1}, r"token_end: must be at most 40, got 41"),
        ({"token_start": 41}, r"token_start: must be in \[0, 40\], got 41"),
        ({"token_start": 9, "token_end": 8}, r"token_start: must be in \[0, 8\], got 9"),
        ({"layer_end": LAYERS + 1}, r"layer_end: must be at most 3, got 4"),
        ({"layer_start": 2, "layer_end": 2}, r"layer_start: must be in \[0, 1\], got 2"),
        ({"head_start": HEADS}, r"head_start: must be in \[0, 1\], got 2"),
    ],
)
async def test_a_slice_outside_of_the_export_is_refused(pair: Pair, kv_slice: dict[str, int], complaint: str) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    stub = kv_pb2_grpc.KvStub(pair.channel)
    request = kv_pb2.FetchKvRequest(transfer_id="t", incarnation=INCARNATION, **kv_slice)
    await _refused(stub.FetchKv(request).read(), complaint)


async def _refused(call: Awaitable[object], complaint: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    with pytest.raises(BatonError, match=complaint):
        raise from_rpc_error(caught.value)


async def test_a_flipped_bit_costs_one_frame(pair: Pair) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    pair.servicer.mangle = lambda stream, number, frame: [flip(frame) if (stream, number) == (0, 4) else frame]
    before = faults("bad_frame")
    assert await pair.fetch() == handoff(TOKENS)
    pair.assert_equal()
    again = pair.servicer.requests[1]
    assert (again.token_start, again.token_end) == (8, 16)
    assert (again.layer_start, again.layer_end) == (1, 2)
    # A ticket is good for each retry once.
    assert [request.retry for request in pair.servicer.requests] == [0, 1]
    assert len(pair.servicer.requests) == 2
    assert faults("bad_frame") == before + 1


async def test_another_incarnation_is_told_apart(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    before = faults("stale_incarnation")
    with pytest.raises(StaleIncarnation, match="'second'"):
        await pair.fetch(incarnation="second")
    assert faults("stale_incarnation") == before + 1
    assert ends == []


async def test_a_failing_exporter_ends_the_stream(pair: Pair) -> None:
    handle = prefilled(pair.exporter, TOKENS)
    export = pair.exports.open("t", handle, TOKENS, on_closed=lambda: pair.exporter.free(handle))
    export.mark_final(0, TOKENS)
    written = threading.Event()
    pair.engine.before_write = written.set
    fetching = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(written.wait, 60)
    export.fail(EngineError("NaN in layer 1"))
    with pytest.raises(TransferError, match="NaN in layer 1"):
        await fetching


@pytest.mark.parametrize("final", [0, 10])
async def test_a_stalled_exporter_is_left(pair: Pair, final: int) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.mark_final(0, final)
    before = faults("source_unreachable")
    with pytest.raises(SourceUnreachable, match=r"nothing for 0\.1 s"):
        await pair.fetch(silence_timeout_s=0.1)
    assert export.ended
    assert faults("source_unreachable") == before + 1


async def test_a_wait_for_an_announced_export_is_not_a_stall(pair: Pair) -> None:
    pair.exports.announce("t")
    fetching = asyncio.create_task(pair.fetch(silence_timeout_s=0.1))
    await pair.servicer.requested.wait()
    done, _ = await asyncio.wait({fetching}, timeout=0.3)
    assert not done
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching


async def test_a_fetch_that_exceeds_its_timeout_fails(pair: Pair) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    mark_all_final(export, TOKENS)
    before = faults("timeout") + faults("incomplete_transfer")
    with pytest.raises(IncompleteTransfer):
        await pair.fetch(timeout_s=0.2)
    assert faults("timeout") + faults("incomplete_transfer") == before + 1


async def test_a_cut_connection_is_noticed_at_both_ends(pair: Pair) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.mark_final(0, 10)
    written = threading.Event()
    pair.engine.before_write = written.set
    async with Cable(pair.address) as cable, kv_channel(cable.address) as pair.channel:
        fetching = asyncio.create_task(pair.fetch())
        await asyncio.to_thread(written.wait, 60)
        assert not pair.servicer.stopped.is_set()
        cable.cut()
        with pytest.raises(SourceUnreachable):
            await fetching
        await asyncio.wait_for(pair.servicer.stopped.wait(), 60)


@pytest.mark.parametrize("opened", [False, True])
async def test_a_closed_channel_is_an_error_not_a_cancellation(pair: Pair, opened: bool) -> None:
    pair.exports.announce("t")
    fetching = asyncio.create_task(pair.fetch())
    await pair.servicer.requested.wait()
    if opened:
        written = threading.Event()
        pair.engine.before_write = written.set
        export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
        export.mark_final(0, 10)
        await asyncio.to_thread(written.wait, 60)
    await pair.channel.close()
    with pytest.raises(SourceUnreachable):
        await fetching
    with pytest.raises(SourceUnreachable):
        await pair.fetch()


async def test_after_a_cancel_no_write_is_in_flight_and_the_export_is_gone(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    gate = pair.engine.before_write = Gate()
    fetching = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(gate.reached.wait, 60)
    for _ in range(3):
        fetching.cancel()
        await asyncio.sleep(0)
    assert not fetching.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert pair.engine.copies == 0
    pair.engine.free(pair.handle)
    assert pair.engine.stats().used == 0
    await pair.exports.wait_closed()
    assert ends == ["t"]


async def test_a_cancel_during_the_release_does_not_end_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    releasing, go_on = asyncio.Event(), asyncio.Event()
    honest = GrpcSource.release

    async def release(self: GrpcSource) -> None:
        releasing.set()
        await go_on.wait()
        await honest(self)

    monkeypatch.setattr(GrpcSource, "release", release)
    async with running() as pair:
        _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
        fetching = asyncio.create_task(pair.fetch())
        await releasing.wait()
        fetching.cancel()
        await asyncio.sleep(0)
        assert ends == []
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert ends == ["t"]
