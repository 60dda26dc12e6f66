"""Messages that are on their way when a worker begins to drain: none is lost, and no attempt is made twice.

A router ends its watch of a draining worker when it has nothing there any more; the worker serves until then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.pb import decode_pb2, prefill_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc.channel import control_channel
from baton.worker.status import WorkerStatus, status_from_proto
from tests.decode_rig import WAIT_S, rig
from tests.decoding import alone, greedy
from tests.integration.router_rig import router_rig, until, whole
from tests.integration.router_stubs import LENGTH, DownStream, letter
from tests.prefill import decoder, serving


async def one_token(down: DownStream, start: decode_pb2.Start, request: prefill_pb2.PrefillRequest) -> None:
    down.send(start.key, 0, 1, [letter(1)])


@pytest.mark.parametrize("begin", ["reservation", "prefill", "decode"])
async def test_a_router_leaves_a_draining_pair_when_it_has_read_its_last_stream(tmp_path: Path, begin: str) -> None:
    """The drain begins while the worker handles a reservation or a prompt, or between two tokens."""
    async with router_rig(tmp_path) as b:
        (prefill,), (decode,) = b.prefill, b.decode
        prompt, computed = asyncio.Event(), asyncio.Event()

        def drain() -> None:
            prefill.status.drain()
            decode.status.drain()

        def answer(reserve: decode_pb2.Reserve) -> decode_pb2.ReserveResult:
            if begin == "reservation":
                drain()
            return decode_pb2.ReserveResult(key=reserve.key, granted=True)

        async def compute(request: prefill_pb2.PrefillRequest) -> None:
            prompt.set()
            await computed.wait()

        decode.answer, prefill.script, decode.script = answer, compute, one_token
        call = b.call(max_tokens=4)
        await prompt.wait()
        if begin == "prefill":
            drain()
        computed.set()
        text = ""
        while len(text) < 2:
            text += (await call.read()).choices[0].text
        if begin == "decode":
            drain()
        link = b.app.pool.decode_link(decode.address)
        assert link is not None
        await until(b.app, lambda: link.draining)
        async with asyncio.timeout(WAIT_S):
            # The KV was fetched, so prefill is needed no more.
            await prefill.status.wait_unwatched()
        heard = asyncio.Event()
        b.app.pool.subscribe(heard.set)
        for _ in range(3):
            heard.clear()
            decode.status.notify()
            await heard.wait()
        left = asyncio.create_task(decode.status.wait_unwatched())
        await asyncio.sleep(0)
        assert not left.done()
        decode.sessions[0].send(decode.starts[0].key, 0, 2, [letter(2), letter(3)], LENGTH)
        assert text + (await whole(call)).text() == "abcd"
        decode.status.notify()
        await asyncio.wait_for(left, WAIT_S)
        assert (len(prefill.requests), len(decode.reserves)) == (1, 1)


async def test_a_router_does_not_come_back_to_a_worker_that_still_drains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    async with router_rig(tmp_path) as b:
        (decode,) = b.decode
        watch, watches = decode.status.watch, asyncio.Queue[None]()

        def watched() -> AsyncIterator[WorkerStatus]:
            watches.put_nowait(None)
            return watch()

        decode.status.watch = watched  # type: ignore[method-assign]
        decode.status.drain()
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                await watches.get()
        assert not b.app.pool.fleet.decode
        assert len(decode.sessions) == 1
    said = [record.getMessage() for record in caplog.records if "decode worker" in record.getMessage()]
    assert [line.rpartition(" ")[2] for line in said] == ["joined", "drains", "drained"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_draining_decode_worker_serves_what_routers_ask_for_before_they_leave() -> None:
    async with rig() as all_, control_channel(all_.app.addresses.control) as channel:
        router = await all_.router()
        watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        await watch.read()
        draining = asyncio.create_task(all_.app.drain())
        while not status_from_proto(await watch.read()).draining:
            pass
        await router.request("r", [1, 2, 3], greedy(9))
        await router.until_finished(("r", 0))
        assert router.tokens["r", 0] == alone([1, 2, 3], greedy(9))
        await all_.until_free()
        assert not draining.done()
        watch.cancel()
        await asyncio.wait_for(draining, WAIT_S)
        assert "draining" in (await router.reserve("next", 5, 5)).reason


async def test_a_draining_prefill_worker_computes_what_routers_ask_for_before_they_leave() -> None:
    async with serving() as client, control_channel(client.app.addresses.control) as channel:
        watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        await watch.read()
        draining = asyncio.create_task(client.app.drain())
        while not status_from_proto(await watch.read()).draining:
            pass
        await client.done(transfer_id="t")
        watch.cancel()
        # The KV is still to be fetched.
        await client.app.status.wait_unwatched()
        assert not draining.done()
        with decoder() as engine:
            handle = engine.reserve("r", 100)
            await client.fetch(engine, handle, "t", 100)
            engine.free(handle)
        await asyncio.wait_for(draining, WAIT_S)
