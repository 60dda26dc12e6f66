"""Starts and stops a decode worker: engine, service, listeners. They stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine, KvHandle
from baton.kv.prefix.contract import PrefixCache
from baton.pb import decode_pb2_grpc
from baton.request import Handoff, RemoteExport
from baton.rpc.tls import Tls
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import fetch as fetch_shards
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvChannels, KvServicer, open_sources
from baton.worker.prefix_cache import open_cache
from baton.worker.start import Service, WorkerAddresses, serve_listeners, start_runtime
from baton.worker.status import WorkerRole
from decode_svc.service import DecodeService
from decode_svc.servicer import DecodeServicer
from decode_svc.worker import FetchKv

DECODE_SERVICE = "baton.v1.Decode"


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
        fetch = await stack.enter_async_context(_fetching(config, base.engine, base.identity.consumer, base.tls))
        service = DecodeService(config, base.engine, base.identity, fetch, exports, cache)

        def add_decode(server: grpc.aio.Server) -> None:
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service.worker), server)

        addresses = await stack.enter_async_context(
            serve_listeners(
                config,
                service.status,
                service.progress,
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
        turning = service.start(base.thread)
        stack.push_async_callback(service.close, turning)
        yield DecodeApp(addresses, service, cache, base.engine, config)


@contextlib.asynccontextmanager
async def _fetching(config: DecodeConfig, engine: Engine, consumer: str, tls: Tls | None) -> AsyncIterator[FetchKv]:
    """Yield a function that fetches over gRPC, as `consumer`, with the limits of the settings."""
    channels = KvChannels(tls)

    async def fetch_kv(source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff:
        limit_s = config.fetch_limit_s(tokens)
        async with open_sources(
            channels,
            source,
            timeout_s=limit_s,
            stall_timeout_s=config.fetch_stall_s,
            consumer=consumer,
        ) as sources:
            return await fetch_shards(sources, engine, handle, tokens=tokens, first=first, timeout_s=limit_s)

    try:
        yield fetch_kv
    finally:
        await channels.close()
