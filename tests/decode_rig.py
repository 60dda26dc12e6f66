"""A decode worker on real sockets between a router's session and a KV exporter, both reduced to the tests' needs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine
from baton.engine.fake import FakeEngine
from baton.lifecycle import State
from baton.pb import decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.request import FirstToken, Handoff, RemoteExport, SamplingParams, SequenceState, finish_reason
from baton.rpc.channel import control_channel
from baton.rpc.convert import export_to_proto, finish_from_proto
from baton.rpc.server import listen
from baton.transfer.export import ExportRegistry
from baton.transfer.transport import KvServicer
from baton.worker.status import WIRE_VERSION
from decode_svc.admission import SlotForecast
from decode_svc.app import DecodeApp, run
from tests.decoding import LoggingEngine
from tests.engine_calls import prefill_chunk

WAIT_S = 60.0


class Exporter:
    """A prefill worker reduced to its exports."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or FakeEngine(page_size=8, pages=512)
        self.exports = ExportRegistry(self.engine, "inc-1")
        self.address = ""

    def source(self, transfer_id: str, incarnation: str = "inc-1", address: str = "") -> RemoteExport:
        """Source of one of its exports."""
        shard = replace(self.engine.spec.kv_format.whole, kv_address=address or self.address)
        return RemoteExport(transfer_id, incarnation, (shard,))

    def open(self, transfer_id: str, prompt: Sequence[int], outputs: Sequence[int] = ()) -> Callable[..., None]:
        """Open an export; the returned function prefills it and commits, for given params and choices."""
        ids = [*prompt, *outputs]
        handle = self.engine.reserve(transfer_id, len(ids))
        export = self.exports.open(transfer_id, handle, len(ids), on_closed=lambda: self.engine.free(handle))

        def commit(params: SamplingParams, choices: Sequence[int] = (0,), attempt: int = 0) -> None:
            states = [SequenceState(params, list(prompt), list(outputs), choice) for choice in choices]
            result = prefill_chunk(
                self.engine,
                handle,
                ids,
                0,
                len(ids),
                on_layer=lambda layer: export.mark_final(layer, len(ids)),
                sample=states,
            )
            eos = self.engine.spec.eos_token_ids
            firsts = tuple(
                FirstToken(choice, token, finish_reason(params, [*outputs, token.token_id], eos))
                for choice, token in zip(choices, result.tokens, strict=True)
            )
            request_id = transfer_id.partition("/")[0]
            handoff = Handoff(request_id, attempt, tuple(prompt), tuple(outputs), params, firsts)
            self.firsts = {first.choice_index: first for first in firsts}
            export.commit(handoff)

        return commit


@dataclass
class SessionRouter:
    call: Any
    exporter: Exporter
    messages: list[decode_pb2.SessionDown] = field(default_factory=list)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[str, int], Any] = field(default_factory=dict)
    timings: dict[tuple[str, int], Any] = field(default_factory=dict)
    reserved: dict[str, decode_pb2.ReserveResult] = field(default_factory=dict)
    failures: dict[str, decode_pb2.AttemptFailure] = field(default_factory=dict)
    beats: list[set[str]] = field(default_factory=list)
    asked: list[decode_pb2.AttemptKey] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self, **message: Any) -> None:
        # A call takes one write at a time, and heartbeats come in between.
        async with self.writing:
            await self.call.write(decode_pb2.SessionUp(**message))

    async def beat(self) -> None:
        """Name all attempts that were ever asked for, every second."""
        while True:
            await asyncio.sleep(1)
            await self.say(heartbeat=decode_pb2.Heartbeat(live=self.asked))

    async def reserve(
        self, name: str, context: int, new: int, choices: int = 1, attempt: int = 0, deadline_ms: int = 0, **more: Any
    ) -> decode_pb2.ReserveResult:
        """Reserve; returns the first answer."""
        self.reserved.pop(name, None)
        self.asked.append(key(name, attempt))
        request = decode_pb2.Reserve(
            key=self.asked[-1],
            context_tokens=context,
            max_new_tokens=new,
            choices=choices,
            deadline_ms=deadline_ms,
            **more,
        )
        await self.say(reserve=request)
        await self.until(lambda: name in self.reserved)
        return self.reserved[name]

    async def until_granted(self, name: str) -> None:
        """Wait until a reservation is granted."""
        await self.until(lambda: self.reserved[name].granted)

    async def barrier(self) -> None:
        """Wait until the worker has handled all commands, by a reservation that is too large for it."""
        result = await self.reserve("barrier", 1 << 30, 1)
        assert result.too_small, result.reason

    def transfer_id(self, name: str, attempt: int) -> str:
        return f"{name}/{attempt}/{id(self)}"

    def open(
        self, name: str, prompt: Sequence[int], outputs: Sequence[int] = (), attempt: int = 0
    ) -> Callable[..., None]:
        """Let the exporter open the attempt's export."""
        return self.exporter.open(self.transfer_id(name, attempt), prompt, outputs)

    async def start(self, name: str, attempt: int = 0, **change: Any) -> None:
        """Say where the export is, or that it is elsewhere: `change` are fields of a Start, or parts of its source."""
        parts = {name: change.pop(name) for name in ("transfer_id", "incarnation", "address") if name in change}
        source = self.exporter.source(**{"transfer_id": self.transfer_id(name, attempt), **parts})
        start = decode_pb2.Start(key=key(name, attempt), source=export_to_proto(source), **change)
        await self.say(start=start)

    async def cancel(self, name: str, choice: int | None = None) -> None:
        await self.say(cancel=decode_pb2.Cancel(key=key(name), choice_index=choice))

    async def request(
        self, name: str, prompt: Sequence[int], params: SamplingParams, choices: Sequence[int] = (0,), **more: Any
    ) -> None:
        """Reserve, wait for the grant, start and prefill; first tokens count as told."""
        result = await self.reserve(name, len(prompt), params.max_tokens or 1, len(choices), **more)
        assert result.granted or result.waiting, result.reason
        await self.until_granted(name)
        commit = self.open(name, prompt)
        await self.start(name)
        commit(params, choices)
        for choice, first in self.exporter.firsts.items():
            self.tokens[name, choice] = [first.token.token_id]
            if first.finish is not None:
                self.finished[name, choice] = first.finish

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_finished(self, *keys: tuple[str, int]) -> None:
        await self.until(lambda: set(keys) <= set(self.finished) or bool(self.failures))
        assert not self.failures

    async def listen(self) -> None:
        async for message in self.call:
            self.messages.append(message)
            if message.HasField("heartbeat"):
                self.beats.append({each.request_id for each in message.heartbeat.live})
            for result in message.reserved:
                self.reserved[result.key.request_id] = result
            for failure in message.failures:
                self.failures[failure.key.request_id] = failure
            for output in message.outputs:
                where = output.key.request_id, output.choice_index
                told = self.tokens.setdefault(where, [])
                assert output.output_index == len(told)
                told += [token.token_id for token in output.tokens]
                if output.HasField("timings"):
                    assert where not in self.timings
                    self.timings[where] = output.timings
                if output.finish_reason:
                    self.finished[where] = finish_from_proto(output.finish_reason)
            self.changed.set()


def key(name: str, attempt: int = 0) -> decode_pb2.AttemptKey:
    return decode_pb2.AttemptKey(request_id=name, attempt=attempt)


@dataclass
class Rig:
    """A decode worker, an exporter, and sessions on demand."""

    app: DecodeApp
    engine: LoggingEngine
    exporter: Exporter
    stack: contextlib.AsyncExitStack

    async def router(self, *, beats: bool = True) -> SessionRouter:
        channel = await self.stack.enter_async_context(control_channel(self.app.addresses.control))
        call = decode_pb2_grpc.DecodeStub(channel).Session()
        router = SessionRouter(call, self.exporter)
        await router.say(hello=decode_pb2.Hello(router_id="router", wire_version=WIRE_VERSION))
        tasks = [asyncio.create_task(router.listen())]
        if beats:
            tasks.append(asyncio.create_task(router.beat()))

        async def stop() -> None:
            call.cancel()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.stack.push_async_callback(stop)
        return router

    async def until_decoding(self, router: SessionRouter, count: int) -> None:
        """Wait until so many attempts have their KV, a round trip at a time."""
        ready = (State.SLOT_WAIT, State.DECODING)
        async with asyncio.timeout(WAIT_S):
            while [a.lifecycle.state in ready for a in self.app.worker.attempts] != [True] * count:
                await router.barrier()

    async def until_status(self, condition: Callable[[worker_pb2.WorkerStatus], bool]) -> None:
        """Wait until the worker's own status is so."""
        async with asyncio.timeout(WAIT_S), control_channel(self.app.addresses.control) as channel:
            async for status in worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()):
                if condition(status):
                    return

    async def until_free(self) -> None:
        """Wait, by the worker's own status, until no page is in use."""
        await self.until_status(lambda status: not status.load.pages_used)
        assert self.engine.audit() == {}


@contextlib.asynccontextmanager
async def rig(config: dict[str, Any] | None = None, *, admits: int = 0, **engine: Any) -> AsyncIterator[Rig]:
    """A decode worker that takes on `admits` sequences instead of as many as it has slots, where that is given."""
    fake = LoggingEngine(**{"page_size": 4, "pages": 512, "slots": 4, **engine})
    exporter = Exporter()
    names = ["baton.v1.Kv"]
    add = KvServicer(exporter.exports).add_to_server
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(listen("127.0.0.1:0", insecure=False, add=add, services=names))
        exporter.address = listener.address
        app = await stack.enter_async_context(run(DecodeConfig(**(config or {})), engine=fake))
        stack.callback(fake.gate.set)
        if admits:
            app.worker.admission.forecast = SlotForecast(admits)
        async with contextlib.AsyncExitStack() as sessions:
            yield Rig(app, fake, exporter, sessions)
        exporter.exports.close()
    assert fake.audit() == {}
    assert exporter.engine.audit() == {}
