"""Calls with raw bytes to a running server, many at a time, and garbage on its sockets."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.pb import admin_pb2, kv_pb2, worker_pb2
from baton.rpc.channel import control_channel
from tests.effort import generators, named
from tests.fuzz.messages import one_wrong, senseless
from tests.fuzz.mutation import arbitrary, mutated

AT_ONCE = 24
WAIT_S = 60.0
SECONDS_WITHOUT_NEWS = 8.0
ALLOWED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Allowed statuses for a bad request; INTERNAL and UNKNOWN would be faults of the server, and a deadline a hang."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Method:
    """A method to be called: its full name, whether it answers with a stream, and a request that makes sense."""

    name: str
    streams: bool
    sound: Message
    endless: bool = False
    """Whether a good request is answered until the caller goes, so that one answer is enough."""

    def request(self, rng: random.Random, names: Sequence[str]) -> bytes:
        """Bytes for it, of all degrees of sense."""
        kind = rng.randrange(10)
        if kind == 0:
            return arbitrary(rng)
        if kind == 1:
            return mutated(rng, self.sound.SerializeToString())
        if kind <= 3:
            return senseless(rng, type(self.sound)(), names).SerializeToString()
        if kind == 4:
            return mutated(rng, senseless(rng, type(self.sound)(), names).SerializeToString())
        return one_wrong(rng, self.sound, names).SerializeToString()


@dataclass(frozen=True)
class Ended:
    code: grpc.StatusCode
    details: str = ""


async def storm(what: str, count: int, send: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
    """Await `send` for each input, some at a time."""
    inputs = generators(what, count)

    async def one(number: int, rng: random.Random) -> None:
        with named(what, number):
            await send(rng)

    while batch := list(islice(inputs, AT_ONCE)):
        await asyncio.gather(*(one(number, rng) for number, rng in batch))


async def call(channel: grpc.aio.Channel, method: Method, request: bytes) -> Ended:
    """End of a call with raw bytes; raises TimeoutError if it goes on and says nothing."""
    if not method.streams:
        unary = channel.unary_unary(method.name)(request, timeout=WAIT_S)
        return await _ended(unary)
    stream = channel.unary_stream(method.name)(request, timeout=2 * WAIT_S)
    try:
        while True:
            async with asyncio.timeout(SECONDS_WITHOUT_NEWS):
                if await stream.read() is grpc.aio.EOF:
                    break
            if method.endless:
                return Ended(grpc.StatusCode.OK)
    except grpc.aio.AioRpcError:
        pass
    finally:
        stream.cancel()
    return await _ended(stream)


async def _ended(call: Any) -> Ended:
    code, details = await call.code(), await call.details() or ""
    # The client's own word for a write to a call that has ended; what the server said is lost.
    return Ended(grpc.StatusCode.OK if details == "Internal error from Core" else code, details)


async def healthy(address: str) -> bool:
    """Whether the server answers and says that it serves."""
    async with control_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def garbage(address: str, data: bytes) -> None:
    """Send `data` on a raw socket and hang up; raises TimeoutError if the server does not."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(data)
            writer.write_eof()
            while await reader.read(1 << 16):
                continue
    except ConnectionError:
        return
    finally:
        writer.close()


def spoiled_http(rng: random.Random) -> bytes:
    """Bytes that are not HTTP/2, or only begin as it: frames of arbitrary types, lengths, flags and streams."""
    if rng.random() < 0.3:
        begin = rng.choice((b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", PREFACE[:12]))
        return begin + arbitrary(rng, 2000)
    frames = [PREFACE, b"\0\0\0\4\0\0\0\0\0"]
    for _ in range(rng.randrange(1, 8)):
        payload = arbitrary(rng, 400)
        length = len(payload) if rng.random() < 0.8 else rng.choice((0, 1, 2**14 + 1, 2**24 - 1))
        kind = rng.choice((*range(10), 0, 1, 4, rng.randrange(256)))
        stream = rng.choice((0, 1, 3, 2, 2**31 - 1))
        frames.append(
            length.to_bytes(3, "big") + bytes((kind, rng.choice((0, 1, 4, 5, 0xFF)))) + stream.to_bytes(4, "big")
        )
        frames.append(payload)
    return b"".join(frames) if rng.random() < 0.7 else mutated(rng, b"".join(frames))


async def chatter(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes], rng: random.Random) -> Ended:
    """Send messages on a stream of both directions, and end it in one way or another."""
    stream = channel.stream_stream(method)(timeout=2 * WAIT_S)
    reading = asyncio.create_task(_drained(stream))
    try:
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in messages:
                    await stream.write(message)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                if rng.random() < 0.3:
                    return Ended(grpc.StatusCode.OK)
                await stream.done_writing()
            return await _ended(stream)
    finally:
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _drained(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        continue


WATCH = Method("/baton.v1.Worker/Watch", True, worker_pb2.WatchRequest(), endless=True)
LEDGER = Method("/baton.v1.Admin/Ledger", False, admin_pb2.LedgerRequest())


def kv_methods(incarnation: str) -> Sequence[Method]:
    named = {"transfer_id": "t0", "incarnation": incarnation}
    return (
        Method("/baton.v1.Kv/FetchKv", True, kv_pb2.FetchKvRequest(**named)),
        Method("/baton.v1.Kv/ReleaseKv", False, kv_pb2.ReleaseKvRequest(**named)),
    )


async def calls(what: str, count: int, address: str, methods: Sequence[Method], names: Sequence[str] = ()) -> None:
    async with control_channel(address) as channel:

        async def send(rng: random.Random) -> None:
            method = rng.choice(methods)
            data = method.request(rng, names)
            ended = await call(channel, method, data)
            assert ended.code in ALLOWED, f"{method.name} answered {ended} to {data!r}"

        await storm(what, count, send)
    assert await healthy(address)


async def hang_ups(what: str, count: int, addresses: Sequence[str]) -> None:
    async def send(rng: random.Random) -> None:
        await garbage(rng.choice(addresses), spoiled_http(rng))

    await storm(what, count, send)
