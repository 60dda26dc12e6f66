"""A worker's three listeners: control for routers, kv for peers, ops for probes and metrics.

The kv listener binds first, because the status on the control listener contains its address. They close in
reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from baton.admin import ADMIN_SERVICE, AdminSources, CacheClearer, CacheSource, LedgerSource, add_admin
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError, EngineError
from baton.pb import worker_pb2_grpc
from baton.rpc.server import Listener, check_reach, listen
from baton.rpc.tls import Tls
from baton.sockets import bind
from baton.tasks import wait_to_end
from baton.telemetry.ops import serve_ops
from baton.transfer.tickets import TicketVerifier
from baton.worker.progress import Progress, watch_progress
from baton.worker.servicer import WorkerServicer
from baton.worker.status import StatusHub

WORKER_SERVICE = "baton.v1.Worker"
CONTROL_ROLES = ("router", "admin")
KV_ROLES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service: its full name, and the function that adds it to a server."""

    name: str
    add: Callable[[grpc.aio.Server], None]


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """The bound addresses of a worker, each "host:port"."""

    control: str
    kv: str
    ops: str

    def __str__(self) -> str:
        return f"control={self.control} kv={self.kv} ops={self.ops}"


def check_addresses(config: WorkerConfig) -> None:
    """Check the worker's listen addresses before a model is loaded; raises ConfigError as `listen` does."""
    for field in ("kv", "control"):
        check_reach(
            getattr(config, field), insecure=config.insecure, tls=bool(config.tls_cert), keys=_keys(config), field=field
        )
    with contextlib.ExitStack() as bound:
        for field in ("kv", "control", "ops"):
            try:
                bound.enter_context(bind(getattr(config, field)))
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}") from None


@contextlib.asynccontextmanager
async def serve_listeners(
    config: WorkerConfig,
    status: StatusHub,
    progress: Progress,
    *,
    control: Service,
    kv: Service,
    ledger: LedgerSource,
    cache: CacheSource,
    clear: CacheClearer,
    fail: Callable[[EngineError], object],
    tls: Tls | None = None,
    tickets: TicketVerifier | None = None,
) -> AsyncIterator[WorkerAddresses]:
    """Serve `control` (with Worker, Admin, health and reflection), `kv` and ops until the block ends.

    `progress` decides the health of both gRPC listeners, the readiness of ops, and the stall in `status`. When the
    engine hangs, the stacks of all threads are logged, /live turns negative, and `fail` is called. Raises
    ConfigError naming an address that is not allowed or already in use. With `tls`, control accepts calls of
    CONTROL_ROLES only, kv of KV_ROLES. Admin uses `ledger`, `cache` and `clear`. The kv service verifies tickets with
    `tickets`, and `status` reports their key ids to routers.
    """

    def add_control(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(status), server)
        add_admin(server, AdminSources(status.identity.worker_id, status.identity.role.value, ledger, cache, clear))
        control.add(server)

    def serve(*, field: str, **what: Any) -> contextlib.AbstractAsyncContextManager[Listener]:
        address = getattr(config, field)
        return listen(address, insecure=config.insecure, field=field, tls=tls, keys=_keys(config), **what)

    if tickets is not None:
        status.set_ticket_keys(tickets.key_ids)
    async with contextlib.AsyncExitStack() as stack:
        kv_listener = await stack.enter_async_context(serve(field="kv", add=kv.add, services=[kv.name], roles=KV_ROLES))
        status.advertise(config.kv_advertise or f":{kv_listener.address.rpartition(':')[2]}")
        services = [control.name, WORKER_SERVICE, ADMIN_SERVICE]
        control_listener = await stack.enter_async_context(
            serve(field="control", add=add_control, services=services, roles=CONTROL_ROLES)
        )
        stack.callback(status.close)

        def report(healthy: bool) -> None:
            for listener in (kv_listener, control_listener):
                listener.set_serving(healthy)
            status.set_stalled(not healthy)

        async def watch() -> None:
            await watch_progress(progress, config.stall_s, report)
            faulthandler.dump_traceback(2)
            fail(EngineError(f"it has made no progress for {progress.stalled_s():.0f} s: it hangs (--stall-s)"))

        watching = asyncio.create_task(watch(), name="watch-progress")
        report(True)
        stack.push_async_callback(wait_to_end, watching)
        stack.callback(watching.cancel)
        ops_listener = await stack.enter_async_context(
            serve_ops(
                config.ops,
                ready=lambda: not status.draining and progress.stalled_s() < config.stall_s,
                live=lambda: not watching.done(),
            )
        )
        yield WorkerAddresses(control_listener.address, kv_listener.address, ops_listener.address)


def _keys(config: WorkerConfig) -> dict[str, str]:
    return {"ticket_keys": config.ticket_keys}
