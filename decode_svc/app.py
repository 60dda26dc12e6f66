"""Starts and stops a decode worker: engine, service, listeners. They stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine, KvHandle
from baton.kv.prefix.contract import PrefixCache
from baton.ledger import Ledger, LedgerEntry
from baton.pb import decode_pb2_grpc
from baton.process.executors import EngineThread
from baton.request import Handoff, RemoteExport
from baton.rpc.tls import Tls
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import ExportFetcher
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvServicer
from baton.worker.cache_tiers import CacheTiers, open_cache
from baton.worker.health import IdleAudit, Watchdog, build_ledger
from baton.worker.start import Service, WorkerAddresses, serve_listeners, start_runtime
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerIdentity, WorkerLoad, WorkerRole
from decode_svc.attempts import FailureKind, ledger_entries
from decode_svc.servicer import DecodeServicer
from decode_svc.worker import DecodeWorker, KvFetcher

DECODE_SERVICE = "baton.v1.Decode"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeApp:
    """A running decode worker."""

    addresses: WorkerAddresses
    service: DecodeService
    cache: PrefixCache
    engine: Engine
    config: DecodeConfig

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.service.failed

    async def drain(self) -> None:
        """Refuse new reservations, and let running attempts finish for at most `drain_s` seconds."""
        await self.service.drain(self.config.drain_s)


@contextlib.asynccontextmanager
async def run(config: DecodeConfig, *, engine: Engine | None = None) -> AsyncIterator[DecodeApp]:
    """Run a decode worker until the block ends; if `engine` is None, the settings decide which engine is built.

    An engine that is passed in is not closed; all its pages are free at the end. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            start_runtime(config, WorkerRole.DECODE, engine=engine, converts_kv=config.convert_kv)
        )
        # Decode writes to the cache and never reads from it, so copies in host memory would be useless.
        cache = open_cache(config, base.engine.spec.kv_format)
        stack.push_async_callback(cache.close)
        await cache.check()
        exports = ExportRegistry(base.engine, base.identity.incarnation, shards=base.identity.shards)
        fetch_kv = await stack.enter_async_context(_fetching(config, base.engine, base.identity.consumer, base.tls))
        service = DecodeService(config, base.engine, base.identity, fetch_kv, exports, cache)

        def add_decode(server: grpc.aio.Server) -> None:
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service.worker), server)

        addresses = await stack.enter_async_context(
            serve_listeners(
                config,
                service.status,
                service.watchdog,
                control=Service(DECODE_SERVICE, add_decode),
                kv=Service(KV_SERVICE, KvServicer(exports, base.tickets).add_to_server),
                tls=base.tls,
                tickets=base.tickets,
                ledger=service.ledger,
                cache=service.cache_tiers.list_tiers,
                clear=service.cache_tiers.clear,
                fail=service.worker.fail_engine,
            )
        )
        loop_run = service.start(base.thread)
        stack.push_async_callback(service.close, loop_run)
        yield DecodeApp(addresses, service, cache, base.engine, config)


@contextlib.asynccontextmanager
async def _fetching(config: DecodeConfig, engine: Engine, consumer: str, tls: Tls | None) -> AsyncIterator[KvFetcher]:
    """Yield a function that fetches over gRPC, as `consumer`, with the limits of the settings."""
    exports = ExportFetcher(engine, tls, consumer, config.fetch_stall_s)

    async def fetch_kv(source: RemoteExport, handle: KvHandle, *, tokens: range, length: int) -> Handoff:
        limit_s = config.fetch_limit_s(length)
        return await exports.fetch(source, handle, tokens=tokens, length=length, timeout_s=limit_s)

    try:
        yield fetch_kv
    finally:
        await exports.close()


class DecodeService:
    """A decode worker with its engine thread, status, ledger and audit; used on the asyncio loop only.

    If the engine thread ends, or the audit of the idle worker finds pages without owner, the worker can't go on. Then
    `failed` gets the exception, and the supervisor starts another process.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        identity: WorkerIdentity,
        fetch_kv: KvFetcher,
        exports: ExportRegistry,
        cache: PrefixCache,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._cache = cache
        self._prefix_changes = PrefixChangeFeed(engine, cache, lambda: self.status.notify())
        self.status = StatusHub(identity, self._load, self._prefix_changes)
        self.watchdog = Watchdog(work_counter=engine.work_counter)
        self.cache_tiers = CacheTiers(engine, cache)
        self._audit = IdleAudit(self.ledger, lambda: self._is_idle, lambda error: self.worker.fail_engine(error))
        self.worker = DecodeWorker(
            config,
            engine,
            fetch_kv,
            exports,
            cache,
            self.cache_tiers,
            self.watchdog,
            changed=self._on_load_change,
            on_idle=self._audit.notify,
        )
        self._auditing: asyncio.Task[None] | None = None
        self._retry_scheduled = False

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.worker.failed

    def start(self, thread: EngineThread) -> asyncio.Future[None]:
        """Run the decode loop on the engine thread; the future is done when the loop has stopped."""
        self._engine.watch_pages(self.on_pages_returned)
        self._auditing = asyncio.create_task(self._audit.run(), name="audit")
        self._auditing.add_done_callback(self._on_stopped)
        loop_run = thread.run(self.worker.decode_loop.run)
        loop_run.add_done_callback(self._on_stopped)
        return loop_run

    async def drain(self, grace_s: float) -> None:
        """Refuse new reservations; return when all attempts have ended and their blocks are stored or dropped.

        Attempts that are left after `grace_s` seconds are ended.
        """
        self._refuse()
        worker = self.worker
        try:
            async with asyncio.timeout(grace_s):
                await worker.idle.wait()
                await worker.write_backs.wait_finished()
                await self._cache.flush()
            _log.info("drained")
        except TimeoutError:
            _log.info("drained: %d sequences moved after %g s", worker.attempts.sequences, grace_s)
            worker.fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    async def ledger(self) -> Ledger:
        """The owners of pages, and whether the sums are right."""

        def listed() -> list[LedgerEntry]:
            now = self._loop.time()
            return [
                *ledger_entries(self.worker.attempts, self._engine, now),
                *self.worker.write_backs.entries(now),
            ]

        return await build_ledger(self.status.identity, self._engine, listed)

    async def close(self, loop_run: asyncio.Future[None]) -> None:
        """End all sessions, stop the loop, and wait for everything that was started."""
        self._refuse()
        for session in list(self.worker.sessions.values()):
            self.worker.close_session(session)
        self._engine.watch_pages(None)
        self._prefix_changes.close()
        self.worker.decode_loop.stop()
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.gather(self._auditing, return_exceptions=True)
        await asyncio.gather(loop_run, return_exceptions=True)
        await self.worker.close()

    def on_pages_returned(self) -> None:
        """Called when pages have returned to the pool, from any thread."""
        if not self._retry_scheduled:
            self._retry_scheduled = True
            self._loop.call_soon_threadsafe(self._retry_allocations)

    def _retry_allocations(self) -> None:
        self._retry_scheduled = False
        self.worker.schedule()

    @property
    def _is_idle(self) -> bool:
        return not self.worker.attempts and not self.worker.write_backs

    def _refuse(self) -> None:
        self.worker.refusal = self.worker.refusal or "the worker is draining"
        self.status.drain()

    def _on_stopped(self, running: asyncio.Future[None]) -> None:
        """Called when the engine thread or the audit has ended."""
        error = None if running.cancelled() else running.exception()
        if error is not None:
            _log.error("the worker can't continue: %s", error)
            self.worker.fail_engine(error)

    def _load(self) -> WorkerLoad:
        return self.worker.load_meter.status(self.worker.attempts.requests_without_token)

    def _on_load_change(self) -> None:
        self.worker.load_meter.set_page_metrics()
        self.status.notify()
