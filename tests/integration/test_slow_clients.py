"""Clients that read late, or never: what they are sent, and what they cost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

import router.serving.front_door
from baton import keys
from baton.pb import admin_pb2, admin_pb2_grpc, decode_pb2, inference_pb2, inference_pb2_grpc, prefill_pb2
from baton.telemetry.metrics import CLIENTS_STALLED
from tests.integration.router_rig import RouterRig, refused, request, router_rig, whole
from tests.integration.router_stubs import LENGTH, DownStream, Script, StubDecode, StubPrefill, output
from tests.metrics import count

Metadata = Sequence[tuple[str, str | bytes]]

TOKENS = 24_000
"""With 20 alternatives each they are more than 5 MB on the wire; a client accepts messages of 4 MiB by default."""

AT_ONCE = 1000
TOP = [inference_pb2.TokenLogprob(token_id=250, logprob=-1.5)] * 20


async def much(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
    """All tokens as fast as they go, with the most alternatives."""
    await say(down, start, LENGTH)


async def endless(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
    """The same, and then nothing more, without an end."""
    await say(down, start, 0)


async def say(down: DownStream, start: decode_pb2.Start, finish: int) -> None:
    token = inference_pb2.TokenInfo(token_id=97, logprob=-1.5, top=TOP)
    for first in range(1, TOKENS, AT_ONCE):
        count = min(AT_ONCE, TOKENS - first)
        outputs = output(start.key, 0, first, [], finish if first + count == TOKENS else 0)
        outputs.tokens.extend([token] * count)
        down.messages.put_nowait(decode_pb2.SessionDown(outputs=[outputs]))
        await asyncio.sleep(0)


def scripted(script: Script) -> Callable[[StubPrefill | StubDecode], None]:
    """Workers that serve so many tokens."""

    def change(stub: StubPrefill | StubDecode) -> None:
        stub.identify(max_model_len=2 * TOKENS)
        if isinstance(stub, StubDecode):
            stub.script = script

    return change


@contextlib.asynccontextmanager
async def unread(b: RouterRig, **settings: Any) -> AsyncIterator[Any]:
    """A stream of a client with gRPC's own limits, and without a deadline, that has read nothing."""
    async with grpc.aio.insecure_channel(b.app.address) as channel:
        client = inference_pb2_grpc.InferenceStub(channel)
        call = client.Generate(request("hi", max_tokens=TOKENS, logprobs=20), **settings)
        yield call
        call.cancel()


def patient(b: RouterRig) -> None:
    """From now on no client is ended for being slow, so that this machine may be."""
    b.app._door._stalls.limit_s = 600


async def generated(b: RouterRig) -> None:
    """Return when no attempt lives any more."""
    admin = admin_pb2_grpc.AdminStub(b.channel)
    await b.decode[0].log.until(lambda: bool(b.decode[0].starts))
    alive = True
    async with asyncio.timeout(60):
        while alive:
            alive = bool((await admin.Ledger(admin_pb2.LedgerRequest())).entries)


async def test_tokens_that_a_slow_client_has_not_read_come_in_messages_that_it_accepts(tmp_path: Path) -> None:
    async with router_rig(tmp_path, change=scripted(much)) as b, unread(b) as call:
        await generated(b)
        answer = await whole(call)
    assert len(answer.tokens()) == TOKENS
    assert answer.usage.completion_tokens == TOKENS
    assert max(event.ByteSize() for event in answer.events) <= 64 << 10


async def test_a_client_that_never_reads_is_ended_and_gives_back_all(tmp_path: Path) -> None:
    """Its request is cancelled and its place among its tenant's streams is free again; what it reads then says why."""
    file = tmp_path / "keys.json"
    metadata = (("authorization", f"Bearer {keys.add(file, tenant='a', max_streams=1)}"),)
    async with router_rig(tmp_path, change=scripted(endless), client_stall_s=0.5, api_keys=str(file)) as b:
        stalled = count(CLIENTS_STALLED)
        async with unread(b, metadata=metadata) as call:
            await b.decode[0].log.until(lambda: bool(b.decode[0].cancels))
            patient(b)
            answer = await whole(b.client.Generate(request("hi", max_tokens=1), metadata=metadata, timeout=60))
            assert answer.text() == "a"
            assert count(CLIENTS_STALLED) == stalled + 1
            error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "client_stall_s: the client took none of its waiting output for 0.5 s"


LONG = 300_000
UNARY = {
    "Tokenize": (inference_pb2.TokenizeRequest(text="a" * LONG), inference_pb2.TokenizeResponse),
    "Detokenize": (inference_pb2.DetokenizeRequest(token_ids=[97] * LONG), inference_pb2.DetokenizeResponse),
}


@contextlib.asynccontextmanager
async def unread_answer(b: RouterRig, method: str, metadata: Metadata) -> AsyncIterator[grpc.aio.UnaryStreamCall]:
    """A unary call whose answer is on its way, and whose client has read none of it."""
    message, response = UNARY[method]
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10)]
    async with grpc.aio.insecure_channel(b.app.address, options=options) as channel:
        # To the server it is the same as a unary call; only this kind leaves it to the test when to read.
        path = f"/baton.v1.Inference/{method}"
        ask = channel.unary_stream(path, type(message).SerializeToString, response.FromString)
        call = ask(message, metadata=metadata)
        await call.initial_metadata()
        yield call
        call.cancel()


def long_texts(stub: StubPrefill | StubDecode) -> None:
    stub.identify(max_model_len=2 * LONG)


@pytest.mark.parametrize("method", UNARY)
async def test_an_unread_answer_counts_for_its_tenant_until_it_is_read(tmp_path: Path, method: str) -> None:
    file = tmp_path / "keys.json"
    metadata = (("authorization", f"Bearer {keys.add(file, tenant='a', max_streams=1)}"),)
    message, _ = UNARY[method]
    async with router_rig(tmp_path, change=long_texts, client_stall_s=600, api_keys=str(file)) as b:
        unary = getattr(b.client, method)
        async with unread_answer(b, method, metadata) as call:
            with pytest.raises(grpc.aio.AioRpcError, match="max_streams: 1 streams of tenant a are open") as refusal:
                await unary(message, metadata=metadata, timeout=60)
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "retry-after" in dict(refusal.value.trailing_metadata())
            read = await call.read()
            assert await call.read() is grpc.aio.EOF
        assert await unary(message, metadata=metadata, timeout=60) == read


@pytest.mark.parametrize("method", UNARY)
async def test_a_call_that_is_never_read_is_ended(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = asyncio.Event()
    monkeypatch.setattr(router.serving.front_door, "CLIENTS_STALLED", Mock(inc=stalled.set))
    file = tmp_path / "keys.json"
    metadata = (("authorization", f"Bearer {keys.add(file, tenant='a', max_streams=1)}"),)
    async with (
        router_rig(tmp_path, change=long_texts, client_stall_s=0.5, api_keys=str(file)) as b,
        unread_answer(b, method, metadata) as call,
        asyncio.timeout(60),
    ):
        await stalled.wait()
        patient(b)
        await getattr(b.client, method)(UNARY[method][0], metadata=metadata)
        error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "client_stall_s: the client took none of its waiting output for 0.5 s"


async def test_a_drain_does_not_wait_for_who_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.serving.front_door, "DRAIN_LIMIT_S", 0.2)
    async with router_rig(tmp_path, change=scripted(much), drain_s=600, client_stall_s=600) as b, unread(b) as call:
        await generated(b)
        async with asyncio.timeout(60):
            await b.app.drain()
        assert (await refused(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
