"""The ops listener: plain HTTP with /live, /ready and /metrics, and nothing else.

It runs on the process's own event loop, so /live answers only while the loop runs. /live is negative when the engine
hangs, or when the load of its model stands still: the process must be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.errors import ConfigError
from baton.process import executors
from baton.process.executors import WORK
from baton.process.http_server import address_of, serve_http
from baton.process.sockets import bind
from baton.telemetry.metrics import Exposition

_GRACE_S = 1


@dataclass(frozen=True, slots=True)
class OpsListener:
    """A running ops listener; `address` is "host:port" as bound."""

    address: str


@contextlib.asynccontextmanager
async def serve_ops(
    address: str, metrics: Exposition, *, not_ready: Callable[[], str], not_live: Callable[[], str] = lambda: ""
) -> AsyncIterator[OpsListener]:
    """Serve on `address` ("host:port"; port 0: any free one); /metrics answers with `metrics`.

    /ready and /live answer 200 while `not_ready` and `not_live` return "". Otherwise they answer 503, and the body is
    the reason that these have returned. Raises ConfigError naming the address if it can't be bound.
    """
    try:
        bound = bind(address)
    except ConfigError as error:
        raise ConfigError(f"ops: {error}") from None
    address = address_of(bound)
    async with serve_http(_app(metrics, not_ready, not_live), bound, grace_s=_GRACE_S):
        yield OpsListener(address)


def _app(metrics: Exposition, not_ready: Callable[[], str], not_live: Callable[[], str]) -> Starlette:
    def answer(good: str, problem: str) -> Response:
        return PlainTextResponse(f"{problem}\n", 503) if problem else PlainTextResponse(f"{good}\n")

    async def is_live(request: Request) -> Response:
        return answer("live", not_live())

    async def is_ready(request: Request) -> Response:
        return answer("ready", not_ready())

    async def scrape(request: Request) -> Response:
        metrics.refresh()
        return Response(await executors.run(WORK, metrics.text), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/live", is_live), Route("/ready", is_ready), Route("/metrics", scrape)])
