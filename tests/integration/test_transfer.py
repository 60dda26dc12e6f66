"""KV over real gRPC servers and sockets: layouts, overlap, boxes, back-pressure, and the service's calls."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, IncompleteTransfer, TransferError, WrongPrefix
from baton.kv.format import PartData, Shard
from baton.pb import kv_pb2, kv_pb2_grpc
from baton.rpc.errors import from_rpc_error
from baton.telemetry.metrics import TRANSFER_BYTES, TRANSFER_FAULTS
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import fetch, fetch_box
from baton.transfer.transport import KvServicer
from baton.transfer.wire import Box
from tests.engine_calls import prefill_chunk
from tests.integration.transfer_pair import TOKENS, Pair, fetch_shards, flip, running, sharded
from tests.metrics import count
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    Engine,
    advance_all,
    handoff,
    prefilled,
    prompt,
    ready,
)

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
    """One has the first layers, the other the rest; each is released, and what one lacks the other can't make up."""
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
        await fetch(halves, pair.engine, pair.handle, tokens=TOKENS, timeout_s=30)


@pytest.mark.parametrize("tokens", [range(TOKENS), range(8, 24)])
async def test_a_prefix_is_fetched_and_released(pair: Pair, tokens: range) -> None:
    ends: list[str] = []
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: ends.append("t"))
    export.commit_prefix(b"name")
    await pair.fetch_prefix(tokens)
    pair.assert_equal(Box(tokens, range(LAYERS), range(HEADS)))
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
def test_any_box_arrives_in_any_layout(
    from_pages: int,
    to_pages: int,
    frame_tokens: int,
    dtype: str,
    corners: tuple[tuple[int, int], ...],
    chunks: list[int],
    bad: set[int],
) -> None:
    box = Box(*(_span(sorted(corner), size) for corner, size in zip(corners, SIZES, strict=True)))

    async def run() -> None:
        sizes = {"from_pages": from_pages, "to_pages": to_pages, "frame_tokens": frame_tokens, "dtype": dtype}
        async with running(**sizes) as pair:
            pair.servicer.mangle = lambda stream, number, frame: (
                [flip(frame)] if stream == 0 and number in bad else [frame]
            )
            export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
            pulling = asyncio.create_task(
                fetch_box([pair.source()], pair.engine, pair.handle, box, length=TOKENS, timeout_s=30)
            )
            for end in [*sorted(chunks), TOKENS]:
                await asyncio.to_thread(advance_all, export, end)
            export.commit(handoff(TOKENS))
            try:
                assert await pulling == handoff(TOKENS)
            except IncompleteTransfer:
                assert bad  # a manifest whose digest was flipped contradicts what arrived
                return
            pair.assert_equal(box)

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


async def test_generated_stubs_can_fetch(pair: Pair) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    stub = kv_pb2_grpc.KvStub(pair.channel)
    frames = [frame async for frame in stub.FetchKv(kv_pb2.FetchKvRequest(transfer_id="t", incarnation=INCARNATION))]
    assert len(frames) == TOKENS // 8 * LAYERS + 2
    assert frames[0].header.token_count == 8
    assert frames[-2].manifest.frames == len(frames) - 2
    assert frames[-1].commit.length == TOKENS


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
    ("box", "complaint"),
    [
        ({"token_end": TOKENS + 1}, r"token_end: must be at most 40, got 41"),
        ({"token_start": 41}, r"token_start: must be in \[0, 40\], got 41"),
        ({"token_start": 9, "token_end": 8}, r"token_start: must be in \[0, 8\], got 9"),
        ({"layer_end": LAYERS + 1}, r"layer_end: must be at most 3, got 4"),
        ({"layer_start": 2, "layer_end": 2}, r"layer_start: must be in \[0, 1\], got 2"),
        ({"head_start": HEADS}, r"head_start: must be in \[0, 1\], got 2"),
    ],
)
async def test_a_box_outside_of_the_export_is_refused(pair: Pair, box: dict[str, int], complaint: str) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    stub = kv_pb2_grpc.KvStub(pair.channel)
    request = kv_pb2.FetchKvRequest(transfer_id="t", incarnation=INCARNATION, **box)
    await _refused(stub.FetchKv(request).read(), complaint)


async def _refused(call: Awaitable[object], complaint: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    with pytest.raises(BatonError, match=complaint):
        raise from_rpc_error(caught.value)
