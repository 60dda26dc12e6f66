"""The public API over HTTP, as OpenAI's clients speak it: checks keys, and translates between JSON and the front door.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/NAME
    POST /tokenize   POST /detokenize   GET /tokenizer_info   GET /version   GET /health

A request is refused before its body is received if its key is not known, or if its tenant has too many streams. Only
/health needs no key. A task serves the request, and another one waits for the end of the connection, which cancels it.

uvicorn keeps what a client does not read in a buffer, and would take all of an answer at once. Here the buffer of a
connection counts as full when it has anything, and the kernel's is small. So each write waits until the client has read
most of what came before, and `StallGuard` sees how long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import math
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from baton.errors import (
    BatonError,
    ConfigError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    unexpected,
)
from baton.process.http_server import HttpServer, address_of, serve_http
from baton.process.sockets import bind
from baton.request import MAX_ID_LENGTH
from baton.rpc.tls import Tls, certificate_roles
from baton.telemetry.metrics import REFUSED
from router.request import UncheckedRequest
from router.serving.front_door import HEADER, Caller, FrontDoor
from router.serving.http_answers import (
    DONE,
    Envelope,
    StreamEvents,
    TokenTexts,
    WholeAnswer,
    error_object,
    joined_ids,
    quoted,
    usage_event,
)
from router.serving.http_body import SMALL_BYTES, parse, receive
from router.serving.http_requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    generation,
    read,
    rename,
)
from router.serving.threads import TenantThreads

REQUEST_ID = "x-request-id"
KEY_HEADER = "x-api-key"

_IDLE_S = 60
"""Seconds after which a connection without a request is closed."""
_GRACE_S = 0.5
_FAIL_S = 1.0
"""Longest time to write an error to a client that may not read."""
_SEND_BUFFER = 64 << 10
"""Bytes of a connection's buffer in the kernel, which doubles it."""

_KINDS = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}

_log = logging.getLogger(__name__)

Serve = Callable[["Call"], Awaitable[None]]


class HttpApi:
    """The application; `not_ready` returns why the router does not serve, or ""."""

    def __init__(
        self,
        door: FrontDoor,
        threads: TenantThreads,
        *,
        largest: int,
        not_ready: Callable[[], str],
        origins: Sequence[str] = (),
        roles: Collection[str] = (),
    ) -> None:
        """`largest` is the limit of a body in bytes.

        Browsers may call from `origins`. With `roles`, callers need a certificate of one of them.
        """
        self._door = door
        self._threads = threads
        self._largest = largest
        self._not_ready = not_ready
        self._roles = roles
        self._texts = TokenTexts(door.tokenizer)
        self._created = int(time.time())
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/v1/chat/completions", _Endpoint(self, self._chat), methods=post),
            Route("/v1/completions", _Endpoint(self, self._completions), methods=post),
            Route("/v1/models", _Endpoint(self, self._models), methods=get),
            Route("/v1/models/{name:path}", _Endpoint(self, self._model), methods=get),
            Route("/tokenize", _Endpoint(self, self._tokenize), methods=post),
            Route("/detokenize", _Endpoint(self, self._detokenize), methods=post),
            Route("/tokenizer_info", _Endpoint(self, self._tokenizer_info), methods=get),
            Route("/version", _Endpoint(self, self._version), methods=get),
            Route("/health", self._health, methods=get),
        ]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )
        self.app = Starlette(
            routes=routes, middleware=[cors] if origins else [], exception_handlers={HTTPException: _unknown_path}
        )

    def authenticate(self, scope: Scope) -> Caller:
        """The caller of a request. Raises Unauthenticated or PermissionDenied."""
        seen = scope.get("state", {}).get("roles", frozenset())
        if self._roles and not seen.intersection(self._roles):
            raise PermissionDenied(f"the caller's certificate is not that of {' or '.join(self._roles)}")
        headers = Headers(scope=scope)
        given = headers.getlist(HEADER) or [f"Bearer {key}" for key in headers.getlist(KEY_HEADER)]
        try:
            return self._door.authenticate(given)
        except Unauthenticated:
            REFUSED.labels("", "unauthenticated").inc()
            raise

    async def body(self, call: Call) -> dict[str, Any]:
        """The JSON object in the body of a call."""
        caller = call.caller
        with self._door.count_receiving(caller):
            data = await receive(call.receive, call.headers.get("content-length"), self._largest)
        if len(data) <= SMALL_BYTES:
            return parse(data)
        self._threads.check(caller.tenant, len(data))
        return await self._threads.run(caller.tenant, lambda: parse(data), len(data))

    async def _completions(self, call: Call) -> None:
        await self._generate(call, generation(read(CompletionBody, call.body)))

    async def _chat(self, call: Call) -> None:
        await self._generate(call, generation(read(ChatBody, call.body)))

    async def _generate(self, call: Call, asked: Generation) -> None:
        """Serve the prompts of a request at the same time, each in a task of its own if there are several."""
        served = _Served(self._door, self._texts, call, asked, self._door.model().name)
        with self._door.awaited():
            if len(asked.requests) == 1:
                await served.serve(0)
            else:
                await _run_all(served.serve(index) for index in range(len(asked.requests)))
            await served.finish()

    async def _models(self, call: Call) -> None:
        await call.answer({"object": "list", "data": [self._described()]})

    async def _model(self, call: Call) -> None:
        name = call.scope["path_params"]["name"]
        self._door.model(name)
        await call.answer(self._described())

    def _described(self) -> dict[str, Any]:
        model = self._door.model()
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def _tokenize(self, call: Call) -> None:
        body = read(TokenizeBody, call.body)
        with _renamed({"chat": "messages", "text": "prompt"}):
            async with self._door.tokenize(body.text(), body.size, call.caller, model=body.model or "") as answers:
                async for ids in answers:
                    await call.answer_parts(self._tokenized(ids, strings=bool(body.return_token_strs)))

    def _tokenized(self, ids: Sequence[int], *, strings: bool) -> Iterator[str]:
        yield f'{{"count":{len(ids)},"max_model_len":{self._door.model().max_model_len},"tokens":['
        yield from joined_ids(ids)
        yield '],"token_strs":'
        if strings:
            for index, token_id in enumerate(ids):
                yield f"{',' if index else '['}{self._texts.quoted(token_id)[0]}"
            yield "]}" if ids else "[]}"
        else:
            yield "null}"

    async def _detokenize(self, call: Call) -> None:
        body = read(DetokenizeBody, call.body)
        with _renamed({"token_ids": "tokens"}):
            async with self._door.detokenize(
                body.ids(), call.caller, skip_special_tokens=False, model=body.model or ""
            ) as answers:
                async for text in answers:
                    await call.answer_parts(_detokenized(text))

    async def _tokenizer_info(self, call: Call) -> None:
        if (tokenizer := self._door.tokenizer) is None:
            raise NotFound("the model has no tokenizer")
        await call.answer(
            {
                **tokenizer.special_tokens,
                "chat_template": tokenizer.chat_template,
                "model_max_length": self._door.model().max_model_len,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    async def _version(self, call: Call) -> None:
        await call.answer({"version": importlib.metadata.version("baton")})

    async def _health(self, request: Request) -> Response:
        if problem := self._not_ready():
            return JSONResponse(_error_body(Unavailable(problem)), Unavailable.http_status)
        return Response()


class _Served:
    """The prompts of one request, and their common answer."""

    def __init__(self, door: FrontDoor, texts: TokenTexts, call: Call, asked: Generation, model: str) -> None:
        self._door = door
        self._texts = texts
        self._call = call
        self._asked = asked
        self._whole = WholeAnswer(asked.options, texts)
        self._envelope = Envelope(asked.options, call.request_id, model)

    async def serve(self, index: int) -> None:
        """Serve one prompt to its end. Raises errors that name fields as the body has them."""
        request: UncheckedRequest = self._asked.requests[index]
        try:
            async with self._door.generate(request, self._call.caller, None) as (checked, updates):
                if len(self._asked.requests) == 1:
                    self._envelope.request_id = self._call.name(checked.id)
                echoed = None
                if self._asked.options.echo and (echoed := self._asked.prompts[index].text) is None:
                    echoed = await self._door.decode(checked.prompt_ids, self._call.caller)
                if self._asked.options.stream:
                    events = StreamEvents(self._envelope, self._texts, checked, index, echoed)
                    async for update in updates:
                        if data := events.of(update):
                            await self._call.stream(data)
                        if update.usage is not None:
                            self._whole.counts.add(update.usage, self._asked.options)
                else:
                    self._whole.begin(index, checked, echoed)
                    async for update in updates:
                        self._whole.add(index, update)
        except InvalidRequest as error:
            raise self._asked.error(error, index) from None

    async def finish(self) -> None:
        """Write the end of a stream, or the whole answer."""
        if self._asked.options.stream:
            end = usage_event(self._envelope, self._whole.counts) if self._asked.options.include_usage else b""
            parts: Iterator[bytes] = iter((end + DONE,))
        else:
            parts = self._whole.parts(self._envelope)
        async with self._door.answer(_with_last(parts), self._call.caller) as stream:
            async for part, is_last in stream:
                if self._asked.options.stream:
                    await self._call.stream(part)
                else:
                    await self._call.write(part, is_last=is_last)
                if is_last:
                    await self._call.end()


class Call:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = Headers(scope=scope)
        self.caller = Caller()
        self.body: dict[str, Any] = {}
        self._given_id = _checked_id(self.headers.get(REQUEST_ID, ""))
        self.request_id = self._given_id or secrets.token_hex(12)
        self._send = send
        self._begun = self._ended = self._streams = False

    @property
    def complete(self) -> bool:
        """Whether all of the answer was written."""
        return self._ended

    def name(self, request_id: str) -> str:
        """The id of the answer: the client's, else this one, under which the logs know the request."""
        if not (self._given_id or self._begun):
            self.request_id = request_id
        return self.request_id

    async def stream(self, data: bytes) -> None:
        """Write events; the first ones begin the answer."""
        if not self._begun:
            self._streams = True
            await self._begin(200, "text/event-stream", {"cache-control": "no-cache"})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End an answer, after the client has taken what came before."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._ended = True

    async def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with a small JSON value."""
        data = json.dumps(value).encode()
        await self._begin(status, "application/json", {**(headers or {}), "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self._ended = True

    async def answer_parts(self, texts: Iterator[str]) -> None:
        """Answer with JSON in pieces, between which other tasks run."""
        await self._begin(200, "application/json", {})
        waiting, size = list[str](), 0
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= _SEND_BUFFER:
                await self._send({"type": "http.response.body", "body": "".join(waiting).encode(), "more_body": True})
                await asyncio.sleep(0)
                waiting, size = [], 0
        await self._send({"type": "http.response.body", "body": "".join(waiting).encode(), "more_body": True})
        await self.end()

    async def write(self, part: bytes, *, is_last: bool) -> None:
        """Write a part of a JSON object; the first one begins the answer, with its length if there is no other."""
        if not self._begun:
            await self._begin(200, "application/json", {"content-length": str(len(part))} if is_last else {})
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        # The parts of a large object are made one after the other.
        await asyncio.sleep(0)

    async def fail(self, error: BatonError) -> None:
        """Tell the client of an error: by a status, or by the last event of a stream that has begun."""
        if self._ended:
            return
        if not self._begun:
            await self.answer(_error_body(error), error.http_status, _error_headers(error))
        elif self._streams:
            await self.stream(b"data: %b\n\n" % json.dumps(_error_body(error)).encode() + DONE)
            await self.end()

    async def _begin(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self._begun = True
        named = {"content-type": kind, REQUEST_ID: self.request_id, **headers}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class _Endpoint:
    """An ASGI application that serves one path: checks the key, receives the body, and ends with the connection."""

    def __init__(self, api: HttpApi, serve: Serve) -> None:
        self._api = api
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            call.caller = self._api.authenticate(scope)
            if scope["method"] == "POST":
                call.body = await self._api.body(call)
            await self._until_left(call)
        except ClientDisconnect:
            return
        except BatonError as error:
            await _fail(call, error)
        except Exception as error:
            _log.exception("%s raised an unexpected error", scope["path"])
            await _fail(call, unexpected(error, scope["path"]))

    async def _until_left(self, call: Call) -> None:
        """Serve the call until it ends, or its client has left."""
        serving = asyncio.ensure_future(self._serve(call))
        leaving = asyncio.ensure_future(_left(call.receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ClientDisconnect
            await serving
        finally:
            for task in (serving, leaving):
                task.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(call: Call, error: BatonError) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FAIL_S):
            await call.fail(error)
    if not call.complete and (transport := call.scope.get("state", {}).get("transport")) is not None:
        # The client does not read, or can't be told in the middle of a JSON object.
        transport.abort()


async def _run_all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; the first error cancels the others and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _with_last(parts: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each part, and whether it is the last one."""
    before = next(parts)
    for part in parts:
        yield before, False
        before = part
    yield before, True


def _detokenized(text: str) -> Iterator[str]:
    yield '{"prompt":'
    yield from quoted(text)
    yield "}"


@contextlib.contextmanager
def _renamed(names: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise rename(error, names) from None


def _checked_id(given: str) -> str:
    """The id that a client has given, if it can stand in headers and in JSON; else empty."""
    usable = len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable() and not set(given) & {'"', "\\"}
    return given if usable else ""


def _error_body(error: BatonError) -> Any:
    status = error.http_status
    param = error.field if isinstance(error, InvalidRequest) else "model" if status == 404 else None
    return error_object(str(error), _KINDS.get(status, "server_error"), param, _CODES.get(status))


def _error_headers(error: BatonError) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, Overloaded):
        if error.retry_after is None:
            # OpenAI's clients would try again.
            return {"x-should-retry": "false"}
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    return {}


async def _unknown_path(request: Request, error: Exception) -> Response:
    """The answer for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    problem = f"{request.method} {request.url.path[:200]} does not exist"
    return JSONResponse(error_object(problem, _KINDS.get(status, "server_error"), None, None), status, error.headers)


class _Protocol(H11Protocol):
    """uvicorn's protocol with a small buffer, an end of idle connections, and what the application needs to know."""

    _idle: RequestResponseCycle | bool | None = False
    _checking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A value of 0 would let the transport of TLS pause without any data.
        transport.set_write_buffer_limits(high=1)
        tls = transport.get_extra_info("ssl_object")
        roles = certificate_roles(tls.getpeercert(True)) if tls is not None else frozenset()
        self.app_state = {**self.app_state, "transport": transport, "roles": roles}
        self._check_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._checking is not None:
            self._checking.cancel()

    def _check_idle(self) -> None:
        """Close the connection if it has had no request since the last check."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._idle is self.cycle:
            self.transport.abort()
            return
        self._idle = self.cycle if waiting else False
        self._checking = self.loop.call_later(_IDLE_S, self._check_idle)


@dataclass(frozen=True, slots=True)
class HttpListener:
    """A running HTTP listener; `address` is "host:port" as bound."""

    address: str
    _server: HttpServer

    def stop_accepting(self) -> None:
        """Close the port; running requests go on."""
        self._server.stop_accepting()


@contextlib.asynccontextmanager
async def listen(
    address: str, api: HttpApi, *, tls: Tls | None = None, client_certs: bool = False, shared: bool = False
) -> AsyncIterator[HttpListener]:
    """Serve on `address` ("host:port"; port 0: any free one) until the block ends.

    With `shared`, other processes may listen on the same port. Raises ConfigError if the address can't be bound.
    """
    try:
        bound = bind(address, shared=shared)
    except ConfigError as error:
        raise ConfigError(f"http: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    settings: dict[str, Any] = {"http": _Protocol, "timeout_keep_alive": _IDLE_S}
    if tls is not None:

        def context(*_: Any) -> ssl.SSLContext:
            return tls.ssl_context(require_client=client_certs)

        settings["ssl_context_factory"] = context
    name = address_of(bound)
    async with serve_http(api.app, bound, grace_s=_GRACE_S, **settings) as server:
        yield HttpListener(name, server)
