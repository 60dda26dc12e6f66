"""A mixed worker over real gRPC: prompts in place, prompts for others and of others, and both in one pass."""

import asyncio
import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

import baton.worker.start
from baton.config.worker import MixedConfig
from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import ConfigError, EngineError
from baton.kv.prefix.contract import Hits
from baton.pb import decode_pb2, prefill_pb2
from baton.request import CachePolicy, SamplingParams
from baton.rpc.convert import cache_policy_to_proto, export_to_proto, sampling_to_proto
from baton.telemetry.metrics import RUNNING, TRANSFER_BYTES, WAITING
from baton.worker.status import WorkerRole
from mixed_svc import passes
from mixed_svc.app import load_report, run, set_gauges
from prefill_svc.prefix import PrefixLoader
from tests.checkpoints import lively_prompt, load_reference, prompt_ids
from tests.decode_rig import WAIT_S, key
from tests.decoding import digests
from tests.metrics import count, sample
from tests.mixed_rig import Request, Worker, Workers, fleet, mixed
from tests.prefill import fetch_all, read, watch_aborts
from tests.prefix_cache import MemoryPrefixCache

TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts of several lengths, with the tokens of transformers."""
    model = load_reference(checkpoint)
    found = [lively_prompt(model, length, TOKENS) for length in (3, 16, 33, 64, 130)]
    return [(prompt, reference.token_ids) for prompt, reference in found]


def watch_passes(engine: Any, gate: threading.Event) -> list[tuple[int, int]]:
    """The numbers of chunks and of sequences in each pass from now on; passes wait for the gate."""
    passes, launch = [], engine.launch

    def watched(chunks: Any = (), **more: Any) -> Any:
        assert gate.wait(60)
        launched = launch(chunks, **more)
        passes.append((len(chunks), len(launched.batch)))
        return launched

    engine.launch = watched
    return passes


async def test_prompts_in_place_and_their_prefixes_equal_generate(
    checkpoint: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    """A prompt again finds all but its last token in the pages, and a conversation that goes on finds its past."""
    async with fleet(checkpoint) as made:
        moved, turn = count(TRANSFER_BYTES.labels("received")), dataclasses.replace(GREEDY, max_tokens=16)
        worker = await made.mixed(page_size=16)
        engine = worker.app.engine
        for prompt, tokens in expected:
            # The prompts have beginnings in common.
            found = min(engine.match_prefix(digests(engine, prompt)), len(prompt) - 1)
            answer = await made.workers.complete(worker, worker, prompt, turn)
            assert (answer.tokens, answer.pinned, answer.fetch_ms) == ([tokens[:16]], found, 0)
            again = await made.workers.complete(worker, worker, prompt, turn, start_first=False)
            pinned = min(len(prompt) // 16 * 16, len(prompt) - 1)
            assert (again.tokens, again.pinned, again.cached) == ([tokens[:16]], pinned, pinned)
            later = await made.workers.complete(worker, worker, [*prompt, *tokens[:16]], turn)
            assert (later.tokens, later.pinned) == ([tokens[16:32]], (len(prompt) + 15) // 16 * 16)
        assert count(TRANSFER_BYTES.labels("received")) == moved


@pytest.mark.parametrize("chunk_size", [0, 7])
async def test_passes_of_prompts_and_steps_give_the_tokens_of_separate_ones(
    checkpoint: Path, expected: list[tuple[list[int], list[int]]], chunk_size: int
) -> None:
    async with fleet(checkpoint) as made:
        worker = await made.mixed(chunk_size=chunk_size)
        gate = threading.Event()
        passes = watch_passes(worker.app.engine, gate)
        asked = [await made.workers.ask(worker, worker, prompt, GREEDY) for prompt, _ in expected]
        async with asyncio.timeout(WAIT_S):
            while worker.app.prefill.load_report().requests_without_token < len(expected):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        gate.set()
        answers = [await each.answer() for each in asked]
        assert [answer.tokens for answer in answers] == [[tokens] for _, tokens in expected]
        assert any(chunks and batch for chunks, batch in passes)
        assert any(chunks > 1 for chunks, _ in passes)


async def test_transfers_between_mixed_workers_and_others_equal_generate(
    checkpoint: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    async with fleet(checkpoint) as made:
        mixed, other = await made.mixed(), await made.mixed(page_size=32)
        prefill, decode = await made.prefill(), await made.decode()
        pairs = [(mixed, decode), (prefill, mixed), (mixed, other), (other, mixed), (other, other)]
        asked = [
            await made.workers.ask(source, target, prompt, GREEDY)
            for (source, target), (prompt, _) in zip(pairs, expected, strict=True)
        ]
        for each, (_, tokens) in zip(asked, expected, strict=True):
            answer = await each.answer()
            assert answer.tokens == [tokens]
            assert (answer.fetch_ms > 0) == (each.prefill is not each.decode)


async def test_choices_reports_and_single_tokens_in_place_equal_those_of_a_fleet(checkpoint: Path) -> None:
    prompt = prompt_ids(50)
    several = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, n=3)
    report = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async with fleet(checkpoint) as made:
        mixed, prefill, decode = await made.mixed(chunk_size=16), await made.prefill(), await made.decode()
        for params in (several, report, one):
            wanted = await made.workers.complete(prefill, decode, prompt, params)
            found = await made.workers.complete(mixed, mixed, prompt, params)
            assert found.tokens == wanted.tokens
            assert [token.token_id for token in found.prompt_logprobs] == [
                token.token_id for token in wanted.prompt_logprobs
            ]
            assert len(found.prompt_logprobs) == (len(prompt) if params is report else 0)
        replayed = await made.workers.complete(mixed, mixed, prompt, GREEDY, outputs=[5, 6])
        assert replayed.tokens == [
            (await made.workers.complete(prefill, decode, prompt, GREEDY, outputs=[5, 6])).tokens[0]
        ]


# Ends and faults, on an engine whose tokens are computed by hand.


class Gated(FakeEngine):
    """A fake engine whose passes with chunks and steps wait for a gate."""

    def __init__(self) -> None:
        super().__init__(page_size=4, pages=512, slots=4)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.fail = False

    def launch(self, chunks: Any = (), **more: Any) -> Any:
        if self.batch and not chunks and not self.gate.is_set():
            # Or the first request could end before the second one has come.
            time.sleep(0.025)
        if chunks and self.batch:
            self.entered.set()
            assert self.gate.wait(60)
            if self.fail:
                self.fail = False
                raise EngineError("told so by the test")
        return super().launch(chunks, **more)

    async def mixes(self) -> None:
        """Wait until such a pass waits."""
        assert await asyncio.to_thread(self.entered.wait, 60)


LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPT = [(7 * i) % 1000 for i in range(60)]


@contextlib.asynccontextmanager
async def mixing(**settings: Any) -> AsyncIterator[tuple[Gated, Workers, Worker, Request, Request]]:
    """A worker in a pass with a step of one request and a chunk of another; the gate opens at the end."""
    engine = Gated()
    async with mixed(engine, chunk_size=8, **settings) as (app, workers):
        worker = await workers.connect(app)
        first = await workers.ask(worker, worker, [5, 7], LONG)
        await worker.session.until(lambda: len(worker.session.tokens[first.name, 0]) > 1)
        second = await workers.ask(worker, worker, PROMPT, LONG)
        await engine.mixes()
        try:
            yield engine, workers, worker, first, second
        finally:
            engine.gate.set()
            for each in (first, second):
                each.reading.cancel()


def prefill_request(name: str, prompt: Sequence[int], **more: Any) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id=name,
        transfer_id=f"{name}/0/t",
        prompt_token_ids=prompt,
        choice_indexes=[0],
        sampling=sampling_to_proto(GREEDY),
        **more,
    )


async def start(worker: Worker, name: str) -> None:
    """Start a reservation in place."""
    source = export_to_proto(worker.export(f"{name}/0/t"))
    await worker.session.say(start=decode_pb2.Start(key=key(name), source=source))


async def until_free(engine: FakeEngine, but: int = 0) -> None:
    async with asyncio.timeout(WAIT_S):
        while engine.stats().used != but:  # noqa: ASYNC110 pages return on several threads
            await asyncio.sleep(0.01)


async def test_a_call_that_ends_in_a_mixed_pass_ends_its_reservation_and_no_other() -> None:
    async with mixing() as (engine, _, worker, first, second):
        aborted = watch_aborts(worker.app.prefill)
        second.call.cancel()
        await asyncio.wait_for(aborted.wait(), WAIT_S)
        engine.gate.set()
        await worker.session.until(lambda: second.name in worker.session.failures)
        failure = worker.session.failures.pop(second.name)
        assert failure.kind == decode_pb2.AttemptFailure.KIND_TRANSFER
        assert (await first.answer()).tokens == [expected_tokens([5, 7], 200)]
        await until_free(engine)


async def test_a_reservation_that_is_cancelled_in_a_mixed_pass_ends_its_prefill_and_no_other() -> None:
    async with mixing() as (engine, _, worker, first, second):
        await worker.session.cancel(second.name)
        await worker.session.barrier()
        engine.gate.set()
        with pytest.raises(grpc.aio.AioRpcError, match="ended with its reservation"):
            await asyncio.wait_for(second.reading, WAIT_S)
        assert (await first.answer()).tokens == [expected_tokens([5, 7], 200)]
        await until_free(engine)


async def test_the_end_of_a_session_ends_everything_of_it() -> None:
    async with mixing() as (engine, _, worker, first, second):
        worker.session.call.cancel()
        engine.gate.set()
        await asyncio.wait([first.reading, second.reading], timeout=WAIT_S)
        await until_free(engine)


async def test_a_mixed_pass_that_fails_fails_both_kinds_and_the_worker_goes_on() -> None:
    async with mixing() as (engine, workers, worker, first, second):
        engine.fail = True
        engine.gate.set()
        await worker.session.until(lambda: {first.name, second.name} <= set(worker.session.failures))
        with pytest.raises(grpc.aio.AioRpcError, match="told so by the test"):
            await asyncio.wait_for(second.reading, WAIT_S)
        kinds = [worker.session.failures.pop(each.name).kind for each in (first, second)]
        assert kinds == [decode_pb2.AttemptFailure.KIND_ENGINE, decode_pb2.AttemptFailure.KIND_TRANSFER]
        await until_free(engine)
        answer = await workers.complete(worker, worker, PROMPT, GREEDY)
        assert answer.tokens == [expected_tokens(PROMPT, TOKENS)]


async def test_a_mixed_pass_that_never_ends_fails_both_services_and_tells_routers() -> None:
    async with mixing(stall_s=0.1) as (_, _, worker, first, second):
        async with asyncio.timeout(WAIT_S):
            for service in (worker.app.decode, worker.app.prefill):
                with pytest.raises(EngineError, match="it hangs"):
                    await asyncio.shield(service.failed)
        await worker.session.until(lambda: {first.name, second.name} <= set(worker.session.failures))
        kinds = [worker.session.failures.pop(each.name).kind for each in (first, second)]
        assert kinds == [decode_pb2.AttemptFailure.KIND_ENGINE] * 2
        with pytest.raises(grpc.aio.AioRpcError, match="it hangs"):
            await asyncio.wait_for(read(worker.prefill.Prefill(prefill_request("x", range(9)))), WAIT_S)
        assert "failed" in (await worker.session.reserve("late", 4, 4)).reason


class Poisoned(FakeEngine):
    """A fake engine with NaN in the KV of the first token of `poisoned` requests, in passes with chunks and steps."""

    def __init__(self) -> None:
        super().__init__(page_size=4, pages=512, slots=4, step_time=0.001)
        self.poisoned: set[str] = set()
        self.mixed = threading.Event()

    def launch(self, chunks: Any = (), **more: Any) -> Any:
        handles = [each.handle for each in (*self.batch, *chunks)]
        poisoned = [handle for handle in handles if handle.owner in self.poisoned]
        if len(poisoned) == len(self.poisoned) and all(chunk.start for chunk in chunks):
            for handle in poisoned:
                self.memory.put(handle.pages, 0, b"\xff" * self.spec.kv_format.token_bytes)
            if chunks:
                self.mixed.set()
        return super().launch(chunks, **more)


async def test_nan_in_a_chunk_and_in_a_step_of_one_pass_fails_both_alone_and_leaves_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "CHUNK_S", 0.0)
    engine = Poisoned()
    async with mixed(engine, chunk_size=4) as (app, workers):
        worker = await workers.connect(app)
        prompts = {"good": [3, 1, 4], "step": [(3 * i) % 1000 for i in range(40)], "chunk": PROMPT}
        good = await workers.ask(worker, worker, prompts["good"], LONG)
        step = await workers.ask(worker, worker, prompts["step"], LONG)
        for each in (good, step):
            await worker.session.until(lambda each=each: len(worker.session.tokens[each.name, 0]) > 1)  # type: ignore[misc]
        assert engine.match_prefix(digests(engine, prompts["step"])) == 32
        chunk = await workers.ask(worker, worker, prompts["chunk"], LONG)
        engine.poisoned = {f"{step.name}/0", f"{chunk.name}/0"}
        await worker.session.until(lambda: {step.name, chunk.name} <= set(worker.session.failures))
        with pytest.raises(grpc.aio.AioRpcError, match="logits are not finite") as caught:
            await asyncio.wait_for(chunk.reading, WAIT_S)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert engine.mixed.is_set()
        kinds = [worker.session.failures.pop(each.name).kind for each in (step, chunk)]
        assert kinds == [decode_pb2.AttemptFailure.KIND_ENGINE, decode_pb2.AttemptFailure.KIND_TRANSFER]
        assert (await good.answer()).tokens == [expected_tokens(prompts["good"], 200)]
        await until_free(engine)
        assert [engine.match_prefix(digests(engine, prompts[name])) for name in ("step", "chunk")] == [0, 0]


async def test_stopping_in_a_mixed_pass_leaves_nothing() -> None:
    async with mixing() as (engine, *_):
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)


async def test_a_listener_that_can_t_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take a port while the model loads."""
    monkeypatch.setattr(baton.worker.start, "check_addresses", lambda _: None)
    before = asyncio.all_tasks()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"control: {address} is already in use"):
            async with run(MixedConfig(control=address), engine=FakeEngine()):
                pytest.fail("it has started")
    assert asyncio.all_tasks() == before
    assert not any(thread.name.startswith("mixed-engine") for thread in threading.enumerate())


async def test_a_drain_lets_both_kinds_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with mixing() as (engine, _, worker, first, second):
        assert (await worker.session.reserve("granted", 9, 1)).granted
        caplog.clear()
        draining = asyncio.create_task(worker.app.drain())
        await asyncio.sleep(0)
        refused = await worker.session.reserve("late", 4, 4)
        assert (refused.granted, refused.reason) == (False, "the worker is draining")
        with pytest.raises(grpc.aio.AioRpcError, match="the worker is draining"):
            await asyncio.wait_for(read(worker.prefill.Prefill(prefill_request("x", range(9)))), WAIT_S)
        # The prompt of a reservation that was granted before the drain.
        await start(worker, "granted")
        third = read(worker.prefill.Prefill(prefill_request("granted", range(9), in_place=True)))
        engine.gate.set()
        assert (await first.answer()).tokens == [expected_tokens([5, 7], 200)]
        assert (await second.answer()).tokens == [expected_tokens(PROMPT, 200)]
        assert (await asyncio.wait_for(third, WAIT_S))[-1].HasField("done")
        await asyncio.wait_for(draining, WAIT_S)
        assert [text for name, _, text in caplog.record_tuples if name == "baton.worker.start"] == ["drained"]


async def test_a_prompt_for_another_worker_gets_its_pages_at_once_or_is_refused() -> None:
    engine = FakeEngine(page_size=4, pages=16, slots=2)
    async with mixed(engine) as (app, workers):
        worker = await workers.connect(app)
        held = await worker.session.reserve("held", 40, 4)
        assert held.granted
        request = prefill_request("r", range(40))
        with pytest.raises(grpc.aio.AioRpcError, match="the pages for 40 tokens are not free") as refused:
            await asyncio.wait_for(read(worker.prefill.Prefill(request)), WAIT_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await worker.session.cancel("held")
        await worker.session.barrier()
        request = prefill_request("u", range(40))
        assert (await asyncio.wait_for(read(worker.prefill.Prefill(request)), WAIT_S))[-1].HasField("done")
        await worker.prefill.Abandon(
            prefill_pb2.AbandonRequest(transfer_id="u/0/t", incarnation=app.status.identity.incarnation)
        )


async def test_a_prompt_for_another_worker_leaves_what_is_set_aside_and_evicts_nothing_in_vain() -> None:
    """Half of the free pages are set aside for a reservation that waits; pages with cached blocks are free too."""
    engine = FakeEngine(page_size=4, pages=400, slots=4, block_size=4)
    cached = [(3 * index + 5) % 1000 for index in range(160)]
    async with mixed(engine) as (app, workers):
        worker = await workers.connect(app)
        assert (await worker.session.reserve("held", 800, 4)).granted
        await workers.complete(worker, worker, cached, dataclasses.replace(GREEDY, max_tokens=1))
        await until_free(engine, but=201)
        assert (await worker.session.reserve("first", 1200, 4)).waiting
        kept = engine.stats().cached
        assert kept == 40
        # Of 199 pages, 100 are set aside. The second prompt needs 120, and would share 40 of them.
        for name, prompt in (("large", range(700)), ("shares", [*cached, *range(320)])):
            with pytest.raises(grpc.aio.AioRpcError, match="are not free, or kept"):
                await asyncio.wait_for(read(worker.prefill.Prefill(prefill_request(name, prompt))), WAIT_S)
            assert engine.stats().cached == kept


async def test_a_second_call_for_a_prompt_in_place_is_refused_and_ends_nothing() -> None:
    async with mixing() as (engine, _, worker, _, second):
        request = prefill_request(second.name, PROMPT, in_place=True)
        with pytest.raises(grpc.aio.AioRpcError, match="was announced already"):
            await asyncio.wait_for(read(worker.prefill.Prefill(request)), WAIT_S)
        engine.gate.set()
        assert (await second.answer()).tokens == [expected_tokens(PROMPT, 200)]


@pytest.mark.parametrize("first_fails", [False, True])
async def test_prompts_in_place_that_come_together_compute_their_common_beginning_once(first_fails: bool) -> None:
    engine = FakeEngine(page_size=4, pages=512, slots=4, chunk_time=0.02)
    async with mixed(engine, chunk_size=20) as (app, workers):
        worker, before = await workers.connect(app), sample("baton_prefill_tokens_total", source="computed")
        prompts = [[*PROMPT, number] for number in range(4)]
        asked = [await workers.ask(worker, worker, prompt, GREEDY) for prompt in prompts]
        if first_fails:
            await worker.session.until(lambda: app.prefill.running_prompts > 0)
            await worker.session.cancel(asked[0].name)
            await asyncio.wait([asked[0].reading])
            del asked[0], prompts[0]
        answers = [await each.answer() for each in asked]
        assert [each.tokens for each in answers] == [[expected_tokens(prompt, TOKENS)] for prompt in prompts]
        assert sorted(each.cached for each in answers)[-2:] == [48, 48]
        computed = sample("baton_prefill_tokens_total", source="computed") - before
        assert computed <= len(PROMPT) + 1 + 3 * (len(PROMPT) + 1 - 48) + (20 if first_fails else 0)


async def test_a_prompt_in_place_goes_on_when_another_one_has_loaded_their_common_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one finds nothing in the cache, and no pass ends meanwhile."""
    fetch_all(monkeypatch)
    cache, gate, loading, deferred = MemoryPrefixCache(), threading.Event(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(baton.worker.start, "open_worker_cache", lambda *_, **__: cache)
    fetch, should_defer = cache.fetch, PrefixLoader.should_defer

    async def fetch_slowly(wanted: Sequence[bytes]) -> Any:
        monkeypatch.setattr(cache, "lookup", find_nothing)
        await loading.wait()
        return await fetch(wanted)

    async def find_nothing(_: Sequence[bytes]) -> Hits:
        return Hits()

    def watched(*args: Any) -> bool:
        if waits := should_defer(*args):
            deferred.set()
        return waits

    monkeypatch.setattr(PrefixLoader, "should_defer", watched)
    prompts = [[*PROMPT, number] for number in range(2)]
    async with mixed() as (app, workers):
        worker = await workers.connect(app)
        await workers.complete(worker, worker, PROMPT, GREEDY)
        await until_free(app.engine)
        app.engine.drop_cached()
        monkeypatch.setattr(cache, "fetch", fetch_slowly)
        watch_passes(app.engine, gate)
        try:
            asked = [await workers.ask(worker, worker, prompts[0], GREEDY)]
            async with asyncio.timeout(WAIT_S):
                while cache.lookup is not find_nothing:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                asked.append(await workers.ask(worker, worker, prompts[1], GREEDY))
                await deferred.wait()
                loading.set()
                while app.prefill.load_report().pending_tokens != 2 * (len(PROMPT) + 1 - 48):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            loading.set()
            gate.set()
        answers = [await each.answer() for each in asked]
        assert [each.tokens for each in answers] == [[expected_tokens(prompt, TOKENS)] for prompt in prompts]
        assert [each.cached for each in answers] == [48, 48]


async def test_a_prompt_in_place_does_not_wait_for_a_load_of_blocks_that_are_in_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third prompt, which reads no cache, computes them while the first one loads."""
    fetch_all(monkeypatch)
    cache, loading, held = MemoryPrefixCache(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(baton.worker.start, "open_worker_cache", lambda *_, **__: cache)
    fetch = cache.fetch

    async def fetch_slowly(wanted: Sequence[bytes]) -> Any:
        monkeypatch.setattr(cache, "lookup", find_nothing)
        loading.set()
        await held.wait()
        return await fetch(wanted)

    async def find_nothing(_: Sequence[bytes]) -> Hits:
        return Hits()

    prompts = [[*PROMPT, number] for number in range(3)]
    async with mixed() as (app, workers):
        worker = await workers.connect(app)
        await workers.complete(worker, worker, PROMPT, GREEDY)
        await until_free(app.engine)
        app.engine.drop_cached()
        monkeypatch.setattr(cache, "fetch", fetch_slowly)
        try:
            first = await workers.ask(worker, worker, prompts[0], GREEDY)
            await asyncio.wait_for(loading.wait(), WAIT_S)
            second = await workers.ask(worker, worker, prompts[1], GREEDY)
            third = prefill_request("third", prompts[2], cache=cache_policy_to_proto(CachePolicy.WRITE))
            await asyncio.wait_for(read(worker.prefill.Prefill(third)), WAIT_S)
            answer = await asyncio.wait_for(second.answer(), WAIT_S)
            assert (answer.tokens, answer.cached) == ([expected_tokens(prompts[1], TOKENS)], 48)
        finally:
            held.set()
        assert (await first.answer()).tokens == [expected_tokens(prompts[0], TOKENS)]
        incarnation = app.status.identity.incarnation
        await worker.prefill.Abandon(prefill_pb2.AbandonRequest(transfer_id="third/0/t", incarnation=incarnation))


async def test_a_long_prompt_is_answered_while_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with it, so its job must not wait."""
    monkeypatch.setattr(passes, "CHUNK_S", 0.0)
    monkeypatch.setattr("prefill_svc.prefix.SAVE_WAIT_S", 2 * WAIT_S)
    cache, saving, stored = MemoryPrefixCache(), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(baton.worker.start, "open_worker_cache", lambda *_, **__: cache)
    save = cache.save

    async def save_slowly(*args: Any) -> int:
        saving.set()
        await stored.wait()
        return await save(*args)

    monkeypatch.setattr(cache, "save", save_slowly)
    engine = FakeEngine(page_size=4, pages=512, slots=4, chunk_time=0.05)
    async with mixed(engine, chunk_size=8, long_prompt_chunks=3) as (app, workers):
        worker = await workers.connect(app)
        try:
            answer = await workers.complete(worker, worker, PROMPT, GREEDY)
            assert answer.tokens == [expected_tokens(PROMPT, TOKENS)]
            assert saving.is_set()
        finally:
            stored.set()
        await asyncio.wait_for(app.wait_finished(), WAIT_S)
        assert len(cache.blocks) == (len(PROMPT) + TOKENS - 1) // 16


async def test_a_second_start_with_the_same_transfer_fails_alone() -> None:
    async with mixing() as (engine, _, worker, _, second):
        assert (await worker.session.reserve("late", len(PROMPT), 4)).granted
        source = export_to_proto(worker.export(f"{second.name}/0/t"))
        await worker.session.say(start=decode_pb2.Start(key=key("late"), source=source))
        await worker.session.until(lambda: "late" in worker.session.failures)
        failure = worker.session.failures.pop("late")
        assert failure.kind == decode_pb2.AttemptFailure.KIND_TRANSFER
        assert "was offered before" in failure.message
        engine.gate.set()
        assert (await second.answer()).tokens == [expected_tokens(PROMPT, 200)]


async def test_a_drain_waits_for_the_blocks_of_a_prompt_whose_attempt_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, copy = MemoryPrefixCache(), asyncio.Event()
    monkeypatch.setattr(baton.worker.start, "open_worker_cache", lambda *_, **__: cache)
    find = PrefixLoader.unsaved_digests

    async def slowly(self: PrefixLoader, job: Any) -> Sequence[bytes]:
        await copy.wait()
        return await find(self, job)

    select = cache.select_writes

    async def select_slowly(*args: Any) -> Any:
        await asyncio.sleep(0.2)
        return await select(*args)

    monkeypatch.setattr(PrefixLoader, "unsaved_digests", slowly)
    monkeypatch.setattr(cache, "select_writes", select_slowly)
    async with mixed() as (app, workers):
        worker = await workers.connect(app)
        await workers.complete(worker, worker, PROMPT, dataclasses.replace(GREEDY, max_tokens=1))
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(0.1)
        assert app.decode.idle
        copy.set()
        await asyncio.wait_for(draining, WAIT_S)
        assert len(cache.blocks) == len(PROMPT) // 16


async def test_pinned_tokens_of_another_prompt_are_not_used() -> None:
    """The digests of a reservation come from a router; prefill has its own."""
    async with mixed() as (app, workers):
        worker = await workers.connect(app)
        await workers.complete(worker, worker, PROMPT, GREEDY)
        wrong = b"".join(digests(app.engine, PROMPT))
        result = await worker.session.reserve("x", 60, 4, prefix_digests=wrong)
        assert result.cached_tokens > 0
        call = worker.prefill.Prefill(prefill_request("x", range(60), in_place=True))
        await start(worker, "x")
        with pytest.raises(grpc.aio.AioRpcError, match="pinned tokens are not those of the prompt"):
            await asyncio.wait_for(read(call), WAIT_S)
        await worker.session.until(lambda: "x" in worker.session.failures)
        assert worker.session.failures["x"].kind == decode_pb2.AttemptFailure.KIND_TRANSFER


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_ends_leaves_nothing(seed: int) -> None:
    """Requests in place and for others, each of which ends in some way at some moment."""
    draw = random.Random(seed)
    engine = FakeEngine(page_size=4, pages=256, slots=3, chunk_time=0.002, step_time=0.001)
    async with mixed(engine, chunk_size=8, lease_s=0.1, start_timeout_s=1.0) as (app, workers):
        workers_here = [await workers.connect(app) for _ in range(2)]

        async def one(number: int) -> None:
            worker, name = draw.choice(workers_here), f"storm{number}"
            prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 60))]
            in_place, how = draw.random() < 0.7, draw.choice(["whole", "call", "cancel", "abandon", "nothing"])
            await asyncio.sleep(draw.random() * 0.3)
            worker.session.tokens[name, 0] = [-1]
            result = await worker.session.reserve(name, len(prompt), GREEDY.max_tokens or 1)
            if in_place and not result.granted:
                await worker.session.until(lambda: worker.session.reserved[name].granted)
            if in_place and draw.random() < 0.9:
                await start(worker, name)
            call = worker.prefill.Prefill(prefill_request(name, prompt, in_place=in_place))
            reading = asyncio.create_task(read(call))
            await asyncio.sleep(draw.random() * 0.1)
            if how == "call":
                call.cancel()
            elif how == "cancel":
                await worker.session.cancel(name)
            elif how == "abandon":
                incarnation = app.status.identity.incarnation
                await worker.prefill.Abandon(
                    prefill_pb2.AbandonRequest(transfer_id=f"{name}/0/t", incarnation=incarnation)
                )
            await asyncio.gather(reading, return_exceptions=True)
            if how != "whole":
                # As a router does, which may have ended the call before the worker knew of it.
                await worker.session.cancel(name)

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(one(number) for number in range(40)))
            workers_here[0].session.call.cancel()
            await until_free(engine)
        assert (await app.audit.ledger()).violation == ""
        assert (await app.audit.ledger()).entries == ()
        assert app.prefill.idle
        assert app.decode.idle
        worker = workers_here[1]
        assert (await workers.complete(worker, worker, PROMPT, GREEDY)).tokens == [expected_tokens(PROMPT, TOKENS)]


async def test_a_prompt_whose_reservation_is_not_started_ends_soon() -> None:
    async with mixed(start_timeout_s=0.2) as (app, workers):
        worker = await workers.connect(app)
        with pytest.raises(grpc.aio.AioRpcError, match=r"its reservation was not started in 0\.2 s"):
            await asyncio.wait_for(read(worker.prefill.Prefill(prefill_request("x", range(9), in_place=True))), WAIT_S)


async def test_the_blocks_of_a_prompt_in_place_go_to_the_cache_and_are_loaded_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch_all(monkeypatch)
    cache = MemoryPrefixCache()
    monkeypatch.setattr(baton.worker.start, "open_worker_cache", lambda *_, **__: cache)
    async with mixed() as (app, workers):
        worker = await workers.connect(app)
        first = await workers.complete(worker, worker, PROMPT, GREEDY)
        await until_free(app.engine)
        # 60 tokens of the prompt, and all outputs but the last, whose KV was never computed.
        assert len(cache.blocks) == (60 + TOKENS - 1) // 16
        app.engine.drop_cached()
        again = await workers.complete(worker, worker, [*PROMPT, *first.tokens[0]], GREEDY)
        assert again.tokens == [expected_tokens([*PROMPT, *first.tokens[0]], TOKENS)]
        assert (again.pinned, again.cached) == (0, (60 + TOKENS - 1) // 16 * 16)


async def test_status_and_gauges_have_the_load_of_both_roles() -> None:
    async with mixing() as (_, _, worker, _, _):
        load = load_report(worker.app.prefill, worker.app.decode)
        assert worker.app.status.identity.role is WorkerRole.MIXED
        assert (load.slots_used, load.requests_without_token) == (1, 1)
        assert 0 < load.pending_tokens <= len(PROMPT)
        assert load.tokens_per_second >= 0
        set_gauges(worker.app.prefill, worker.app.decode)
        assert (count(RUNNING), count(WAITING)) == (1, 1), (
            "a sequence in the batch, and a prompt before its first chunk"
        )
