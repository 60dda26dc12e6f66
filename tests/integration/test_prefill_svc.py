"""The prefill service over real gRPC, on an engine whose tokens are computable by hand."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from baton.engine.fake import PREFILL_LOGPROB, PROMPT_LOGPROB, FakeEngine, expected_tokens
from baton.pb import inference_pb2, prefill_pb2
from baton.request import SamplingParams
from baton.transfer.export import Export
from baton.transfer.wire import KvSlice
from tests.prefill import GREEDY, PROMPT, Gate, decode, decoder, gated, serving, status_of, watch_aborts


@pytest.mark.parametrize("chunk", [0, 1, 7, 16, 64])
async def test_first_token(chunk: int) -> None:
    async with serving(chunk_size=chunk) as client:
        (first,) = (await client.done()).first_tokens
        assert first.token.token_id == expected_tokens(PROMPT, 1)[0]
        assert first.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("pages", [(16, 16), (16, 256), (256, 16), (7, 5)])
async def test_kv_is_handed_over_while_and_after_it_is_computed(pages: tuple[int, int]) -> None:
    async with serving(FakeEngine(page_size=pages[0]), chunk_size=9) as client:
        with decoder(pages[1]) as engine:
            for late in (False, True):
                transfer_id = f"t{late}"
                handle = engine.reserve("r", 120)
                pulling = asyncio.create_task(client.fetch(engine, handle, transfer_id, 100))
                if late:
                    pulling.cancel()
                    await asyncio.wait([pulling])
                    transfer_id += "-again"
                await client.done(transfer_id=transfer_id)
                if late:
                    pulling = asyncio.create_task(client.fetch(engine, handle, transfer_id, 100))
                handoff = await pulling
                assert decode(engine, handle, handoff, 5) == expected_tokens(PROMPT, 6)
            await client.pages_back()


@pytest.mark.parametrize(("in_host", "first"), [(False, 500), (True, 900)])
async def test_chunks_hide_copies_for_a_prompt_that_got_pages_in_host_memory(in_host: bool, first: int) -> None:
    ends = []

    class Watching(FakeEngine):
        def launch(self, chunks: Any = (), **kwargs: Any) -> Any:
            ends.append(chunks[0].end)
            return super().launch(chunks, **kwargs)

    # The prompt needs 94 pages, and the device has 100 or 60.
    engine = Watching(pages=200, host_pages=140 if in_host else 100, min_overlap_chunk=900)
    async with serving(engine) as client:
        await client.done([1] * 1_500)
    assert ends[0] == first
    assert ends[-1] == 1_500


async def test_a_replay_continues_where_the_stream_broke() -> None:
    tokens = expected_tokens(PROMPT, 6)
    async with serving(chunk_size=16) as client:
        with decoder() as engine:
            handle = engine.reserve("r", 120)
            pulling = asyncio.create_task(client.fetch(engine, handle, "t", 103))
            done = await client.done(output=tokens[:3], transfer_id="t")
            assert done.first_tokens[0].token.token_id == tokens[3]
            handoff = await pulling
            assert (list(handoff.prompt_ids), list(handoff.output_ids)) == (PROMPT, tokens[:3])
            assert decode(engine, handle, handoff, 2) == tokens


async def test_choices_are_sampled_from_one_prefill() -> None:
    params = SamplingParams(max_tokens=8, seed=3, n=4, logprobs=2)
    async with serving() as client:
        done = await client.done(params=params, choices=[0, 2, 3])
    assert [first.choice_index for first in done.first_tokens] == [0, 2, 3]
    for first in done.first_tokens:
        expected = expected_tokens(PROMPT, 1, params=params, choice_index=first.choice_index)
        assert first.token.token_id == expected[0]
        assert first.token.logprob == PREFILL_LOGPROB
        assert len(first.token.top) == 2


async def test_finish_reasons_of_the_first_token() -> None:
    token = expected_tokens(PROMPT, 1)[0]
    cases = [
        (SamplingParams(max_tokens=1, temperature=0.0), inference_pb2.FINISH_REASON_LENGTH),
        (SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(token,)), inference_pb2.FINISH_REASON_STOP),
        (GREEDY, inference_pb2.FINISH_REASON_UNSPECIFIED),
    ]
    async with serving() as client:
        for params, reason in cases:
            assert (await client.done(params=params)).first_tokens[0].finish_reason == reason
    async with serving(FakeEngine(eos_token_ids=frozenset({token}))) as client:
        assert (await client.done()).first_tokens[0].finish_reason == inference_pb2.FINISH_REASON_STOP
        last = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        done = await client.done(params=last, output=[1, 2, 3])
        assert done.first_tokens[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("output", [(), (5, 6)])
async def test_prompt_logprobs_cover_the_prompt(output: tuple[int, ...], count: int) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=1)
    async with serving(chunk_size=7) as client:
        report = await client.report(PROMPT[:count], params=params, output=output)
    assert [token.token_id for token in report] == PROMPT[:count]
    assert not report[0].HasField("logprob")
    assert [token.logprob for token in report[1:]] == [PROMPT_LOGPROB] * (count - 1)


async def test_a_prompt_waits_for_pages_that_an_export_holds() -> None:
    async with serving(FakeEngine(pages=8)) as client:
        await client.done(PROMPT, transfer_id="t")
        waiting = asyncio.create_task(client.done(PROMPT))
        small = await client.done(PROMPT[:10])
        assert small.first_tokens, "a smaller one goes by"
        assert not waiting.done()
        with decoder() as engine:
            handle = engine.reserve("r", 100)
            await client.fetch(engine, handle, "t", 100)
            engine.free(handle)
        assert (await waiting).first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_too_many_waiting_are_refused_with_a_delay() -> None:
    async with gated(max_waiting=2) as (client, gate):
        calls = [asyncio.create_task(client.done()) for _ in range(2)]
        await gate.reached()
        await client.status(lambda status: status.load.requests_without_token == 2)
        refused = client.call()
        code, details = await status_of(refused)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 prompts are waiting, the limit is 2" in details
        assert float(dict(await refused.trailing_metadata())["retry-after"]) > 0
        gate.open()
        await asyncio.gather(*calls)


async def test_too_long_prompts_are_refused_with_both_numbers() -> None:
    async with serving(FakeEngine(pages=6, max_model_len=200)) as client:
        code, details = await status_of(client.call())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "need 7 pages" in details
        assert "has 6, which hold 96 tokens (--kv-memory), got 100" in details
        code, details = await status_of(client.call(range(200)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("prompt_token_ids: ")
        assert details.count("200") == 2
        await client.done(PROMPT[:96])


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [1, 1000]}, "prompt_token_ids[1]"),
        ({"output": [1000]}, "output_token_ids[0]"),
        ({"output": [1] * 8}, "output_token_ids"),
        ({"choices": []}, "choice_indexes"),
        ({"choices": [1]}, "choice_indexes"),
        ({"choices": [0, 0]}, "choice_indexes"),
        ({"salt": b"x" * 65}, "cache_salt"),
        ({"params": SamplingParams(temperature=0.0)}, "sampling.max_tokens"),
        ({"params": SamplingParams(max_tokens=8)}, "sampling.seed"),
        ({"params": SamplingParams(max_tokens=8, seed=1, stop_token_ids=(1000,))}, "stop_token_ids[0]"),
    ],
)
async def test_bad_fields_are_named(wrong: dict[str, Any], field: str) -> None:
    async with serving() as client:
        code, details = await status_of(client.call(**wrong))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"{field}: ")
        assert (await client.done()).first_tokens


async def test_a_request_without_an_id_is_refused() -> None:
    async with serving() as client:
        code, details = await status_of(client.prefill.Prefill(prefill_pb2.PrefillRequest()))
        assert (code, details.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


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
        aborted = watch_aborts(client.app.worker)
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

    async def watched(self: Export, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(frames(self, kv_slice)) as stream:
                async for frame in stream:
                    yield frame
        finally:
            ended[self.transfer_id].set_result(None)

    monkeypatch.setattr(Export, "frames", watched)
    await asyncio.gather(*(gone_consumer(number, ended[number.name]) for number in GONE))
