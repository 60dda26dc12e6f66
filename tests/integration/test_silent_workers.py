"""A worker behind a network that is cut: no packet comes back, not even a reset, and the worker drains meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.config.router import RouterConfig
from baton.pb import decode_pb2, inference_pb2_grpc, prefill_pb2
from baton.rpc.channel import control_channel
from baton.worker.status import WorkerRole
from router.app import run
from tests.integration.router_rig import Answer, request, until, whole
from tests.integration.router_stubs import (
    KV,
    MAX_MODEL_LEN,
    DownStream,
    Handoffs,
    StubDecode,
    StubPrefill,
    checkpoint,
    continue_by_hand,
    letter,
)
from tests.router_workers import identity

SILENCE_S = 2.0
"""More than the pause between two heartbeats."""


class Wire:
    """A network between routers and a worker; while it is cut, it takes connections and bytes, and answers nothing."""

    def __init__(self) -> None:
        self.target = self.address = ""
        self.whole = asyncio.Event()
        self.whole.set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        pipes: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A connection that was made while the network is cut stays silent for ever.
            with contextlib.suppress(OSError):
                if self.whole.is_set():
                    host, port = self.target.rsplit(":", 1)
                    theirs, mine = await asyncio.open_connection(host, int(port))
                    pipes.update((asyncio.create_task(pipe(reader, mine)), asyncio.create_task(pipe(theirs, writer))))
                else:
                    pipes.add(asyncio.create_task(swallow(reader, writer)))
                return
            writer.close()

        async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError), contextlib.closing(sink):
                while data := await source.read(1 << 16):
                    if not self.whole.is_set():
                        break
                    sink.write(data)
                # The end of a connection is not heard of either.
                await self.whole.wait()

        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError), contextlib.closing(writer):
                while await reader.read(1 << 16):
                    pass

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in pipes:
                task.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)


class Names:
    """A name server that knows "worker", at the addresses in `records`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[str] = ["127.0.0.1"]
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(host: str, port: int, **kind: Any) -> list[Any]:
            if host != "worker":
                return await real(host, port, **kind)
            return [(0, 0, 0, "", (address, port)) for address in self.records]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


async def one_token(down: DownStream, start: decode_pb2.Start, _: prefill_pb2.PrefillRequest) -> None:
    down.send(start.key, 0, 1, [letter(1)])


@pytest.mark.parametrize(
    ("role", "dropped"),
    [
        (WorkerRole.PREFILL, "until it serves"),
        (WorkerRole.DECODE, "for a moment"),
    ],
)
async def test_a_worker_that_drains_while_it_is_cut_off_serves_again_at_the_same_address(
    role: WorkerRole, dropped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dropped` tells how long the name server does not list the worker."""
    for module in ("link", "decode_session"):
        monkeypatch.setattr(f"router.workers.{module}.SILENCE_S", SILENCE_S)
    handoffs, wire, names = Handoffs(), Wire(), Names(monkeypatch)
    folder = checkpoint(tmp_path)

    def worker(role: WorkerRole, number: int) -> StubPrefill | StubDecode:
        made = StubPrefill if role is WorkerRole.PREFILL else StubDecode
        return made(identity(folder, role, number, KV, MAX_MODEL_LEN), handoffs)

    other_role = next(each for each in WorkerRole if each is not role)
    cut, other, successor = worker(role, 0), worker(other_role, 0), worker(role, 1)
    decode = cut if isinstance(cut, StubDecode) else other
    decode.script = one_token
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        await stack.enter_async_context(other.serving())
        await stack.enter_async_context(wire.open())
        serving = contextlib.AsyncExitStack()
        await serving.enter_async_context(cut.serving())
        wire.target = cut.address
        targets = {
            role.value: (f"dns:///worker:{wire.address.rpartition(':')[2]}",),
            other_role.value: (other.address,),
        }
        config = RouterConfig(model=str(folder), resolve_s=0.1, **targets)
        app = await stack.enter_async_context(run(config))
        await until(app, lambda: app.pool.serving)
        channel = await stack.enter_async_context(control_channel(app.address))
        client = inference_pb2_grpc.InferenceStub(channel)
        stream = client.Generate(request("hi", max_tokens=6))
        begun = Answer([await stream.read()])
        decode.script = continue_by_hand

        wire.whole.clear()
        cut.status.drain()
        await serving.aclose()
        if dropped != "never":
            names.records = []
            await asyncio.sleep(0.3)
        if dropped == "for a moment":
            names.records = ["127.0.0.1"]
        await until(app, lambda: not app.pool.serving)
        # The link ends now, and some dials find silence.
        await asyncio.sleep(SILENCE_S)
        await stack.enter_async_context(successor.serving())
        wire.target = successor.address
        wire.whole.set()
        names.records = ["127.0.0.1"]
        await until(app, lambda: app.pool.serving)
        answer = await whole(client.Generate(request("hi", max_tokens=4)))
        assert answer.text() == "abcd"
        if role is WorkerRole.DECODE:
            assert begun.text() + (await whole(stream)).text() == "abcdef"
        stream.cancel()
