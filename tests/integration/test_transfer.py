"""Two workers between which KV moves over loopback, and what may go wrong between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from baton.kv.format import Shard
from baton.pb import kv_pb2
from baton.request import Handoff, RemoteExport
from baton.rpc.channel import kv_channel
from baton.rpc.server import listen
from baton.telemetry.metrics import EXPORTS_OPEN
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import fetch, fetch_prefix
from baton.transfer.transport import SERVICE, GrpcSource, KvServicer
from baton.transfer.wire import Box
from tests.metrics import count
from tests.unit.transfer.support import HEADS, INCARNATION, LAYERS, WHOLE, Engine, contents, prefilled, whole

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
        """Fetch all; `changes` are those of `source`, and `first`."""
        first = changes.pop("first", 0)
        timeout_s = changes.get("timeout_s", 30.0)
        sources = [self.source(transfer_id, **changes)]
        return await fetch(sources, self.engine, self.handle, tokens=TOKENS, first=first, timeout_s=timeout_s)

    async def fetch_prefix(self, tokens: range, **changes: Any) -> None:
        options = {"length": TOKENS, "digest": b"name", "timeout_s": 30.0, **changes}
        await fetch_prefix([self.source()], self.engine, self.handle, tokens=tokens, **options)

    def source(
        self, transfer_id: str = "t", *, incarnation: str = INCARNATION, shard: Shard | None = None, **changes: Any
    ) -> GrpcSource:
        shard = shard or self.shard
        options = {"timeout_s": 30.0, "stall_timeout_s": 20.0, **changes}
        return GrpcSource(self.channel, RemoteExport(transfer_id, incarnation, (shard,)), shard, **options)

    def assert_equal(self, box: Box | None = None) -> None:
        """The consumer's pages hold what a prefill of the same prompt gives."""
        box = box or whole(TOKENS)
        expected = Engine(kv_dtype="float32")
        assert contents(self.engine, self.handle, box) == contents(expected, prefilled(expected, TOKENS), box)


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
    return await fetch(sources, pairs[0].engine, pairs[0].handle, tokens=TOKENS, timeout_s=30.0)


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
