"""Starts and stops a prefill worker: engine, prefix cache, worker, listeners; in reverse at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.config.prefill import PrefillConfig
from baton.engine.contract import Engine
from baton.kv.prefix import PrefixCache
from baton.pb import prefill_pb2_grpc
from baton.transfer.exports import Exports
from baton.transfer.servicer import SERVICE as KV_SERVICE
from baton.transfer.servicer import KvServicer
from baton.worker.caches import Caches
from baton.worker.listeners import Addresses, Service, listeners
from baton.worker.prefix_news import PrefixNews
from baton.worker.progress import Progress
from baton.worker.start import prefix_cache, started
from baton.worker.status import StatusHub, WorkerRole
from prefill_svc.peers import Peers
from prefill_svc.prefix import Tiers
from prefill_svc.servicer import PrefillServicer
from prefill_svc.worker import PrefillWorker

PREFILL_SERVICE = "baton.v1.Prefill"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class App:
    """A running prefill worker."""

    addresses: Addresses
    worker: PrefillWorker
    cache: PrefixCache
    status: StatusHub
    engine: Engine
    config: PrefillConfig

    @property
    def listening(self) -> str:
        """Where it listens."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.worker.failed

    async def drain(self) -> None:
        """Refuse new work, and let jobs and pulls of finished KV end, for `drain_s` seconds at most."""
        self.worker.refuse()
        self.status.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.worker.finished()
            _log.info("drained")
        except TimeoutError:
            _log.warning("the drain is cut short after %g s", self.config.drain_s)


@contextlib.asynccontextmanager
async def run(config: PrefillConfig, *, engine: Engine | None = None) -> AsyncIterator[App]:
    """Run a prefill worker until the block ends; `engine` None builds the torch engine from the settings.

    An engine that is passed in stays open, with all its pages back. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(started(config, WorkerRole.PREFILL, engine=engine))
        spec, incarnation = base.engine.spec, base.identity.incarnation
        consumer = base.identity.principal or incarnation
        cache = prefix_cache(config, spec.kv_format, cache_memory=config.cache_memory)
        stack.push_async_callback(cache.close)
        await cache.check()
        exports = Exports(base.engine, incarnation, lease_s=config.lease_s, shards=base.identity.shards)
        peers = Peers(base.engine, base.tls, consumer, config.cache_budget_s)
        progress = Progress()
        news = PrefixNews(base.engine, cache, lambda: status.changed())
        stack.callback(news.close)
        status = StatusHub(base.identity, lambda: worker.load(), news)
        tiers = Tiers(cache, Caches(base.engine, cache), peers)
        worker = PrefillWorker(
            config, base.engine, base.thread, base.identity, exports, tiers, progress, status.changed
        )
        stack.push_async_callback(worker.close)

        def add_prefill(server: grpc.aio.Server) -> None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker, spec), server)

        addresses = await stack.enter_async_context(
            listeners(
                config,
                status,
                progress,
                control=Service(PREFILL_SERVICE, add_prefill),
                kv=Service(KV_SERVICE, KvServicer(exports, base.tickets).add_to_server),
                tls=base.tls,
                tickets=base.tickets,
                ledger=worker.ledger,
                cache=tiers.report.tiers,
                clear=tiers.report.clear,
            )
        )
        yield App(addresses, worker, cache, status, base.engine, config)
