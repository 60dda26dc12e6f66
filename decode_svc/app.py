"""Starts and stops a decode worker: engine, service, listeners. They stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine
from baton.kv.prefix.contract import PrefixCache
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import ExportFetcher
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvServicer
from baton.worker.health import Watchdog
from baton.worker.prefix_cache import CacheAdmin, open_worker_cache
from baton.worker.start import Service, WorkerAddresses, serve_listeners, start_runtime
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerRole
from decode_svc.messages import FailureKind
from decode_svc.servicer import DecodeServicer
from decode_svc.worker import DecodeWorker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeApp:
    """A running decode worker."""

    addresses: WorkerAddresses
    worker: DecodeWorker
    cache: PrefixCache
    status: StatusHub
    engine: Engine
    config: DecodeConfig

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.worker.failed

    async def drain(self) -> None:
        """Serve until the routers have left, attempts have ended, and blocks were stored or dropped.

        It takes at most `drain_s` seconds. Attempts that are left after that are ended. Routers ask for no new
        reservations once they have read that the worker drains.
        """
        grace_s = self.config.drain_s
        self.status.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self.status.wait_unwatched()
                self.worker.refuse()
                await self.worker.wait_finished()
            _log.info("drained")
        except TimeoutError:
            self.worker.refuse()
            _log.info("drained: %d sequences moved after %g s", self.worker.attempts.held_sequences, grace_s)
            self.worker.fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")


def decode_service(worker: DecodeWorker) -> Service:
    """The service of a control listener."""

    def add(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker), server)

    return Service(decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name, add)


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
        cache = open_worker_cache(config, base.engine.spec.kv_format)
        stack.push_async_callback(cache.close)
        await cache.check()
        exports = ExportRegistry(base.engine, base.identity.incarnation, shards=base.identity.shards)
        fetcher = ExportFetcher(base.engine, base.tls, base.identity.consumer, config.fetch_silence_s)
        stack.push_async_callback(fetcher.close)
        watchdog = Watchdog(work_counter=base.engine.work_counter)
        prefix_changes = PrefixChangeFeed(base.engine, cache, lambda: status.notify())
        stack.callback(prefix_changes.close)
        status = StatusHub(base.identity, lambda: worker.load_report(), prefix_changes)
        cache_admin = CacheAdmin(base.engine, cache)
        worker = DecodeWorker(
            config, base.engine, base.identity, fetcher, exports, cache, cache_admin, watchdog, status.notify
        )

        addresses = await stack.enter_async_context(
            serve_listeners(
                config,
                status,
                watchdog,
                base.probes,
                control=[decode_service(worker)],
                kv=Service(KV_SERVICE, KvServicer(exports, base.tickets).add_to_server),
                tls=base.tls,
                tickets=base.tickets,
                ledger=worker.ledger,
                cache=cache_admin.list_tiers,
                clear=cache_admin.clear,
                fail=worker.fail_engine,
                watch_failure=base.engine.watch_failure,
                measure=worker.set_gauges,
            )
        )
        worker.start(base.thread)
        stack.push_async_callback(worker.close)
        stack.callback(status.drain)
        yield DecodeApp(addresses, worker, cache, status, base.engine, config)
