"""A small server with OpenAI's `/v1/completions`, on a real socket, that can misbehave in the ways that servers do.

What a request gets is chosen by the order of arrival: `behaviours[n % len]` for the n-th.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Stream = Callable[[dict[str, Any]], AsyncIterator[bytes]]
TOKEN = 7


def data(event: Any) -> bytes:
    return b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"


def choice(text: str = "x", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


async def with_ids(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """As vLLM: token ids in each event, usage at the end."""
    count = body["max_tokens"]
    for number in range(count):
        yield data(choice(token_ids=[TOKEN], finish="length" if number == count - 1 else None))
    yield data({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}})
    yield data(b"[DONE]")


async def in_pairs(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Two tokens an event, as with speculative decoding."""
    for _ in range(body["max_tokens"] // 2):
        yield data(choice(token_ids=[TOKEN, TOKEN]))
    yield data(choice("", "length", token_ids=[])) + data(b"[DONE]")


async def as_text(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """As llama.cpp's Python server: text only, an event without tokens at the end, no usage."""
    yield b": hello\r\n\r\n"
    for _ in range(body["max_tokens"]):
        yield data(choice()).replace(b"\n", b"\r\n")
    yield data(choice("", "length")) + data(b"[DONE]")


async def merged(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Text only, fewer events than tokens, the count in the usage."""
    yield data(choice())
    yield data(choice(finish="length"))
    yield data({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}) + data(
        b"[DONE]"
    )


async def no_text(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """No token's bytes are a whole character, so that there is one event only, with an empty text."""
    yield data(choice("", "length"))
    yield data({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}) + data(
        b"[DONE]"
    )


async def stops_early(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """An end-of-sequence token was not ignored."""
    yield data(choice(token_ids=[TOKEN])) + data(choice("", "stop", token_ids=[])) + data(b"[DONE]")


async def malformed(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield data(choice()) + data(b'{"choices": [{"te')
    await asyncio.Event().wait()


async def of_another_shape(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield data([1, 2])


async def says_error(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield data(choice()) + data({"error": {"message": "the engine died"}})


async def cut(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Ends the response as if all were well."""
    yield data(choice())


async def dies(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The connection breaks in the middle of a response."""
    yield data(choice())
    await asyncio.sleep(0)
    raise ConnectionResetError("dies on purpose")


async def hangs(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield data(choice())
    await asyncio.Event().wait()


class _Guest(uvicorn.Server):
    """A server that leaves the signals to the tests."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass
class OpenAiServer:
    """Server with a set behaviour, and the requests that it was sent."""

    behaviours: tuple[Stream | int, ...]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_open(self, count: int) -> None:
        """Return once `count` streams are open."""
        while self.open < count:
            self._more.clear()
            await self._more.wait()

    async def completions(self, request: Request) -> Response:
        """Answer as the behaviour whose turn it is."""
        behaviour = self.behaviours[len(self.bodies) % len(self.behaviours)]
        self.bodies.append(json.loads(await request.body()))
        self.headers.append(dict(request.headers))
        if isinstance(behaviour, int):
            return JSONResponse({"error": {"message": f"status {behaviour}"}}, status_code=behaviour)
        return StreamingResponse(self._counted(behaviour(self.bodies[-1])), media_type="text/event-stream")

    async def _counted(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self._more.set()
        try:
            async for piece in stream:
                yield piece
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def openai_server(
    *behaviours: Stream | int, port: int = 0, tls: dict[str, str] | None = None
) -> AsyncIterator[OpenAiServer]:
    """A server that listens until the block ends; with `tls`, settings of a service, it wants certificates."""
    made = OpenAiServer(behaviours)
    app = Starlette(routes=[Route("/v1/completions", made.completions, methods=["POST"])])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        # From here on connections wait for the server, instead of being refused.
        listener.listen(128)
        made.url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **_secured(tls) if tls else {}
        )
        server = _Guest(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield made
        finally:
            server.should_exit = True
            await serving


def _secured(tls: dict[str, str]) -> dict[str, Any]:
    files = {"ssl_certfile": tls["tls_cert"], "ssl_keyfile": tls["tls_key"], "ssl_ca_certs": tls["tls_ca"]}
    return {**files, "ssl_cert_reqs": ssl.CERT_REQUIRED}
