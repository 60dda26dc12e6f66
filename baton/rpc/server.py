"""gRPC listeners: bind, serve with health and reflection, stop with grace.

    async with listen("127.0.0.1:0", insecure=False, add=add, services=["baton.v1.Prefill"]) as listener:
        listener.set_serving(True)       NOT_SERVING until then
        listener.stop_accepting()        no new connections and calls from here on; running calls go on
        ...                                    at the end: NOT_SERVING, no new calls, `grace` for running ones

`ErrorInterceptor` wraps every handler: errors become statuses, undecodable requests INVALID_ARGUMENT.

A listener that other machines can reach needs TLS and the keys that identify callers, or the setting `insecure`:

    tls     roles            a peer needs
    None                     nothing
    given   empty            to trust this process's CA; it is not asked for a certificate
    given   router, admin    a certificate of the same CA, of one of these roles; else PERMISSION_DENIED
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import is_loopback, parse_address
from baton.errors import ConfigError
from baton.process.sockets import bind
from baton.rpc.channel import CONTROL_MESSAGE_BYTES, KEEPALIVE, METADATA_BYTES, METADATA_MAX_BYTES, Options
from baton.rpc.errors import ErrorInterceptor
from baton.rpc.tls import SETTINGS, Tls, admit

MAX_STREAMS = 4096
"""Concurrent calls of one connection; further calls wait at the client, each until its deadline."""

_HANDLERS_S = 5.0
_UNLIMITED_S = 1e9
_Status = health_pb2.HealthCheckResponse

_OPTIONS: Options = [
    *KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_MAX_BYTES),
]


class Listener:
    """A bound and running gRPC server."""

    def __init__(
        self, address: str, services: Sequence[str], servicer: health.aio.HealthServicer, server: grpc.aio.Server
    ) -> None:
        self.address = address
        """"host:port" as bound; a port of 0 is replaced by the real one."""
        self._services = ("", *services)
        self._health = servicer
        self._server = server
        self._reporting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._serving = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING through grpc.health.v1, for the process ("") and each service."""
        self._serving = serving
        self._changed.set()

    def stop_accepting(self) -> None:
        """Close the port, and tell connected clients (GOAWAY) to send new calls elsewhere; running calls go on.

        gRPC cancels calls that clients send before they hear of it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(_UNLIMITED_S), name=f"end of {self.address}")

    async def start(self) -> None:
        """Start the server, which reports NOT_SERVING."""
        await self._report()
        await self._server.start()
        self._reporting = asyncio.create_task(self._report_changes(), name=f"health of {self.address}")

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, and stop the server; running calls get `grace` seconds."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        if self._stopping is not None:
            await self._stopping

    async def _report_changes(self) -> None:
        while True:
            self._changed.clear()
            await self._report()
            await self._changed.wait()

    async def _report(self) -> None:
        status = _Status.SERVING if self._serving else _Status.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)


@asynccontextmanager
async def listen(
    address: str,
    *,
    insecure: bool,
    add: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    field: str = "address",
    grace: float = 0.5,
    tls: Tls | None = None,
    roles: Sequence[str] = (),
    keys: Mapping[str, str] = MappingProxyType({}),
    streams: int = MAX_STREAMS,
    message_bytes: int = CONTROL_MESSAGE_BYTES,
    guards: Sequence[grpc.aio.ServerInterceptor] = (),
    shared: bool = False,
    connection_age_s: float = 0.0,
) -> AsyncIterator[Listener]:
    """Serve on `address` ("host:port"; port 0 picks a free one) the services that `add` registers.

    services        full names of the services, for health and reflection
    grace           seconds that running calls get at the end; no handler runs after the block
    tls, roles      with `tls`, callers need a certificate of one of `roles`
    keys            the settings, by name, that identify callers
    message_bytes   size of the largest request
    guards          interceptors whose errors become statuses
    shared          other processes may listen on the same port
    connection_age_s  seconds, give or take a tenth, after which peers connect again for new calls; 0: never
    field           the setting that the address comes from, for errors

    Raises ConfigError, which names `field` and the address, if the address can't be bound, or if other machines can
    reach it and TLS or keys are missing without `insecure`.
    """
    check_reach(address, insecure=insecure, tls=tls is not None, keys=keys, field=field)
    try:
        # gRPC logs a failure at length, and its error does not contain the reason.
        bind(address, shared=shared).close()
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    boundary = ErrorInterceptor(partial(admit, roles=roles) if tls and roles else None)
    server = _server([boundary, *guards], streams, message_bytes, shared=shared, connection_age_s=connection_age_s)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [*services, health.SERVICE_NAME]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    add(server)
    host, port = parse_address(address)
    bound = _bind(server, f"{_bracketed(host)}:{port}", tls, bool(roles), field)
    listener = Listener(f"{_bracketed(host)}:{bound}", names, servicer, server)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.stop(grace)
        # gRPC cancels the handlers and does not wait for their `finally` blocks.
        await boundary.wait_ended(_HANDLERS_S)


def _server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    streams: int,
    message_bytes: int,
    *,
    shared: bool,
    connection_age_s: float,
) -> grpc.aio.Server:
    options = [
        *_OPTIONS,
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_receive_message_length", message_bytes),
        # Two processes on one port share its connections silently, so this must be requested.
        ("grpc.so_reuseport", int(shared)),
    ]
    if connection_age_s:
        options.append(("grpc.max_connection_age_ms", max(1, round(connection_age_s * 1000))))
    return grpc.aio.server(interceptors=interceptors, options=options)


def check_reach(address: str, *, insecure: bool, tls: bool, keys: Mapping[str, str], field: str) -> None:
    """Raise ConfigError naming the missing settings if other machines could reach `address` without TLS or keys."""
    missing = [*(() if tls else SETTINGS), *(name for name, value in keys.items() if not value)]
    if missing and not insecure and not is_loopback(parse_address(address)[0]):
        problem = f"can be reached from other machines, and {', '.join(missing)} "
        raise ConfigError(f"{field}: {address} {problem}{_are(missing)} not set; --insecure allows that")


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None, require_client: bool, field: str) -> int:
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.server_credentials(require_client=require_client)))
    except RuntimeError:
        raise ConfigError(f"{field}: {address} can't be bound") from None


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
