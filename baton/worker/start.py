"""The start of every worker: ops listener, checkpoint, tokenizer, engine on its thread, identity; then two listeners.

Listeners are ops for probes and metrics, kv for peers, control for routers. The ops listener answers while the model
loads: /live is positive while the load makes progress, and /ready says how far it is. The kv listener binds before the
control listener, because the status on that one contains its address. The end runs in reverse order, after a drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from baton.config.worker import WorkerConfig
from baton.engine.contract import Engine, EngineSpec
from baton.errors import ConfigError, EngineError
from baton.kv.prefix.contract import PrefixCache
from baton.model.checkpoint import resolve, tokenizer_digest
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.process import allocator, cores, executors
from baton.process.executors import WORK, EngineThread, wait_to_end
from baton.process.load_progress import LoadProgress
from baton.process.ops import serve_ops
from baton.process.sockets import bind
from baton.rpc.admin import ADMIN_SERVICE, AdminSources, add_admin
from baton.rpc.server import Listener, check_reach, listen
from baton.rpc.tls import Tls
from baton.telemetry.metrics import Exposition
from baton.transfer.export import LEASE_S, ExportRegistry
from baton.transfer.tickets import TicketVerifier
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvServicer
from baton.worker.health import Watchdog, WorkerAudit, watch_engine
from baton.worker.prefix_cache import CacheAdmin, open_worker_cache
from baton.worker.status import (
    PrefixChangeFeed,
    StatusHub,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerServicer,
    new_identity,
)

LOAD_STALL_S = 120.0
"""Seconds without progress of a load after which /live is negative. A piece of 16 MiB takes 16 s at 1 MB/s."""

_LOG_PROGRESS_S = 5.0
"""Seconds between two lines in the log about a load."""

_log = logging.getLogger(__name__)


class WorkerProbes:
    """The answers of the ops listener: at first those of the load, then those of the running worker."""

    def __init__(self, progress: LoadProgress, metrics: Exposition) -> None:
        self.progress, self.metrics = progress, metrics
        self.address = ""
        """The address of the ops listener, "host:port" as bound."""
        self.not_ready: Callable[[], str] = lambda: f"loading: {progress}"
        """Returns the reason why the worker is not ready; "" if it is."""
        self.not_live: Callable[[], str] = self._stalled
        """Returns the reason why the worker is not live; "" if it is."""

    def _stalled(self) -> str:
        seconds = self.progress.stalled_s()
        return f"no progress for {seconds:.0f} s: {self.progress}" if seconds >= LOAD_STALL_S else ""

    @contextlib.asynccontextmanager
    async def serve(self, address: str) -> AsyncIterator[None]:
        """Serve the answers on `address` until the block ends. Raises ConfigError as `serve_ops` does."""
        problems = {"not_ready": lambda: self.not_ready(), "not_live": lambda: self.not_live()}
        async with serve_ops(address, self.metrics, **problems) as listener:
            self.address = listener.address
            yield

    @contextlib.contextmanager
    def running(
        self,
        status: StatusHub,
        watchdog: Watchdog,
        stall_s: float,
        hangs: Callable[[], bool],
        measure: Callable[[], None],
    ) -> Iterator[None]:
        """Answer for a worker that runs, until the block ends; after that it is not ready, and its gauges stay.

        It is not ready while it drains, or makes no progress for `stall_s` seconds, and not live once it `hangs`.
        `measure` sets the gauges of the worker.
        """

        def not_ready() -> str:
            if status.draining:
                return "not ready: the worker drains"
            stalled_s = watchdog.stalled_s()
            return f"not ready: no progress for {stalled_s:.0f} s" if stalled_s >= stall_s else ""

        identity = status.identity
        self.metrics.model = lambda: {
            "fingerprint": identity.fingerprint,
            "max_model_len": identity.max_model_len,
            "tensor_parallel": identity.tensor_parallel,
            "pipeline_parallel": identity.pipeline_parallel,
        }
        self.metrics.measure, self.not_ready = measure, not_ready
        self.not_live = lambda: "not live: the engine hangs" if hangs() else ""
        try:
            yield
        finally:
            # A scrape may come after the engine is closed.
            self.metrics.measure, self.not_ready = (lambda: None), (lambda: "not ready: the worker stops")

    async def log_progress(self) -> None:
        """Log the progress of the load regularly, and once that it stands still, until cancelled."""
        stalled = False
        while True:
            await asyncio.sleep(_LOG_PROGRESS_S)
            problem = self._stalled()
            if not problem:
                _log.info("loading: %s", self.progress)
            elif not stalled:
                _log.error("loading: %s", problem)
            stalled = bool(problem)


WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
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


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that each service of a worker uses. `changed` is called when the load has changed."""

    engine: Engine
    exports: ExportRegistry
    cache: PrefixCache
    cache_admin: CacheAdmin
    watchdog: Watchdog
    audit: WorkerAudit
    changed: Callable[[], object]


@dataclass(frozen=True, slots=True)
class WorkerRuntime(WorkerParts):
    """All parts of a worker but its services."""

    config: WorkerConfig
    identity: WorkerIdentity
    thread: EngineThread
    tls: Tls | None
    tickets: TicketVerifier | None
    probes: WorkerProbes
    status: StatusHub

    @contextlib.asynccontextmanager
    async def serve(self, services: Sequence[Service], measure: Callable[[], None]) -> AsyncIterator[WorkerAddresses]:
        """Serve `services` (with Worker, Admin, health and reflection) to routers, and exports to peers.

        Ends with the block. `watchdog` decides the health of both gRPC listeners, the answers of `probes`, and the
        stall in `status`. When the engine hangs, the stacks of all threads are logged, /live turns negative, and all
        services fail. They fail too when the engine reports that it can't go on. With TLS, the control listener accepts
        calls of CONTROL_ROLES only, the kv listener those of KV_ROLES. `measure` sets the gauges of the worker, before
        each scrape. Raises ConfigError naming an address that is not allowed or already in use.
        """
        config, status, kv = self.config, self.status, KvServicer(self.exports, self.tickets)

        def add_control(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(status), server)
            identity, cache = self.identity, self.cache_admin
            sources = AdminSources(
                identity.worker_id, identity.role.value, self.audit.ledger, cache.list_tiers, cache.clear
            )
            add_admin(server, sources)
            for service in services:
                service.add(server)

        def serve(*, field: str, **what: Any) -> contextlib.AbstractAsyncContextManager[Listener]:
            address = getattr(config, field)
            return listen(address, insecure=config.insecure, field=field, tls=self.tls, keys=_keys(config), **what)

        if self.tickets is not None:
            status.set_ticket_keys(self.tickets.key_ids)
        async with contextlib.AsyncExitStack() as stack:
            kv_listener = await stack.enter_async_context(
                serve(field="kv", add=kv.add_to_server, services=[KV_SERVICE], roles=KV_ROLES)
            )
            status.advertise(config.kv_advertise or f":{kv_listener.address.rpartition(':')[2]}")
            names = [*(each.name for each in services), WORKER_SERVICE, ADMIN_SERVICE]
            control_listener = await stack.enter_async_context(
                serve(field="control", add=add_control, services=names, roles=CONTROL_ROLES)
            )
            stack.callback(status.close)

            def report(healthy: bool) -> None:
                for listener in (kv_listener, control_listener):
                    listener.set_serving(healthy)
                status.set_stalled(not healthy)

            fail = self.audit.fail
            hangs = await stack.enter_async_context(_watching_engine(self.watchdog, config.stall_s, report, fail))
            loop = asyncio.get_running_loop()
            self.engine.watch_failure(lambda error: loop.call_soon_threadsafe(fail, error))
            stack.enter_context(self.probes.running(status, self.watchdog, config.stall_s, hangs, measure))
            yield WorkerAddresses(control_listener.address, kv_listener.address, self.probes.address)


@contextlib.asynccontextmanager
async def start_runtime(
    config: WorkerConfig,
    role: WorkerRole,
    load: Callable[[], WorkerLoad],
    *,
    engine: Engine | None = None,
    converts_kv: bool = False,
    cache_memory: int = 0,
    lease_s: float = LEASE_S,
) -> AsyncIterator[WorkerRuntime]:
    """Yield an engine on its thread, and all other parts that services need, until the block ends.

    `engine` None builds the torch engine from the settings; an engine that is passed in is not closed. `load` returns
    the load for the status, `cache_memory` is the size of the cache in host memory in bytes, and `lease_s` the seconds
    after which an export ends that nobody fetches. Raises ModelError. Before it loads anything, raises ConfigError for
    bad certificate or ticket-key files, and for addresses that other machines could reach without these.
    """
    check_addresses(config)
    tls = Tls.load(config, role.value)
    tickets = TicketVerifier(config.ticket_keys) if config.ticket_keys else None
    async with contextlib.AsyncExitStack() as stack:
        thread = EngineThread(f"{role.value}-engine")
        stack.push_async_callback(thread.close)
        probes = WorkerProbes(LoadProgress(config.worker_id), Exposition(role.value, config.model_name))
        await stack.enter_async_context(probes.serve(config.ops))
        progress_log = asyncio.create_task(probes.log_progress(), name="load-progress")
        stack.callback(progress_log.cancel)
        probes.progress.begin(f"opening the checkpoint {config.checkpoint}")
        directory = await executors.run(WORK, resolve, config.checkpoint)
        digest = await executors.run(WORK, tokenizer_digest, directory)
        if engine is None:
            engine = await thread.run(_build, config, probes.progress)
            stack.callback(engine.close)
        progress_log.cancel()
        _warn_of_small_memory(engine.spec)
        principal = tls.principal if tls else ""
        identity = new_identity(config, role, engine.spec, digest, converts_kv=converts_kv, principal=principal)
        cache = open_worker_cache(config, engine.spec.kv_format, cache_memory=cache_memory)
        stack.push_async_callback(cache.close)
        await cache.check()
        changes = PrefixChangeFeed(engine, cache, lambda: status.notify())
        stack.callback(changes.close)
        status = StatusHub(identity, load, changes)
        yield WorkerRuntime(
            engine,
            ExportRegistry(engine, identity.incarnation, lease_s=lease_s, shards=identity.shards),
            cache,
            CacheAdmin(engine, cache),
            Watchdog(work_counter=engine.work_counter),
            WorkerAudit(identity, engine),
            status.notify,
            config,
            identity,
            thread,
            tls,
            tickets,
            probes,
            status,
        )


class DrainedService(Protocol):
    """A service of a worker, for its drain."""

    failed: asyncio.Future[None]
    """Future that gets an exception when the engine can't go on."""

    @property
    def idle(self) -> bool:
        """Whether no accepted work is left."""

    def refuse(self) -> None:
        """Refuse new work."""

    async def wait_finished(self) -> None:
        """Wait until accepted work has ended; for a drain, after `refuse`."""

    def cut_short(self, grace_s: float) -> None:
        """End the work that is left after a drain of `grace_s` seconds, if that helps its routers."""


class WorkerApp:
    """A running worker."""

    def __init__(
        self, runtime: WorkerRuntime, addresses: WorkerAddresses, drain_s: float, services: Sequence[DrainedService]
    ) -> None:
        """`drain_s` is the longest duration of a drain in seconds. A fault of the engine fails all services."""
        self.addresses = addresses
        self.config = runtime.config
        self.audit = runtime.audit
        self.cache = runtime.cache
        self.status = runtime.status
        self.engine = runtime.engine
        self._drain_s = drain_s
        self._services = services

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self._services[0].failed

    async def drain(self) -> None:
        """Serve until the routers have left, and all accepted work has ended; at most `drain_s` seconds.

        Routers send nothing new once they have read that the worker drains.
        """
        self.status.drain()
        try:
            async with asyncio.timeout(self._drain_s):
                await self.status.wait_unwatched()
                self._refuse()
                await self.wait_finished()
            _log.info("drained")
        except TimeoutError:
            self._refuse()
            for service in self._services:
                service.cut_short(self._drain_s)

    async def wait_finished(self) -> None:
        """Wait until accepted work has ended; that of one service may bring the other one more."""
        while True:
            for service in self._services:
                await service.wait_finished()
            if all(service.idle for service in self._services):
                return

    def _refuse(self) -> None:
        for service in self._services:
            service.refuse()


def _warn_of_small_memory(spec: EngineSpec) -> None:
    """Warn if the KV memory can't hold a request of the model's length, because such requests will be refused."""
    if (tokens := spec.pages * spec.page_size) < spec.max_model_len:
        _log.warning(
            "the KV memory holds %d tokens, less than max_model_len, which is %d: longer requests are refused; "
            "raise --kv-memory or lower --max-model-len",
            tokens,
            spec.max_model_len,
        )


_SPARE_BYTES = 64 << 20
"""Memory for frames of KV and messages: page faults for 4 MB take milliseconds, in which a thread may keep the
interpreter's lock."""


def _build(config: WorkerConfig, progress: LoadProgress) -> Engine:
    from baton.engine.factory import build

    settings = config.engine_config()
    if settings.ranks > 1:
        among = tuple(os.sched_getaffinity(0))
        settings = replace(settings, threads=settings.threads or cores.threads_each(settings.ranks))
        os.sched_setaffinity(0, cores.share(0, settings.ranks, settings.threads, among))
    engine = build(settings, progress=progress)
    allocator.prefault(_SPARE_BYTES)
    return engine


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
async def _watching_engine(
    watchdog: Watchdog, stall_s: float, report: Callable[[bool], None], fail: Callable[[EngineError], object]
) -> AsyncIterator[Callable[[], bool]]:
    """Report the health of the engine, and call `fail` when it hangs, until the block ends.

    Yields a function that tells whether the engine hangs.
    """

    async def watch() -> None:
        await watch_engine(watchdog, stall_s, report)
        faulthandler.dump_traceback(2)
        fail(EngineError(f"it has made no progress for {watchdog.stalled_s():.0f} s: it hangs (--stall-s)"))

    watching = asyncio.create_task(watch(), name="watch-engine")
    report(True)
    try:
        yield lambda: watching.done() and not watching.cancelled()
    finally:
        watching.cancel()
        await wait_to_end(watching)


def _keys(config: WorkerConfig) -> dict[str, str]:
    return {"ticket_keys": config.ticket_keys}
