"""gRPC listeners: bind, serve with health and reflection, stop with grace.

    async with listen("127.0.0.1:0", insecure=False, add=add, services=["baton.v1.Prefill"]) as listener:
        listener.set_serving(True)       NOT_SERVING until then
        ...                                    at the end: NOT_SERVING, no new calls, `grace` for running ones

Every handler stands behind `Boundary`: errors become statuses, undecodable requests INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import is_loopback, parse_address
from baton.errors import ConfigError
from baton.rpc.channel import CONTROL_MESSAGE_BYTES, KEEPALIVE, Options
from baton.rpc.errors import Boundary
from baton.sockets import bind

_HANDLERS_S = 5.0
_Status = health_pb2.HealthCheckResponse

_OPTIONS: Options = [
    *KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES),
    # Two processes on one port would share its connections without a word.
    ("grpc.so_reuseport", 0),
]


class Listener:
    """A bound and running gRPC server."""

    def __init__(self, address: str, services: Sequence[str], servicer: health.aio.HealthServicer) -> None:
        self.address = address
        """"host:port" as bound; a port of 0 has become a real one."""
        self._services = ("", *services)
        self._health = servicer
        self._serving = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING through grpc.health.v1, for the process ("") and each service."""
        self._serving = serving
        self._changed.set()

    async def report(self) -> None:
        """Tell the health servicer of every change; runs as long as the listener."""
        while True:
            self._changed.clear()
            status = _Status.SERVING if self._serving else _Status.NOT_SERVING
            for service in self._services:
                await self._health.set(service, status)
            await self._changed.wait()


@asynccontextmanager
async def listen(
    address: str,
    *,
    insecure: bool,
    add: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    field: str = "address",
    grace: float = 0.5,
) -> AsyncIterator[Listener]:
    """Serve what `add` registers on `address` ("host:port"; port 0 picks a free one).

    `services` are full names, for health and reflection. At the end running calls have `grace` seconds;
    no handler runs after the block. Raises ConfigError naming `field`, the setting that the address comes from, and
    the address if it can't be bound, or lies beyond loopback without `insecure`.
    """
    host, port = parse_address(address)
    if not insecure and not is_loopback(host):
        problem = "can be reached from other machines and has no TLS; --insecure allows that"
        raise ConfigError(f"{field}: {address} {problem}")
    try:
        # gRPC logs a failure at length, and its error does not tell the reason.
        bind(address).close()
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    boundary = Boundary()
    server = grpc.aio.server(interceptors=[boundary], options=_OPTIONS)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [*services, health.SERVICE_NAME]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    add(server)
    try:
        bound = server.add_insecure_port(f"{_bracketed(host)}:{port}")
    except RuntimeError:
        raise ConfigError(f"{field}: {address} can't be bound") from None
    for name in ("", *names):
        await servicer.set(name, _Status.NOT_SERVING)
    listener = Listener(f"{_bracketed(host)}:{bound}", names, servicer)
    await server.start()
    reporting = asyncio.create_task(listener.report(), name=f"health of {listener.address}")
    try:
        yield listener
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await servicer.enter_graceful_shutdown()
        await server.stop(grace)
        # gRPC cancels the handlers and does not wait for what they do at their end.
        await boundary.ended(_HANDLERS_S)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
