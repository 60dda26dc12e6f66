"""A uvicorn server on a socket that is bound already, inside a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

_ABORT_S = 0.05
"""Seconds between two looks at connections that are cut at the end."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that does not install signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.listening.set()

    def stop_accepting(self) -> None:
        """Close the port and idle connections; running requests go on."""
        self.should_exit = True


@contextlib.asynccontextmanager
async def serve_http(app: Any, bound: socket.socket, *, grace_s: float, **settings: Any) -> AsyncIterator[HttpServer]:
    """Serve an ASGI `app` on a bound socket until the block ends; running requests then get `grace_s` seconds.

    `settings` are those of `uvicorn.Config`.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        **settings,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve([bound]), name=f"http {address_of(bound)}")
    try:
        await _listening(server, serving)
        yield server
    finally:
        server.stop_accepting()
        await asyncio.wait([serving], timeout=grace_s)
        while not serving.done():
            for connection in list(server.server_state.connections):
                if (transport := getattr(connection, "transport", None)) is not None:
                    transport.abort()
            await asyncio.wait([serving], timeout=_ABORT_S)
        bound.close()
        await serving


def address_of(bound: socket.socket) -> str:
    """The address of a socket as "host:port"."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _listening(server: HttpServer, serving: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(server.listening.wait())
    await asyncio.wait([waiting, serving], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        await serving
