"""Early ends of prefills and of a prefill worker; nothing may stay behind."""

import asyncio
import contextlib
import gc
import logging
import random
import threading
from collections import Counter
from typing import Any

import grpc
import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import EngineError, NoToken, TransferError
from baton.request import SamplingParams
from prefill_svc.job import PrefillJob
from tests.metrics import sample
from tests.prefill import PROMPT, WAIT_S, Client, Gate, decode, decoder, read, serving, status_of


async def test_a_deadline_stops_the_chunk() -> None:
    gate = Gate()
    before = sample("baton_wasted_prefill_tokens_total")
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, layers=2), chunk_size=60) as client:
        reading = asyncio.create_task(status_of(client.call(timeout=5.0)))
        await gate.reached()
        gate.pass_layers(2)
        await gate.reached()
        aborted = client.watch_aborts()
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
        client.app.worker.load()
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
        aborted = client.watch_aborts()
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
    caplog.set_level(logging.INFO, "prefill_svc")
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        running_job = asyncio.create_task(client.done(transfer_id="t"))
        await gate.reached()
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
        assert [text for name, _, text in caplog.record_tuples if name.startswith("prefill_svc")] == ["drained"]


async def test_a_drain_waits_until_reports_are_sent() -> None:
    """Otherwise the worker would end in the middle of one, and another would compute the prompt again."""
    tokens = 30_000
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)
    async with serving(FakeEngine(pages=2_000, max_model_len=32_000)) as client:
        call = client.call([1] * tokens, params=params)
        reported = 0
        async with asyncio.timeout(WAIT_S):
            async for event in call:
                reported += len(event.report.tokens)
                if event.HasField("done"):
                    draining = asyncio.create_task(client.app.drain())
                    await client.app.worker.wait_finished()
                    # More than gRPC takes of a stream that nobody reads is left.
                    await client.status(lambda status: status.draining)
                    assert not draining.done()
            await draining
        assert reported == tokens


async def test_stopping_in_the_middle_of_everything_leaves_nothing() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, pages=16)) as client:
        calls = [asyncio.create_task(status_of(client.call(transfer_id=f"t{i}"))) for i in range(4)]
        await gate.reached()
        await client.status(lambda status: status.load.requests_without_token == 4)
        asyncio.get_running_loop().call_later(0.1, gate.open)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert all(isinstance(end, asyncio.CancelledError) or end[0] is unavailable for end in outcomes), outcomes  # type: ignore[index]


async def test_what_ended_is_forgotten() -> None:
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
