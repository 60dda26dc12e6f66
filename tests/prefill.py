"""A prefill worker on the fake engine, and a router's side of it, for tests.

Whether KV that leaves the worker is right is judged by a second engine: it fetches, inserts, steps, and yields the
expected tokens only if every element arrived in its place.
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import pytest

from baton.config.worker import PrefillConfig
from baton.engine.fake import FakeEngine
from baton.errors import BatonError
from baton.kv.prefix.contract import Hits
from baton.kv.prefix.fetch_cost import FetchCostModel, FetchDecision
from baton.pb import inference_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.request import CACHE_TIERS, CachePolicy, Handoff, RemoteExport, SamplingParams, SequenceState
from baton.rpc.channel import control_channel, kv_channel
from baton.rpc.convert import cache_policy_to_proto, sampling_to_proto
from baton.transfer.fetcher import fetch_from
from baton.transfer.transport import GrpcSource
from baton.transfer.wire import KvSlice
from prefill_svc.app import PrefillApp, run
from prefill_svc.job import PrefillJob
from prefill_svc.worker import PrefillWorker
from tests.engine_calls import insert
from tests.metrics import sample

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = [(7 * i) % 1000 for i in range(100)]
WAIT_S = 60.0
SOURCES = ("computed", *CACHE_TIERS)

_ids = itertools.count()


class Gate:
    """Holds the engine before each layer of a chunk until told to go on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[None] = asyncio.Queue()
        self._go = threading.Semaphore(0)
        self._open = False

    def __call__(self, _seconds: float) -> None:
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, None)
        if not self._open:
            self._go.acquire(timeout=WAIT_S)

    async def reached(self, layers: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            for _ in range(layers):
                await self._arrivals.get()

    def pass_layers(self, layers: int) -> None:
        self._go.release(layers)

    def open(self) -> None:
        """Hold nothing any more."""
        self._open = True
        self._go.release(1_000)

    def close(self) -> None:
        """Hold again, once nothing is on its way."""
        self._open, self._go, self._arrivals = False, threading.Semaphore(0), asyncio.Queue()


class Client:
    def __init__(self, app: PrefillApp) -> None:
        self.app = app
        self.channel = control_channel(app.addresses.control)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerStub(self.channel)

    def call(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        params: SamplingParams = GREEDY,
        output: Sequence[int] = (),
        choices: Sequence[int] = (0,),
        transfer_id: str = "",
        salt: bytes = b"",
        cache: CachePolicy = CachePolicy.READ_WRITE,
        source: prefill_pb2.PrefixSource | None = None,
        timeout: float | None = None,
    ) -> Any:
        request = prefill_pb2.PrefillRequest(
            request_id=f"r{next(_ids)}",
            transfer_id=transfer_id,
            prompt_token_ids=prompt,
            output_token_ids=output,
            choice_indexes=choices,
            sampling=sampling_to_proto(params),
            cache_salt=salt,
            cache=cache_policy_to_proto(cache),
            prefix_source=source,
        )
        return self.prefill.Prefill(request, timeout=timeout)

    async def done(self, *args: Any, **kwargs: Any) -> prefill_pb2.PrefillDone:
        async with asyncio.timeout(WAIT_S):
            events = [event async for event in self.call(*args, **kwargs) if not event.HasField("prompt_logprobs")]
        assert [event.HasField("done") for event in events] == [False] * (len(events) - 1) + [True]
        return events[-1].done

    async def report(self, *args: Any, **kwargs: Any) -> list[inference_pb2.TokenInfo]:
        """Run a prefill to its end; the parts of its report, joined."""
        joined: list[inference_pb2.TokenInfo] = []
        async with asyncio.timeout(WAIT_S):
            async for event in self.call(*args, **kwargs):
                assert not event.HasField("prompt_logprobs") or event.prompt_logprobs.start == len(joined)
                joined += event.prompt_logprobs.tokens
        return joined

    async def fetch(self, engine: FakeEngine, handle: Any, transfer_id: str, tokens: int) -> Handoff:
        """Pull finished KV, as decode does."""
        async with kv_channel(self.app.addresses.kv) as channel:
            identity = self.app.status.identity
            (shard,) = identity.shards
            export = RemoteExport(transfer_id, identity.incarnation, identity.shards)
            source = GrpcSource(channel, export, shard, timeout_s=WAIT_S, silence_timeout_s=WAIT_S)
            kv_slice = KvSlice(range(tokens), shard.layers, shard.heads)
            return await fetch_from([source], engine, handle, kv_slice, length=tokens, timeout_s=WAIT_S)

    async def status(self, wanted: Callable[[worker_pb2.WorkerStatus], bool]) -> worker_pb2.WorkerStatus:
        async with asyncio.timeout(WAIT_S):
            async for status in self.worker.Watch(worker_pb2.WatchRequest()):
                if wanted(status):
                    return status
        raise AssertionError("the watch ended")

    def begin(self, *args: Any, **kwargs: Any) -> "tuple[Any, asyncio.Task[list[prefill_pb2.PrefillEvent]]]":
        """A call as in `call`, and the task that reads it."""
        call = self.call(*args, **kwargs)
        return call, asyncio.create_task(read(call))

    async def cancel(self, call: Any, reading: "asyncio.Task[Any]") -> None:
        """Cancel a call that a task reads; return when the worker has learnt it."""
        aborted = watch_aborts(self.app.worker)
        call.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        await asyncio.wait_for(aborted.wait(), WAIT_S)

    async def pages_back(self) -> None:
        await self.status(lambda status: status.load.pages_used == 0)


def watch_aborts(worker: PrefillWorker) -> asyncio.Event:
    """Set when the worker learns, from now on, that the caller of a job that goes on is gone."""
    aborted, abort = asyncio.Event(), worker.abort

    def watched(job: PrefillJob, error: BatonError) -> None:
        if not job.finished:
            aborted.set()
        abort(job, error)

    worker.abort = watched  # type: ignore[method-assign]
    return aborted


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A worker and a client; at the end no page may be held. Its pages are its only cache, but for what is asked.

    A store has all the time that it wants, unless `settings` say otherwise.
    """
    engine = engine or FakeEngine()
    config = PrefillConfig(**{"fleet_secret": "secret", "cache_budget_s": WAIT_S, **settings})
    try:
        async with run(config, engine=engine) as app:
            client = Client(app)
            yield client
            await client.channel.close()
    finally:
        assert engine.audit() == {}
        assert engine.stats().used == 0


@contextlib.asynccontextmanager
async def gated(*, sizes: Mapping[str, int] | None = None, **settings: Any) -> AsyncIterator[tuple[Client, Gate]]:
    """As `serving`, with a gate before each layer; `sizes` are those of the engine."""
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, **(sizes or {})), **settings) as client:
        yield client, gate


@contextlib.contextmanager
def decoder(page_size: int = 16) -> Iterator[FakeEngine]:
    """A decode worker's engine; at the end no page may be held."""
    engine = FakeEngine(page_size=page_size)
    yield engine
    assert engine.audit() == {}


def decode(engine: FakeEngine, handle: Any, handoff: Handoff, steps: int) -> list[int]:
    first = handoff.first_tokens[0]
    output = [*handoff.output_ids, first.token.token_id]
    state = SequenceState(handoff.params, list(handoff.prompt_ids), list(output), first.choice_index)
    insert(engine, handle, state)
    for _ in range(steps):
        ((_, tokens),) = engine.launch().result().sequences
        output += [token.token_id for token in tokens]
    engine.free(handle)
    return output


def fetch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch whatever is found, as if all were slow to compute: the fake engine, and tiny models, are not."""

    def decide(self: FetchCostModel, hits: Hits, *_: Any) -> FetchDecision:
        return FetchDecision(hits.blocks, hits.blocks)

    monkeypatch.setattr(FetchCostModel, "decide", decide)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read(call), WAIT_S)
    return caught.value.code(), caught.value.details() or ""


async def read(call: Any) -> list[prefill_pb2.PrefillEvent]:
    return [event async for event in call]


async def flushed(client: Client) -> None:
    """Wait until all has ended and new blocks are written back; KV must not be held for longer."""
    await client.app.worker.wait_finished()
    await client.pages_back()


def prefilled() -> dict[str, float]:
    return {source: sample("baton_prefill_tokens_total", source=source) for source in SOURCES}


def since(before: Mapping[str, float]) -> dict[str, float]:
    """Increases of the counters that grew."""
    now = prefilled()
    return {source: now[source] - before[source] for source in SOURCES if now[source] > before[source]}


def by_tier(done: prefill_pb2.PrefillDone) -> dict[str, int]:
    """The cached tokens of an answer, by tier, after holding them against their sum."""
    counts = {tier: getattr(done.cached, tier) for tier in CACHE_TIERS if getattr(done.cached, tier)}
    assert sum(counts.values()) == done.cached_tokens
    return counts
