"""The HTTP API against requests that make no sense: each is the caller's fault, ends in time and leaves nothing."""

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx2

from baton.pb import admin_pb2, admin_pb2_grpc
from baton.rpc.channel import control_channel
from tests.fuzz.mutation import arbitrary, mutated
from tests.fuzz.storm import WAIT_S, healthy, storm
from tests.integration.router_rig import router_rig

ALLOWED = frozenset({200, 400, 404, 405, 413, 429})
"""429: what waits for prefill is more than a tenant may have; an error of the server would be 5xx."""

SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "default",
        "prompt": ["hi", [5, 6, 7]],
        "max_tokens": 4,
        "temperature": 0.5,
        "n": 2,
        "stop": ["\n"],
        "logprobs": 2,
        "echo": True,
        "logit_bias": {"5": 1.5},
        "seed": 7,
        "cache_salt": "a",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "allowed_token_ids": [1, 2, 3],
    },
    "/tokenize": {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/models": {},
    "/nothing": {},
}
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        64,
        1000,
        2**31,
        2**63,
        2**64,
        -(2**70),
        0.0,
        0.5,
        -0.5,
        1e30,
        1e400,
        float("nan"),
    ),
    *("", "a", "x" * 300, "\0", "\ud800", "🎵" * 20, "default", "user", "nonsense"),
    *([], {}, [[]], [None], [""], ["a"] * 40, [[5] * 40] * 3, [-1], [2**40], {"a": {}}, {"type": "text"}, {"": 1}),
)
HEADERS = (
    "content-type",
    "content-length",
    "authorization",
    "x-request-id",
    "transfer-encoding",
    "expect",
    "connection",
)
METHODS = ("POST", "POST", "POST", "GET", "PUT", "OPTIONS", "HEAD", "nonsense")


def changed(rng: random.Random, body: Any) -> Any:
    """A copy of it with one value, perhaps a nested one, set to something else, added or removed."""
    found = copy.deepcopy(body)
    where = found
    while where:
        key = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if isinstance(where[key], (dict, list)) and rng.random() < 0.6 and where[key]:
            where = where[key]
            continue
        match rng.randrange(4):
            case 0:
                del where[key]
            case 1 if isinstance(where, dict):
                where[rng.choice((*(name for each in SOUND.values() for name in each), "tools", "x"))] = rng.choice(
                    VALUES
                )
            case _:
                where[key] = rng.choice(VALUES)
        break
    return found


def content(rng: random.Random, sound: Any) -> bytes:
    """Bytes of a body, of all degrees of sense."""
    kind = rng.randrange(10)
    if kind == 0:
        return arbitrary(rng)
    if kind == 1:
        return json.dumps(rng.choice(VALUES)).encode()
    body = changed(rng, sound)
    for _ in range(rng.choice((0, 0, 1, 2))):
        body = changed(rng, body)
    if kind == 2:
        depth = rng.choice((10, 1000, 30_000))
        return b'{"prompt": ' + b"[" * depth + b"]" * rng.choice((0, depth)) + b"}"
    data = json.dumps(body).encode()
    return mutated(rng, data) if kind <= 4 else data


async def answer(address: str, data: bytes) -> bytes:
    """What the server says to these bytes until it closes; raises TimeoutError if it does not."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(data)
            writer.write_eof()
            while piece := await reader.read(1 << 16):
                said += piece
    except ConnectionError:
        pass
    finally:
        writer.close()
    return said


def raw(rng: random.Random) -> bytes:
    """A request as bytes, with faults in its head."""
    path = rng.choice(list(SOUND))
    body = content(rng, SOUND[path])
    lines = [f"{rng.choice(METHODS)} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
    for _ in range(rng.choice((0, 1, 1, 3))):
        value = rng.choice(("", "chunked", "0", "-1", "9" * 30, "100-continue", "Bearer x", "a\rb", "é", "x" * 5000))
        lines.insert(rng.randrange(1, len(lines) + 1), f"{rng.choice(HEADERS)}: {value}")
    data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return mutated(rng, data) if rng.random() < 0.7 else data


async def test_http_blames_the_caller(tmp_path: Path) -> None:
    async with router_rig(tmp_path, template="{{ messages }}", http="127.0.0.1:0") as b:
        address = b.app.http_address
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as client:

            async def send(rng: random.Random) -> None:
                path = rng.choice(list(SOUND))
                data = content(rng, SOUND[path])
                response = await client.post(path, content=data)
                assert response.status_code in ALLOWED, f"{path} answered {response.text} to {data!r}"
                assert response.status_code < 400 or response.json()["error"]["message"], (path, data)

            await storm("HTTP: bodies", 500, send)

        async def send_raw(rng: random.Random) -> None:
            data = raw(rng)
            said = await answer(address, data)
            assert not said.startswith(b"HTTP/1.1 5"), f"{said!r} to {data!r}"

        await storm("HTTP: requests as bytes", 200, send_raw)
        await ledger_is_empty(b.app.address)
        assert await healthy(b.app.address)
        assert (await b.answer(max_tokens=3)).usage.completion_tokens == 3


async def ledger_is_empty(address: str) -> None:
    """Return when no request has anything any more."""
    async with asyncio.timeout(WAIT_S), control_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        while (await admin.Ledger(admin_pb2.LedgerRequest())).entries:
            pass
