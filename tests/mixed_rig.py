"""Requests over workers of any role, without a router: each names the worker that prefills and the one that decodes."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig
from baton.engine.contract import Engine
from baton.engine.fake import FakeEngine
from baton.pb import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc
from baton.request import RemoteExport, SamplingParams
from baton.rpc.channel import control_channel
from baton.rpc.convert import export_to_proto, sampling_to_proto
from baton.worker.status import WIRE_VERSION
from decode_svc.app import run as run_decode
from mixed_svc.app import MixedApp, run
from prefill_svc.app import run as run_prefill
from tests.decode_rig import WAIT_S, SessionRouter, key
from tests.decoding import digests

_names = itertools.count()


@dataclass
class Worker:
    """A running worker of any role, with the stubs of a router."""

    app: Any
    prefill: Any
    session: SessionRouter

    def export(self, transfer_id: str) -> RemoteExport:
        """An export of this worker."""
        identity = self.app.status.identity
        return RemoteExport(transfer_id, identity.incarnation, identity.shards_at(self.app.addresses.control))


@dataclass
class Answer:
    """Tokens of each choice, in the order of their indexes, and counts of prompt tokens that were not computed."""

    tokens: list[list[int]]
    pinned: int = 0
    cached: int = 0
    prompt_logprobs: list[inference_pb2.TokenInfo] = field(default_factory=list)
    fetch_ms: float = 0.0


@dataclass
class Request:
    """A request under way: `call` is its prefill, `reading` the task that reads it."""

    name: str
    prefill: Worker
    decode: Worker
    params: SamplingParams
    pinned: int
    call: Any
    reading: "asyncio.Task[list[prefill_pb2.PrefillEvent]]"

    async def answer(self) -> Answer:
        """Wait for all tokens."""
        async with asyncio.timeout(WAIT_S):
            events = await self.reading
            (done,) = (event.done for event in events if event.HasField("done"))
            session, wanted = self.decode.session, []
            first = {each.choice_index: each for each in done.first_tokens}
            for choice, each in first.items():
                if not each.finish_reason:
                    wanted.append((self.name, choice))
            await session.until(lambda: set(wanted) <= set(session.finished) or self.name in session.failures)
            assert self.name not in session.failures, session.failures[self.name]
            tokens = [
                [first[choice].token.token_id, *session.tokens.get((self.name, choice), [])[1:]]
                for choice in range(self.params.n)
            ]
            logprobs = [token for event in events for token in event.prompt_logprobs.tokens]
            timings = [session.timings[where].fetch_ms for where in wanted]
        return Answer(tokens, self.pinned, done.cached_tokens, logprobs, max(timings, default=0.0))


class Workers:
    """Connections to workers."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack

    async def connect(self, app: Any, *, decodes: bool = True) -> Worker:
        """Dial a worker, and open a session if it `decodes`."""
        channel = await self._stack.enter_async_context(control_channel(app.addresses.control))
        call = decode_pb2_grpc.DecodeStub(channel).Session() if decodes else None
        session = SessionRouter(call, cast(Any, None))
        if call is not None:
            await session.say(hello=decode_pb2.Hello(router_id="router", wire_version=WIRE_VERSION))
            tasks = [asyncio.create_task(session.listen()), asyncio.create_task(session.beat())]

            async def stop() -> None:
                call.cancel()
                tasks[1].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            self._stack.push_async_callback(stop)
        return Worker(app, prefill_pb2_grpc.PrefillStub(channel), session)

    async def ask(
        self,
        prefill: Worker,
        decode: Worker,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        outputs: Sequence[int] = (),
        start_first: bool = True,
    ) -> Request:
        """Reserve, prefill and start; in place if both workers are one."""
        name = f"r{next(_names)}"
        context = [*prompt, *outputs]
        reads = params.prompt_logprobs is None
        result = await decode.session.reserve(
            name,
            len(context),
            params.max_tokens or 1,
            params.n,
            prefix_digests=b"".join(digests(decode.app.engine, context)) if reads else b"",
        )
        assert result.granted, result.reason
        transfer_id = f"{name}/0/t"
        source = prefill.export(transfer_id)
        start = decode_pb2.Start(key=key(name), source=export_to_proto(source))
        if start_first:
            await decode.session.say(start=start)
        call = prefill.prefill.Prefill(
            prefill_pb2.PrefillRequest(
                request_id=name,
                transfer_id=transfer_id,
                prompt_token_ids=prompt,
                output_token_ids=outputs,
                choice_indexes=range(params.n),
                sampling=sampling_to_proto(params),
                in_place=prefill is decode,
            )
        )
        for choice in range(params.n):
            # The rig of decode checks the numbers of outputs, which begin after the first token.
            decode.session.tokens[name, choice] = [-1, *outputs]
        reading = asyncio.create_task(_read(call))
        if not start_first:
            await asyncio.sleep(0.05)
            await decode.session.say(start=start)
        return Request(name, prefill, decode, params, result.cached_tokens, call, reading)

    async def complete(self, prefill: Worker, decode: Worker, *args: Any, **more: Any) -> Answer:
        """All tokens of a request."""
        return await (await self.ask(prefill, decode, *args, **more)).answer()


async def _read(call: Any) -> list[prefill_pb2.PrefillEvent]:
    return [event async for event in call]


@contextlib.asynccontextmanager
async def mixed(engine: Engine | None = None, **settings: Any) -> AsyncIterator[tuple[MixedApp, Workers]]:
    """A mixed worker, on the fake engine unless a model is named; at the end no page may be held."""
    if engine is None and "model" not in settings:
        engine = FakeEngine(page_size=4, pages=512, slots=4)
    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(run(MixedConfig(**{"cache_budget_s": 60.0, **settings}), engine=engine))
        async with contextlib.AsyncExitStack() as connections:
            yield app, Workers(connections)
    assert app.engine.audit() == {}


class Fleet:
    """Workers of one checkpoint in float32."""

    def __init__(self, checkpoint: Path, stack: contextlib.AsyncExitStack, **settings: Any) -> None:
        """`settings` are those of all workers."""
        self._stack = stack
        self._settings: dict[str, Any] = {
            "model": str(checkpoint),
            "dtype": "float32",
            "threads": 1,
            "kv_memory": 16 << 20,
            "cache_budget_s": 60.0,
            **settings,
        }
        self.workers = Workers(stack)
        self.engines: list[Any] = []

    async def mixed(self, **settings: Any) -> Worker:
        return await self._start(run(MixedConfig(**self._settings | settings)), decodes=True)

    async def prefill(self, **settings: Any) -> Worker:
        return await self._start(run_prefill(PrefillConfig(**self._settings | settings)), decodes=False)

    async def decode(self, **settings: Any) -> Worker:
        return await self._start(run_decode(DecodeConfig(**self._settings | settings)), decodes=True)

    async def _start(self, running: Any, *, decodes: bool) -> Worker:
        app = await self._stack.enter_async_context(running)
        self.engines.append(app.engine)
        return await self.workers.connect(app, decodes=decodes)


@contextlib.asynccontextmanager
async def fleet(checkpoint: Path, **settings: Any) -> AsyncIterator[Fleet]:
    """Workers of one checkpoint; at the end no page may be held."""
    async with contextlib.AsyncExitStack() as stack:
        made = Fleet(checkpoint, stack, **settings)
        yield made
    assert [engine.audit() for engine in made.engines] == [{} for _ in made.engines]
