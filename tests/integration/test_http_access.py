"""The HTTP API: who gets in, and clients that do not read."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton import keys
from baton.pb import decode_pb2, prefill_pb2
from baton.rpc.tls import SETTINGS, Tls
from baton.telemetry.metrics import CLIENTS_STALLED
from router.serving.http import HttpApi, listen
from router.serving.threads import TenantThreads
from tests.certificates import SECRET, copied, fleet, settings
from tests.integration.router_rig import RouterRig, router_rig
from tests.integration.router_stubs import DownStream, continue_by_hand, letter, text
from tests.integration.test_slow_clients import TOKENS, endless, generated, much, scripted
from tests.metrics import count
from tests.unit.router.serving.test_front_door import FakeRequestRunner, door_of

HTTP = {"http": "127.0.0.1:0"}
ONE = {"prompt": "hi", "max_tokens": 1}


@asynccontextmanager
async def client(b: RouterRig, *, verify: Any = True, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    base = f"{'https' if verify is not True else 'http'}://{b.app.http_address}"
    async with httpx2.AsyncClient(base_url=base, headers=headers, verify=verify, timeout=60) as plain:
        yield plain


async def test_a_key_is_needed_for_all_but_health(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = keys.add(file, tenant="a")
    async with router_rig(tmp_path, api_keys=str(file), fleet_secret=SECRET, **HTTP) as b, client(b) as plain:
        assert (await plain.get("/health")).status_code == 200
        for path in ("/v1/models", "/v1/models/m", "/tokenizer_info", "/version"):
            refused = await plain.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await plain.get(path, headers={"x-api-key": key})).status_code != 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            # It is not asked for its body.
            refused = await plain.post(path, content=b"x" * 100, headers={"authorization": "Bearer other"})
            assert refused.status_code == 401
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            assert (await plain.post("/v1/completions", json=ONE, headers=headers)).status_code == 200
        both = {"x-api-key": key, "authorization": "Bearer other"}
        assert (await plain.post("/v1/completions", json=ONE, headers=both)).status_code == 401


async def test_a_tenants_streams_are_limited_and_the_refusal_says_when_to_come_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = keys.add(file, tenant="a", max_streams=1)
    async with (
        router_rig(tmp_path, api_keys=str(file), change=scripted(endless), client_stall_s=600, **HTTP) as b,
        client(b, authorization=f"Bearer {key}") as plain,
    ):
        asked = {**ONE, "max_tokens": TOKENS, "stream": True}
        async with plain.stream("POST", "/v1/completions", json=asked) as stream:
            await anext(stream.aiter_bytes())
            refused = await plain.post("/v1/completions", json=ONE)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["message"].startswith("max_streams: 1 streams of tenant a")
        await b.app._door._idle.wait()
        assert (await plain.post("/v1/completions", json=ONE)).status_code == 200
        two = await plain.post("/v1/completions", json={**ONE, "prompt": ["hi", "hi"]})
        assert two.status_code == 429


async def test_without_workers_and_in_a_drain_the_answer_is_503(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=1, decode=1, worker_wait_s=0, **HTTP) as b, client(b) as plain:
        assert (await plain.get("/health")).status_code == 200
        b.app._door._draining = True
        refused = await plain.post("/v1/completions", json=ONE)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the router is draining"
        b.app._health.stop()
        assert (await plain.get("/health")).status_code == 503


async def get(address: str, context: ssl.SSLContext) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=f"https://{address}", verify=context, timeout=60) as plain:
        return await plain.get("/version")


def trusting(name: str = "") -> ssl.SSLContext:
    """A client's context that trusts our fleet, with a certificate of ours if `name` is given."""
    context = ssl.create_default_context(cafile=str(fleet() / "ca.crt"))
    if name:
        context.load_cert_chain(fleet() / f"{name}.crt", fleet() / f"{name}.key")
    return context


def tls(folder: Path) -> Tls:
    return Tls(*(settings(folder, "router")[name] for name in SETTINGS))


def api(**more: Any) -> HttpApi:
    return HttpApi(door_of(FakeRequestRunner()), TenantThreads(1), largest=1 << 20, not_ready=str, **more)


async def test_a_certificate_is_read_again_when_it_changes(tmp_path: Path) -> None:
    own = copied(tmp_path / "own", "router")
    async with listen("127.0.0.1:0", api(), tls=tls(own)) as listener:
        assert (await get(listener.address, trusting())).status_code == 200
        copied(own, "router", source=fleet("theirs"))
        with pytest.raises(httpx2.ConnectError, match="verify failed"):
            await get(listener.address, trusting())
        theirs = ssl.create_default_context(cafile=str(fleet("theirs") / "ca.crt"))
        assert (await get(listener.address, theirs)).status_code == 200


async def test_certificates_of_clients_are_as_for_grpc() -> None:
    async with listen("127.0.0.1:0", api(roles=("client", "admin")), tls=tls(fleet()), client_certs=True) as listener:
        for name, status in (("client", 200), ("admin", 200), ("decode-1", 403)):
            assert (await get(listener.address, trusting(name))).status_code == status
        with pytest.raises(httpx2.TransportError):
            await get(listener.address, trusting())


# Clients that do not read


async def unread(b: RouterRig, **asked: Any) -> socket.socket:
    """A connection whose request is on its way, and whose client reads nothing."""
    host, port = b.app.http_address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop, body = asyncio.get_running_loop(), json.dumps(asked).encode()
    await loop.sock_connect(connection, (host, int(port)))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    await loop.sock_sendall(connection, head + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_ended_and_gives_back_all(tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "keys.json"
    key = keys.add(file, tenant="a", max_streams=1)
    script = scripted(endless if stream else much)
    async with (
        router_rig(tmp_path, change=script, client_stall_s=0.5, **HTTP) as b,
        client(b, authorization=f"Bearer {key}") as plain,
    ):
        stalled = count(CLIENTS_STALLED)
        asked = {"prompt": "hi", "max_tokens": TOKENS, "logprobs": 20, "stream": stream}
        with await unread(b, **asked) as connection:
            async with asyncio.timeout(60):
                await b.decode[0].log.until(lambda: bool(b.decode[0].starts))
                await b.app._door._idle.wait()
            assert count(CLIENTS_STALLED) == stalled + 1
            assert (await plain.post("/v1/completions", json=ONE)).status_code == 200
            received, loop = 0, asyncio.get_running_loop()
            with contextlib.suppress(ConnectionError):
                while (data := await loop.sock_recv(connection, 1 << 20)) and b"[DONE]" not in data:
                    received += len(data)
            assert received < 1 << 20


async def test_an_answer_that_waits_for_its_client_is_whole(tmp_path: Path) -> None:
    async with router_rig(tmp_path, change=scripted(much), client_stall_s=600, **HTTP) as b:
        asked = {"prompt": "hi", "max_tokens": TOKENS, "logprobs": 20}
        with await unread(b, **asked) as connection:
            await generated(b)
            parts = []
            loop = asyncio.get_running_loop()
            while not (parts and parts[-1].endswith(b"0\r\n\r\n")):
                parts.append(await loop.sock_recv(connection, 1 << 20))
        answer = b"".join(parts)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b'"token_logprobs"') == 1
    assert sum(map(len, parts)) > 500_000


# Failures after a stream has begun


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_stream_goes_on_after_a_fault_and_tells_if_it_can_not(tmp_path: Path, goes_on: bool) -> None:
    async with router_rig(tmp_path, prefill=2, decode=2, **HTTP) as b, client(b) as plain:
        failed: list[decode_pb2.AttemptKey] = []

        async def fail(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
            if failed and goes_on:
                await continue_by_hand(down, start, asked)
                return
            failed.append(start.key)
            if len(failed) == 1:
                down.send(start.key, 0, 1, [letter(1), letter(2)])
            down.fail(start.key, decode_pb2.AttemptFailure.KIND_ENGINE)

        for stub in b.decode:
            stub.script = fail
        asked = {"prompt": "hi", "max_tokens": 6, "stream": True}
        events = (await plain.post("/v1/completions", json=asked)).text.removesuffix("\n\n").split("\n\n")
        assert events.pop() == "data: [DONE]"
        told = [json.loads(event.removeprefix("data: ")) for event in events]
        if goes_on:
            assert "".join(event["choices"][0]["text"] for event in told) == text(0, 6)
        else:
            assert told[-1]["error"]["type"] == "server_error"
            assert "".join(event["choices"][0]["text"] for event in told[:-1]).startswith(text(0, 3))
        await b.app._door._idle.wait()
