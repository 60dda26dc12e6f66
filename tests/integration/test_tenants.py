"""Tenants of one router: fair places in the queue, caches of their own, and keys that come and go."""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import keys
from baton.pb import inference_pb2, prefill_pb2
from baton.rpc.channel import control_channel
from baton.tokenizer import Tokenizer
from tests.integration.router_rig import Answer, RouterRig, refused, request, router_rig, whole
from tests.integration.router_stubs import StubDecode, StubPrefill, letter

SECRET = "a secret of the tests"
FLOOD = 20
SEATS = 2
SETTINGS: dict[str, Any] = {"fleet_secret": SECRET, "prefill_limit": SEATS, "queue_capacity": FLOOD}


class Clients:
    """Callers with keys of their own; a request's prompt tells whose it is."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self.keys = {tenant: keys.add(self.file, tenant=tenant) for tenant in ("flood", "other")}

    def metadata(self, tenant: str) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {self.keys[tenant]}"),)

    def call(self, b: RouterRig, tenant: str, prompt: str) -> grpc.aio.UnaryStreamCall:
        return b.client.Generate(request(prompt, max_tokens=1), metadata=self.metadata(tenant), timeout=60)

    def tokenize(self, b: RouterRig, tenant: str, text: str) -> grpc.aio.UnaryUnaryCall:
        return b.client.Tokenize(inference_pb2.TokenizeRequest(text=text), metadata=self.metadata(tenant), timeout=60)

    def detokenize(self, b: RouterRig, tenant: str, ids: Sequence[int]) -> grpc.aio.UnaryUnaryCall:
        return b.client.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=ids), metadata=self.metadata(tenant), timeout=60
        )


async def test_one_tenants_flood_leaves_anothers_place_in_the_queue(tmp_path: Path) -> None:
    """One tenant has all seats and fills the queue; another's first request is served at once, beyond those seats, and
    then both take turns."""
    clients = Clients(tmp_path)
    async with router_rig(tmp_path, api_keys=str(clients.file), **SETTINGS) as b:
        served, gate = b.prefill[0].requests, asyncio.Semaphore(0)

        async def one_by_one(_: prefill_pb2.PrefillRequest) -> None:
            await gate.acquire()

        b.prefill[0].script = one_by_one
        answers = [asyncio.create_task(whole(clients.call(b, "flood", "ffff"))) for _ in range(SEATS)]
        await b.prefill[0].log.until(lambda: len(served) == SEATS)
        answers += await filled(clients, b, "flood", "ffff", FLOOD)
        # A full share is refused before the rest is looked at, and only to whom it belongs.
        assert (await refused(clients.call(b, "flood", ""))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await refused(clients.call(b, "other", ""))).code() is grpc.StatusCode.INVALID_ARGUMENT
        answers.append(asyncio.create_task(whole(clients.call(b, "other", "oo"))))
        await b.prefill[0].log.until(lambda: len(served) == SEATS + 1)
        answers += await filled(clients, b, "other", "oo", FLOOD // 2)
        # Nobody gets the seat that was added.
        gate.release()
        for place in range(SEATS + 1, SEATS + 1 + FLOOD):
            gate.release()
            await b.prefill[0].log.until(lambda place=place: len(served) > place)  # type: ignore[misc]
        order = ["flood" if len(each.prompt_token_ids) == len("<ffff") else "other" for each in served[SEATS + 1 :]]
        assert all(set(order[i : i + 2]) == {"flood", "other"} for i in range(0, FLOOD, 2)), order
        for _ in range(2 * FLOOD):
            gate.release()
        assert all(answer.text() == "a" for answer in await asyncio.gather(*answers))


async def filled(clients: Clients, b: RouterRig, tenant: str, prompt: str, share: int) -> list[asyncio.Task[Answer]]:
    """The tenant's requests, as many as may wait; one more was refused, so that all the others do wait."""
    calls = [asyncio.create_task(whole(clients.call(b, tenant, prompt))) for _ in range(share + 1)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    (refusal,) = [task.exception() for task in done]
    assert isinstance(refusal, grpc.aio.AioRpcError)
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{share} requests are waiting, the limit is {share}" in (refusal.details() or "")
    return list(waiting)


def long_texts(stub: StubPrefill | StubDecode) -> None:
    stub.identify(max_model_len=2**21)


@pytest.mark.parametrize("max_streams", [1, None])
async def test_tenants_share_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_streams: int | None) -> None:
    """16 large texts: with a limit all but one are refused at once, without they wait; another is served beside
    those that are being tokenized, which end only then."""
    begun, gate = [], threading.Event()
    encode = Tokenizer.encode

    def gated(self: Tokenizer, text: str, **settings: Any) -> list[int]:
        if text.startswith("flood"):
            begun.append(text)
            gate.wait(60)
        return encode(self, text, **settings)

    monkeypatch.setattr(Tokenizer, "encode", gated)
    clients = Clients(tmp_path)
    clients.keys["flood"] = keys.add(clients.file, tenant="flood2", max_streams=max_streams)
    text = "flood".ljust(100_000)
    async with router_rig(tmp_path, change=long_texts, api_keys=str(clients.file), **SETTINGS) as b:
        try:
            flood = [asyncio.create_task(answered(clients.tokenize(b, "flood", text))) for _ in range(16)]
            if max_streams:
                # All but the one that is served.
                codes = Counter([await each for each in itertools.islice(asyncio.as_completed(flood), 15)])
                assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: 15}
                refusal = await answered(clients.detokenize(b, "flood", [letter(0)]))
                assert refusal is grpc.StatusCode.RESOURCE_EXHAUSTED
            ids = (await clients.tokenize(b, "other", "o" * 10_000)).token_ids
            assert len(ids) == 10_001
            assert (await clients.detokenize(b, "other", ids)).text == "o" * 10_000
            # Tokenized, and then hashed.
            assert (await whole(clients.call(b, "other", "o" * 10_000))).text() == "a"
            assert 1 <= len(begun) <= (1 if max_streams else 3)
        finally:
            gate.set()
        codes = Counter(await asyncio.gather(*flood))
        assert codes[grpc.StatusCode.OK] == (1 if max_streams else 16)


async def answered(call: Any) -> grpc.StatusCode:
    """End of a call; refusals say when to try again."""
    code = await call.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert (await call.details()) == "max_streams: 1 streams of tenant flood2 are open, 1 are allowed"
        assert float(dict(await call.trailing_metadata())["retry-after"]) > 0
    return code


async def test_a_call_counts_before_its_message_is_received(tmp_path: Path) -> None:
    """Thousands of calls with large messages would otherwise be one tenant's to send, whatever its limit."""
    file = tmp_path / "keys.json"
    metadata = (("authorization", f"Bearer {keys.add(file, tenant='a', max_streams=1)}"),)
    async with router_rig(tmp_path, api_keys=str(file), **SETTINGS) as b, control_channel(b.app.address) as channel:
        # A stream of messages, on the wire the same call: its message does not come.
        method = "/baton.v1.Inference/Generate"
        call = channel.stream_stream(method)(metadata=metadata, timeout=60)
        streams = b.app._door._api_keys._streams
        async with asyncio.timeout(60):
            while not streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        error = await refused(b.client.Generate(request("x", max_tokens=1), metadata=metadata, timeout=60))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_streams: 1 streams of tenant a are open, 1 are allowed" in (error.details() or "")
        call.cancel()
        async with asyncio.timeout(60):
            while streams:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await whole(b.client.Generate(request("x", max_tokens=1), metadata=metadata, timeout=60))


async def test_no_drain_waits_for_a_message_that_does_not_come(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as b, control_channel(b.app.address) as channel:
        calls = [channel.stream_stream(f"/baton.v1.Inference/{name}")(timeout=600) for name in ("Generate", "Tokenize")]
        async with asyncio.timeout(60):
            while b.app._door._api_keys._streams[""] < len(calls):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await b.app._door.drain()
        for call in calls:
            call.cancel()
