"""The ops listener: plain HTTP with /live, /ready and /metrics, and nothing else.

It runs on the process's own event loop, so /live answers only while the loop runs. /live is negative when the engine
hangs: the process must be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.errors import ConfigError
from baton.process import executors
from baton.process.executors import WORK
from baton.process.sockets import bind
from baton.telemetry.metrics import Exposition

_GRACE_S = 1


@dataclass(frozen=True, slots=True)
class OpsListener:
    """A running ops listener; `address` is "host:port" as bound."""

    address: str


class _Server(uvicorn.Server):
    """A uvicorn server that does not install signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextlib.asynccontextmanager
async def serve_ops(
    address: str, metrics: Exposition, *, ready: Callable[[], bool], live: Callable[[], bool] = lambda: True
) -> AsyncIterator[OpsListener]:
    """Serve on `address` ("host:port"; port 0: any free one); /ready and /live answer 200 if they return True, else
    503; /metrics answers with `metrics`.

    Raises ConfigError naming the address if it can't be bound.
    """
    try:
        bound = bind(address)
    except ConfigError as error:
        raise ConfigError(f"ops: {error}") from None
    config = uvicorn.Config(
        _app(metrics, ready, live),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([bound]), name=f"ops {address}")
    try:
        await _listening(server, serving)
        host, port = bound.getsockname()[:2]
        yield OpsListener(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    finally:
        server.should_exit = True
        await serving
        bound.close()


async def _listening(server: _Server, serving: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(server.listening.wait())
    await asyncio.wait([waiting, serving], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        await serving


def _app(metrics: Exposition, ready: Callable[[], bool], live: Callable[[], bool]) -> Starlette:
    async def is_live(request: Request) -> Response:
        return PlainTextResponse("live\n") if live() else PlainTextResponse("not live\n", 503)

    async def is_ready(request: Request) -> Response:
        return PlainTextResponse("ready\n") if ready() else PlainTextResponse("not ready\n", 503)

    async def scrape(request: Request) -> Response:
        metrics.refresh()
        return Response(await executors.run(WORK, metrics.text), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/live", is_live), Route("/ready", is_ready), Route("/metrics", scrape)])
