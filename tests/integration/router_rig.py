"""A router between stub workers and a client, as one context manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.config.router import RouterConfig
from baton.pb import inference_pb2, inference_pb2_grpc
from baton.rpc.channel import control_channel
from baton.worker.status import WorkerRole
from router.app import RouterApp, run
from tests.integration.router_stubs import KV, MAX_MODEL_LEN, Handoffs, StubDecode, StubPrefill, checkpoint
from tests.router_workers import identity


@dataclass
class RouterRig:
    app: RouterApp
    prefill: list[StubPrefill]
    decode: list[StubDecode]
    client: inference_pb2_grpc.InferenceStub
    channel: grpc.aio.Channel

    def call(self, *, timeout: float | None = 20, **sampling: Any) -> grpc.aio.UnaryStreamCall:
        """Generate from the text "hi" (3 tokens with BOS)."""
        return self.client.Generate(request("hi", **sampling), timeout=timeout)

    async def answer(self, *, timeout: float | None = 20, **sampling: Any) -> Answer:
        """The whole of an answer."""
        return await whole(self.call(timeout=timeout, **sampling))


@dataclass
class Answer:
    events: list[inference_pb2.GenerateResponse]

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(choice))

    def tokens(self, choice: int = 0) -> list[int]:
        return [token.token_id for delta in self.deltas(choice) for token in delta.tokens]

    def last(self, choice: int = 0) -> inference_pb2.ChoiceDelta:
        return self.deltas(choice)[-1]

    def deltas(self, choice: int) -> list[inference_pb2.ChoiceDelta]:
        return [delta for event in self.events for delta in event.choices if delta.index == choice]

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.events[-1].usage


def request(prompt: str, **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=prompt, sampling=inference_pb2.SamplingParams(**sampling))


async def whole(call: grpc.aio.UnaryStreamCall) -> Answer:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return Answer(events)


async def refused(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await whole(call)
    return caught.value


async def until(app: RouterApp, true: Callable[[], bool]) -> None:
    news = asyncio.Event()
    app.pool.subscribe(news.set)
    async with asyncio.timeout(60):
        while not true():
            news.clear()
            await news.wait()


@contextlib.asynccontextmanager
async def router_rig(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    change: Callable[[StubPrefill | StubDecode], None] = lambda stub: None,
    ready: bool = True,
    template: str | None = None,
    **settings: Any,
) -> AsyncIterator[RouterRig]:
    checkpoint(folder, template=template)
    handoffs = Handoffs()
    prefills = [
        StubPrefill(identity(folder, WorkerRole.PREFILL, i, KV, MAX_MODEL_LEN), handoffs) for i in range(prefill)
    ]
    decodes = [StubDecode(identity(folder, WorkerRole.DECODE, i, KV, MAX_MODEL_LEN), handoffs) for i in range(decode)]
    async with contextlib.AsyncExitStack() as stack:
        for stub in (*prefills, *decodes):
            change(stub)
            await stack.enter_async_context(stub.serving())
        config = RouterConfig(
            model=str(folder),
            prefill=tuple(stub.address for stub in prefills),
            decode=tuple(stub.address for stub in decodes),
            **settings,
        )
        app = await stack.enter_async_context(run(config))
        if ready:
            everybody = len(prefills), len(decodes)
            await until(app, lambda: (len(app.pool.fleet.prefill), len(app.pool.fleet.decode)) == everybody)
        channel = await stack.enter_async_context(control_channel(app.address))
        yield RouterRig(app, prefills, decodes, inference_pb2_grpc.InferenceStub(channel), channel)
