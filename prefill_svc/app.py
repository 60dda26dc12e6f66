"""Starts and stops a prefill worker: engine, prefix cache, worker, listeners. They stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc

from baton.config.worker import PrefillConfig
from baton.engine.contract import Engine
from baton.kv.prefix.contract import PrefixCache
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.transfer.export import ExportRegistry
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvServicer
from baton.worker.health import Watchdog, WorkerAudit
from baton.worker.prefix_cache import CacheAdmin, open_worker_cache
from baton.worker.start import Service, WorkerAddresses, serve_listeners, start_runtime
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerRole
from prefill_svc.prefix import PeerFetcher, PrefixBackends
from prefill_svc.servicer import PrefillServicer
from prefill_svc.worker import ChunkRunner, PrefillWorker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillApp:
    """A running prefill worker."""

    addresses: WorkerAddresses
    worker: PrefillWorker
    servicer: PrefillServicer
    cache: PrefixCache
    status: StatusHub
    engine: Engine
    config: PrefillConfig

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.worker.failed

    async def drain(self) -> None:
        """Serve until the routers have left, and jobs, their answers and fetches of KV have ended.

        It takes at most `drain_s` seconds. Routers send no new requests once they have read that the worker drains.
        """
        self.status.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.status.wait_unwatched()
                self.worker.refuse()
                await self.worker.wait_finished()
                await self.servicer.wait_sent()
            _log.info("drained")
        except TimeoutError:
            _log.warning("the drain is cut short after %g s", self.config.drain_s)


def prefill_service(servicer: PrefillServicer) -> Service:
    """The service of a control listener."""

    def add(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)

    return Service(prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name, add)


@contextlib.asynccontextmanager
async def run(config: PrefillConfig, *, engine: Engine | None = None) -> AsyncIterator[PrefillApp]:
    """Run a prefill worker until the block ends; if `engine` is None, the settings decide which engine is built.

    An engine that is passed in is not closed; all its pages are free at the end. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(start_runtime(config, WorkerRole.PREFILL, engine=engine))
        spec, incarnation = base.engine.spec, base.identity.incarnation
        cache = open_worker_cache(config, spec.kv_format, cache_memory=config.cache_memory)
        stack.push_async_callback(cache.close)
        await cache.check()
        exports = ExportRegistry(base.engine, incarnation, lease_s=config.lease_s, shards=base.identity.shards)
        peers = PeerFetcher(base.engine, base.tls, base.identity.consumer, config.cache_budget_s)
        watchdog = Watchdog(work_counter=base.engine.work_counter)
        prefix_changes = PrefixChangeFeed(base.engine, cache, lambda: status.notify())
        stack.callback(prefix_changes.close)
        status = StatusHub(base.identity, lambda: worker.load_report(), prefix_changes)
        backends = PrefixBackends(cache, CacheAdmin(base.engine, cache), peers)
        worker = PrefillWorker(
            config,
            base.engine,
            base.identity,
            exports,
            backends,
            WorkerAudit(base.identity, base.engine),
            watchdog,
            status.notify,
            partial(ChunkRunner, base.engine, base.thread, watchdog),
        )
        stack.push_async_callback(worker.close)
        servicer = PrefillServicer(worker, spec)

        addresses = await stack.enter_async_context(
            serve_listeners(
                config,
                status,
                watchdog,
                base.probes,
                control=[prefill_service(servicer)],
                kv=Service(KV_SERVICE, KvServicer(exports, base.tickets).add_to_server),
                tls=base.tls,
                tickets=base.tickets,
                ledger=worker.ledger,
                cache=backends.cache_admin.list_tiers,
                clear=backends.cache_admin.clear,
                fail=worker.fail_engine,
                watch_failure=base.engine.watch_failure,
                measure=worker.set_gauges,
            )
        )
        yield PrefillApp(addresses, worker, servicer, cache, status, base.engine, config)
