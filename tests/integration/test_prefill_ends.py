"""Ends of prefills, early and late: memory is back in time, and nothing stays behind."""

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient
from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import EngineError, NoToken, TransferError
from baton.kv.prefix.contract import Payload
from baton.ledger import LedgerEntry
from baton.pb import kv_pb2, prefill_pb2
from baton.request import SamplingParams
from baton.rpc.channel import kv_channel
from baton.rpc.errors import from_rpc_error
from baton.worker import prefix_cache
from prefill_svc.job import PrefillJob
from tests.metrics import sample
from tests.prefill import PROMPT, WAIT_S, Client, Gate, decode, decoder, gated, read, serving, status_of, watch_aborts
from tests.prefix_cache import MemoryPrefixCache
from tests.unit.transfer.support import Gate as CopyGate


async def test_a_deadline_stops_the_chunk() -> None:
    before = sample("baton_wasted_prefill_tokens_total")
    async with gated(sizes={"layers": 2}, chunk_size=60) as (client, gate):
        reading = asyncio.create_task(status_of(client.call(timeout=5.0)))
        await gate.reached()
        gate.pass_layers(2)
        await gate.reached()
        aborted = watch_aborts(client.app.worker)
        assert (await reading)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(aborted.wait(), WAIT_S)
        gate.pass_layers(1)
        await client.pages_back()
        assert sample("baton_wasted_prefill_tokens_total") == before + 60
        gate.open()


async def test_cancelling_after_done_leaves_the_export_to_its_lease() -> None:
    async with serving() as client:
        call = client.call(transfer_id="t")
        async for event in call:
            if event.HasField("done"):
                break
        call.cancel()
        with decoder() as engine:
            handle = engine.reserve("r", 110)
            handoff = await client.fetch(engine, handle, "t", 100)
            assert decode(engine, handle, handoff, 3) == expected_tokens(PROMPT, 4)


async def test_a_transfer_id_is_used_once() -> None:
    async with serving() as client:
        await client.done(transfer_id="t")
        assert (await status_of(client.call(transfer_id="t")))[0] is grpc.StatusCode.INVALID_ARGUMENT
        client.app.worker.load_report()
        assert (await client.done(transfer_id="u")).first_tokens


class BrokenEngine(FakeEngine):
    """Fails once in a chunk, and its audit as well if told so."""

    fails = True
    audits = True

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return super().launch(*args, **kwargs)

    def audit(self) -> dict[str, int]:
        if not self.audits:
            self.audits = True
            raise EngineError("pages are missing")
        return super().audit()


async def test_a_chunk_that_raises_fails_its_job_alone() -> None:
    async with serving(BrokenEngine()) as client:
        code, details = await status_of(client.call())
        assert (code, details) == (grpc.StatusCode.INTERNAL, "RuntimeError: out of memory")
        assert (await client.done()).first_tokens
        assert not client.app.failed.done()


class NanEngine(FakeEngine):
    """Computes no token while told so; with `spares_own`, only for requests."""

    finite = False
    spares_own = False

    def launch(self, chunks: Any = (), **kwargs: Any) -> Any:
        result = super().launch(chunks, **kwargs)
        if not self.finite and not (self.spares_own and chunks[0].handle.owner == "self-test"):
            raise NoToken("logits are not finite")
        return result


async def test_prompts_without_a_token_fail_alone_and_many_in_succession_end_the_worker() -> None:
    engine = NanEngine()
    async with serving(engine) as client:
        engine.finite = True
        await client.done(list(range(500, 600)))
        engine.finite = False
        for _ in range(2):
            code, details = await status_of(client.call())
            assert (code, details) == (grpc.StatusCode.INTERNAL, "logits are not finite")
        engine.finite = True
        assert (await client.done()).cached_tokens == 0
        # Blocks that others have cached stay.
        assert (await client.done(list(range(500, 600)))).cached_tokens > 0
        engine.finite = False
        for _ in range(2):
            assert (await status_of(client.call()))[0] is grpc.StatusCode.INTERNAL
            assert not client.app.failed.done()
        await status_of(client.call())
        with pytest.raises(EngineError, match="3 different requests got no token"):
            await asyncio.wait_for(asyncio.shield(client.app.failed), WAIT_S)


async def test_prompts_without_a_token_do_not_end_a_worker_that_computes_others() -> None:
    engine = NanEngine()
    engine.spares_own = True
    async with serving(engine) as client:
        for _ in range(7):
            assert (await status_of(client.call()))[0] is grpc.StatusCode.INTERNAL
        assert not client.app.failed.done()
        engine.finite = True
        assert (await client.done()).first_tokens
        await client.pages_back()


class HeldAudit(BrokenEngine):
    """Its first audit waits, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.auditing, self.go = threading.Event(), threading.Event()

    def audit(self) -> dict[str, int]:
        if not self.auditing.is_set():
            self.auditing.set()
            assert self.go.wait(WAIT_S)
            raise EngineError("pages are missing")
        return super().audit()


async def test_a_cancel_during_the_audit_after_a_fault_does_not_lose_its_result() -> None:
    engine = HeldAudit()
    async with serving(engine) as client:
        call = client.call()
        reading = asyncio.create_task(status_of(call))
        assert await asyncio.to_thread(engine.auditing.wait, WAIT_S)
        aborted = watch_aborts(client.app.worker)
        call.cancel()
        await asyncio.wait_for(aborted.wait(), WAIT_S)
        reading.cancel()
        engine.go.set()
        with pytest.raises(EngineError, match="pages are missing"):
            await asyncio.wait_for(asyncio.shield(client.app.failed), WAIT_S)


async def test_a_worker_whose_pages_do_not_audit_is_done() -> None:
    engine = BrokenEngine()
    engine.audits = False
    async with serving(engine) as client:
        await status_of(client.call())
        with pytest.raises(EngineError, match="pages are missing"):
            await asyncio.wait_for(asyncio.shield(client.app.failed), WAIT_S)
        assert (await status_of(client.call()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_refuses_new_work_and_waits_for_jobs_and_pulls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with gated() as (client, gate):
        running_job = asyncio.create_task(client.done(transfer_id="t"))
        await gate.reached()
        caplog.clear()
        draining = asyncio.create_task(client.app.drain())
        await client.status(lambda status: status.draining)
        assert (await status_of(client.call()))[0] is grpc.StatusCode.UNAVAILABLE
        gate.open()
        await running_job
        assert not draining.done()
        with decoder() as engine:
            handle = engine.reserve("r", 100)
            await client.fetch(engine, handle, "t", 100)
            engine.free(handle)
        async with asyncio.timeout(WAIT_S):
            await draining
        assert [text for name, _, text in caplog.record_tuples if name == "baton.worker.start"] == ["drained"]


async def test_a_drain_waits_until_reports_are_sent() -> None:
    """Otherwise the worker would end in the middle of one, and another would compute the prompt again."""
    tokens = 30_000
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)
    async with serving(FakeEngine(pages=2_000, max_model_len=32_000)) as client:
        call = client.call([1] * tokens, params=params)
        reported = 0
        async with asyncio.timeout(WAIT_S):
            async for event in call:
                reported += len(event.prompt_logprobs.tokens)
                if event.HasField("done"):
                    draining = asyncio.create_task(client.app.drain())
                    await client.app.worker.wait_finished()
                    # More than gRPC takes of a stream that nobody reads is left.
                    await client.status(lambda status: status.draining)
                    assert not draining.done()
            await draining
        assert reported == tokens


async def test_stopping_in_the_middle_of_everything_leaves_nothing() -> None:
    async with gated(sizes={"pages": 16}) as (client, gate):
        calls = [asyncio.create_task(status_of(client.call(transfer_id=f"t{i}"))) for i in range(4)]
        await gate.reached()
        await client.status(lambda status: status.load.requests_without_token == 4)
        asyncio.get_running_loop().call_later(0.1, gate.open)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert all(isinstance(end, asyncio.CancelledError) or end[0] is unavailable for end in outcomes), outcomes  # type: ignore[index]


async def test_no_timer_keeps_an_ended_job_in_memory() -> None:
    """A prompt may be long, and the limits of its states are minutes: no timer keeps it until they have passed."""
    async with serving(FakeEngine(), lease_s=0.05) as client:
        for number in range(5):
            await client.done(timeout=60 if number % 2 else None, transfer_id=f"t{number}" if number else "")
        await client.pages_back()
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is PrefillJob]


async def test_a_storm_of_ends_leaves_nothing() -> None:
    """Prompts of all sizes through a small pool; some are cancelled, late, fetched or left to their lease."""
    dice = random.Random(1)
    engine = FakeEngine(chunk_time=0.002, pages=24)
    async with serving(engine, chunk_size=32, max_waiting=20, lease_s=0.05) as client:

        async def one(number: int) -> str:
            await asyncio.sleep(dice.random())
            prompt = [(number * i) % 1000 for i in range(dice.randrange(1, 300))]
            transfer_id = f"t{number}" if dice.random() < 0.7 else ""
            timeout = dice.choice([None, None, 0.05, 0.3])
            reading = asyncio.create_task(read(client.call(prompt, transfer_id=transfer_id, timeout=timeout)))
            if dice.random() < 0.3:
                asyncio.get_running_loop().call_later(dice.random() / 5, reading.cancel)
            pulling = None
            if transfer_id and dice.random() < 0.6:
                pulling = asyncio.create_task(_pull(client, transfer_id, len(prompt)))
            outcome, *_ = await asyncio.gather(reading, *filter(None, [pulling]), return_exceptions=True)
            if isinstance(outcome, list):
                assert outcome[-1].done.first_tokens[0].token.token_id == expected_tokens(prompt, 1)[0]
                return "done"
            assert isinstance(outcome, asyncio.CancelledError | grpc.aio.AioRpcError), outcome
            return "ended" if isinstance(outcome, asyncio.CancelledError) else outcome.code().name

        async with asyncio.timeout(60):
            outcomes = Counter(await asyncio.gather(*(one(number) for number in range(120))))
        assert outcomes.keys() <= {"done", "ended", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}, outcomes
        assert outcomes["done"] > 10
        await client.pages_back()


async def _pull(client: Client, transfer_id: str, tokens: int) -> None:
    engine = FakeEngine()
    with contextlib.suppress(TransferError):
        await client.fetch(engine, engine.reserve("r", tokens), transfer_id, tokens)


LEASE_S = 600.0
"""Longer than any test waits: what is freed sooner is freed by something else."""

LONG = [(7 * i) % 1000 for i in range(1000)]


class SlowCache(MemoryPrefixCache):
    """Says that it has all, and answers the operation named `slow` only once `go` is set."""

    slow = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.come, self.go = asyncio.Event(), asyncio.Event()

    async def lookup(self, digests: Sequence[bytes]) -> int:
        await self._held("lookup")
        return await super().lookup(digests)  # type: ignore[return-value]

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        await self._held("fetch")
        return await super().fetch(digests)

    async def _held(self, name: str) -> None:
        if self.slow == name:
            self.come.set()
            await self.go.wait()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[SlowCache]:
    """The caches of the workers that the test starts."""
    made: list[SlowCache] = []

    def open_cache(*_: Any, **__: Any) -> SlowCache:
        made.append(SlowCache())
        return made[-1]

    monkeypatch.setattr("baton.worker.prefix_cache.open_prefix_cache", open_cache)
    return made


@contextlib.asynccontextmanager
async def freed(client: Client) -> AsyncIterator[None]:
    """All pages are back in time after the block, and nobody is listed any more."""
    yield
    async with asyncio.timeout(WAIT_S):
        await client.pages_back()
    ledger = await client.app.audit.ledger()
    assert (list(ledger.entries), ledger.violation) == ([], "")


async def owners(client: Client) -> list[LedgerEntry]:
    """The ledger's entries, over the wire's own way of making them."""
    ledger = await client.app.audit.ledger()
    assert ledger.violation == ""
    return list(ledger.entries)


async def abandon(client: Client, transfer_id: str, incarnation: str = "") -> None:
    incarnation = incarnation or client.app.status.identity.incarnation
    await client.prefill.Abandon(prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=incarnation))


@pytest.mark.parametrize("by", ["cancel", "abandon"])
async def test_a_queued_prompt_that_is_abandoned_or_cancelled_never_runs(by: str) -> None:
    async with gated() as (client, gate):
        first, reading = client.begin()
        await gate.reached()
        second = client.call(PROMPT[::-1], transfer_id="t")
        waiting = asyncio.create_task(status_of(second) if by == "abandon" else read(second))
        await client.status(lambda status: status.load.pages_used == 14)
        entry = next(entry for entry in await owners(client) if entry.detail == "transfer t")
        assert (entry.kind, entry.state, entry.pages) == ("kv", "preparing", 7)
        if by == "cancel":
            await client.cancel(second, waiting)
        else:
            await abandon(client, "t", incarnation="of a stranger")
            assert len(await owners(client)) == 2
            await abandon(client, "t")
            assert (await waiting)[0] is grpc.StatusCode.CANCELLED
        async with asyncio.timeout(WAIT_S):
            await client.status(lambda status: status.load.pages_used == 7)
        async with freed(client):
            await client.cancel(first, reading)
            gate.open()


@pytest.mark.parametrize("slow", ["lookup", "fetch"])
async def test_while_the_prefix_cache_is_slow(slow: str, caches: list[SlowCache]) -> None:
    async with serving() as client:
        await client.done()
        await client.pages_back()
        client.app.engine.drop_cached()
        cache = caches[0]
        cache.slow = slow
        call, reading = client.begin(transfer_id="t")
        await cache.come.wait()
        (entry,) = await owners(client)
        assert (entry.state, entry.pages) == ("preparing", 7 if slow == "fetch" else 0)
        async with freed(client):
            await client.cancel(call, reading)
        cache.go.set()
        cache.slow = ""
        assert (await client.done()).cached.host == 96


class SlowCopies(FakeEngine):
    """Holds copies into pages (`writes`) or out of them (`reads`)."""

    writes: Callable[[], None] | None = None
    reads: Callable[[], None] | None = None
    written = 0

    def write_blocks(self, *args: Any) -> None:
        if self.writes is not None:
            self.written += 1
            self.writes()
        super().write_blocks(*args)

    def read_kv(self, *args: Any) -> Any:
        found = super().read_kv(*args)
        if self.reads is not None:
            self.reads()
        return found


async def test_loading_stops_after_the_copy_under_way(caches: list[SlowCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "COPY_BYTES", 1)
    engine = SlowCopies(layers=8)
    async with serving(engine) as client:
        await client.done()
        await client.pages_back()
        engine.drop_cached()
        door = engine.writes = CopyGate()
        call, reading = client.begin(transfer_id="t")
        await asyncio.to_thread(door.reached.wait, WAIT_S)
        await client.cancel(call, reading)
        assert engine.stats().used == 7, "a write is in flight"
        async with freed(client):
            door.open()
        assert engine.written == 1


async def test_computing_stops_after_the_layer_before_and_after_the_first_chunk() -> None:
    async with gated(sizes={"layers": 8}, chunk_size=50) as (client, gate):
        for layers in (1, 12):
            call, reading = client.begin(transfer_id=f"t{layers}")
            for _ in range(layers - 1):
                gate.pass_layers(1)
            await gate.reached(layers)
            await client.cancel(call, reading)
            (entry,) = await owners(client)
            assert (entry.state, entry.pages) == ("prefilling", 7)
            async with freed(client):
                gate.pass_layers(1)


async def test_held_kv_is_given_back_by_abandon_and_nothing_is_exported_under_the_id_again() -> None:
    async with serving(lease_s=LEASE_S) as client:
        await client.done(transfer_id="t")
        (entry,) = await owners(client)
        assert (entry.kind, entry.state, entry.pages) == ("export", "held", 7)
        assert entry.deadline_s is not None
        assert 0 < entry.deadline_s <= LEASE_S
        await abandon(client, "t", incarnation="of a stranger")
        assert len(await owners(client)) == 1
        async with freed(client):
            await abandon(client, "t")
        await abandon(client, "t")
        await abandon(client, "unknown")
        for transfer_id in ("t", "unknown"):
            code, details = await status_of(client.call(transfer_id=transfer_id))
            assert (code, details) == (grpc.StatusCode.ABORTED, f"transfer {transfer_id} was abandoned")
        assert await owners(client) == []


@pytest.fixture
def big() -> FakeEngine:
    """An engine whose KV is larger than all buffers on the way: 8 MiB for LONG."""
    return FakeEngine(head_dim=256, layers=2, heads=2, pages=128)


async def stalled_reader(client: Client, channel: grpc.aio.Channel, transfer_id: str) -> Any:
    """A consumer that has begun and reads no more."""
    fetch = channel.unary_stream("/baton.v1.Kv/FetchKv", request_serializer=kv_pb2.FetchKvRequest.SerializeToString)
    incarnation = client.app.status.identity.incarnation
    call = fetch(kv_pb2.FetchKvRequest(transfer_id=transfer_id, incarnation=incarnation))
    assert await call.read()
    return call


@pytest.mark.parametrize("by", ["abandon", "lease", "cancel of the prefill"])
async def test_a_consumer_that_does_not_read_holds_no_pages(by: str, big: FakeEngine) -> None:
    gate = Gate()
    engine = big
    if by == "cancel of the prefill":
        engine = FakeEngine(head_dim=256, layers=2, heads=2, pages=128, chunk_time=1.0, delay=gate)
    async with (
        serving(engine, lease_s=3.0 if by == "lease" else LEASE_S, chunk_size=500) as client,
        kv_channel(client.app.addresses.kv) as channel,
    ):
        prefilling, reading = client.begin(LONG, transfer_id="t")
        gate.pass_layers(2)
        if by == "cancel of the prefill":
            await gate.reached(3)
        else:
            await reading
        call = await stalled_reader(client, channel, "t")
        async with freed(client):
            if by == "abandon":
                await abandon(client, "t")
            elif by == "cancel of the prefill":
                await client.cancel(prefilling, reading)
                gate.open()
        call.cancel()


async def test_pages_with_a_read_in_flight_are_listed_as_draining_until_it_ends() -> None:
    engine = SlowCopies()
    async with serving(engine, lease_s=LEASE_S) as client, kv_channel(client.app.addresses.kv) as channel:
        await client.done(transfer_id="t")
        door = engine.reads = CopyGate()
        fetching = asyncio.create_task(stalled_reader(client, channel, "t"))
        await asyncio.to_thread(door.reached.wait, WAIT_S)
        await abandon(client, "t")
        (entry,) = await owners(client)
        assert (entry.kind, entry.state, entry.pages) == ("draining", "ended", 7)
        async with freed(client):
            door.open()
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await fetching


async def heartbeats(call: Any, count: int) -> None:
    """Read so many messages, which say no more than that the job is alive."""
    for _ in range(count):
        assert not (await asyncio.wait_for(call.read(), WAIT_S)).HasField("done")


async def test_a_living_job_is_heard_while_it_waits_and_in_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job.HEARTBEAT_S", 0.02)
    async with gated(chunk_size=60) as (client, gate):
        first = client.call()
        await gate.reached()
        await heartbeats(first, 4)
        second = client.call(PROMPT[:99])
        await heartbeats(second, 4)
        gate.open()
        for call in (first, second):
            while not (await call.read()).HasField("done"):
                pass


async def test_a_prompt_that_gets_no_chunk_in_time_is_refused_with_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job.PREPARING_S", 0.05)
    async with gated() as (client, gate):
        first = asyncio.create_task(read(client.call()))
        await gate.reached()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read(client.call()), WAIT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).retry_after == 1.0
        assert not first.done(), "the state that it is in by now has another limit"
        gate.open()
        assert (await first)[-1].done.first_tokens


async def test_a_prefill_that_crawls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_svc.job._PREFILLING_S", 0.0)
    monkeypatch.setattr("prefill_svc.job.PREFILL_TOKEN_S", 0.0)
    async with serving() as client:
        assert await status_of(client.call(transfer_id="t")) == (
            grpc.StatusCode.UNAVAILABLE,
            "the prefill was given up with 0 of 100 tokens prefilled",
        )
        await client.pages_back()


async def test_an_engine_is_reported_as_stalled_while_its_count_of_work_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, looks = Gate(), itertools.count(1)
    engine, stuck, looked = FakeEngine(chunk_time=1.0, delay=gate), asyncio.Event(), asyncio.Event()

    def work_counter() -> int:
        if stuck.is_set():
            return -1
        number = next(looks)
        if number == 3 * 4:
            # Three times `stall_s`, in one layer.
            looked.set()
        return number

    monkeypatch.setattr(engine, "work_counter", work_counter)
    async with serving(engine, stall_s=0.2) as client:
        running = asyncio.create_task(read(client.call()))
        await gate.reached()
        await asyncio.wait_for(looked.wait(), WAIT_S)
        await client.status(lambda status: status.load.pages_used > 0 and not status.stalled)
        stuck.set()
        await client.status(lambda status: status.stalled)
        gate.open()
        await running
        await client.status(lambda status: not status.stalled)


async def test_an_idle_worker_audits_itself_and_ends_for_a_forgotten_owner(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        forgotten = engine.reserve("gone/3", 40)
        await client.done()
        with pytest.raises(EngineError, match="gone/3"):
            await asyncio.wait_for(asyncio.shield(client.app.failed), WAIT_S)
        assert "503 of 512 pages are free, 6 are cached" in caplog.text
        assert (await status_of(client.call()))[0] is grpc.StatusCode.UNAVAILABLE
        engine.free(forgotten)


async def test_the_ledger_lists_a_job_with_its_deadline() -> None:
    async with gated() as (client, gate):
        _, reading = client.begin(timeout=50)
        await gate.reached()
        async with AsyncClient(client.app.addresses.control) as admin:
            (entry,) = (await admin.ledger()).entries
        assert (entry.kind, entry.state, entry.pages, entry.bytes) == ("kv", "prefilling", 7, 7 * 16 * 64)
        assert entry.deadline_s is not None
        # gRPC may round a timeout up on the wire, this one to 50.1 s.
        assert 40 < entry.deadline_s < 51
        gate.open()
        await reading
