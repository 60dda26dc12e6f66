"""Routers and consumers that die or fall silent while a prefill worker works for them: all is given back.

A closed peer is noticed at once, a silent one (stopped, cut off) by keepalive: pings after 2 s, 5 s to answer. A
consumer that is stopped in the middle of a transfer holds its pages for the lease at most, and its stream until it is
noticed.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from baton.engine.fake import FakeEngine
from baton.transfer.export import Export
from baton.transfer.wire import Box
from tests.prefill import Gate, serving

LONG = [(7 * i) % 1000 for i in range(1000)]
GONE = (signal.SIGKILL, signal.SIGSTOP)
"""Ways of losing a peer."""
HANG_S = 60.0

ROUTER = """
import asyncio, sys
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import SamplingParams
from baton.rpc.channel import control_channel
from baton.rpc.convert import sampling_to_proto

async def main(address):
    async with control_channel(address) as channel:
        request = prefill_pb2.PrefillRequest(
            request_id="r", transfer_id="t", prompt_token_ids=range(100), choice_indexes=[0],
            sampling=sampling_to_proto(SamplingParams(max_tokens=8, temperature=0.0)),
        )
        async for event in prefill_pb2_grpc.PrefillStub(channel).Prefill(request):
            print("begun", flush=True)

asyncio.run(main(sys.argv[1]))
"""

CONSUMER = """
import asyncio, sys
from baton.pb import kv_pb2, kv_pb2_grpc
from baton.rpc.channel import kv_channel

async def main(address, incarnation, transfer_id):
    async with kv_channel(address) as channel:
        request = kv_pb2.FetchKvRequest(transfer_id=transfer_id, incarnation=incarnation)
        call = kv_pb2_grpc.KvStub(channel).FetchKv(request)
        await call.read()
        print("begun", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def child(script: str, *args: str) -> AsyncIterator[Process]:
    """A process that has begun its call."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *args, stdout=PIPE)
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"begun\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def gone_router(number: signal.Signals) -> None:
    gate = Gate()
    async with (
        serving(FakeEngine(chunk_time=1.0, delay=gate, layers=8)) as client,
        child(ROUTER, client.app.addresses.control) as router,
    ):
        await gate.reached()
        aborted = client.watch_aborts()
        os.kill(router.pid, number)
        async with asyncio.timeout(HANG_S):
            await aborted.wait()
        gate.pass_layers(1)
        await client.pages_back()


async def gone_consumer(number: signal.Signals, ended: asyncio.Future[None]) -> None:
    # Long enough for the consumer's process to start in.
    async with serving(FakeEngine(head_dim=256, pages=128), lease_s=5.0) as client:
        reading = asyncio.create_task(client.done(LONG, transfer_id=number.name))
        address, incarnation = client.app.addresses.kv, client.app.status.identity.incarnation
        async with child(CONSUMER, address, incarnation, number.name) as consumer:
            await reading
            os.kill(consumer.pid, number)
            await client.pages_back()
            async with asyncio.timeout(HANG_S):
                await ended


async def test_a_router_that_is_gone_while_its_prompt_is_computed() -> None:
    await asyncio.gather(*map(gone_router, GONE))


async def test_a_consumer_that_is_gone_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, frames = asyncio.get_running_loop(), Export.frames
    ended = {number.name: loop.create_future() for number in GONE}

    async def watched(self: Export, box: Box) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(frames(self, box)) as stream:
                async for frame in stream:
                    yield frame
        finally:
            ended[self.transfer_id].set_result(None)

    monkeypatch.setattr(Export, "frames", watched)
    await asyncio.gather(*(gone_consumer(number, ended[number.name]) for number in GONE))
