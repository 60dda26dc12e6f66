"""Starts and stops a prefill worker: engine, prefix cache, worker, listeners; in reverse at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.digest import tokenizer_digest
from baton.engine.contract import Engine
from baton.kv.prefix import PrefixCache, open_prefix_cache
from baton.model.checkpoint import resolve
from baton.pb import prefill_pb2_grpc
from baton.transfer.exports import Exports
from baton.transfer.servicer import SERVICE as KV_SERVICE
from baton.transfer.servicer import KvServicer
from baton.worker.listeners import Addresses, Service, listeners
from baton.worker.progress import Progress
from baton.worker.status import StatusHub, WorkerRole, new_identity
from baton.worker.thread import EngineThread
from prefill_svc.config import PrefillConfig
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
        except TimeoutError:
            _log.warning("the drain is cut short after %g s", self.config.drain_s)


@contextlib.asynccontextmanager
async def run(config: PrefillConfig, *, engine: Engine | None = None) -> AsyncIterator[App]:
    """Run a prefill worker until the block ends; `engine` None builds the torch engine from the settings.

    An engine that is passed in stays open, with all its pages back. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        thread = EngineThread("prefill-engine")
        stack.push_async_callback(thread.close)
        directory = await asyncio.to_thread(resolve, config.checkpoint)
        digest = await asyncio.to_thread(tokenizer_digest, directory)
        if engine is None:
            engine = await thread.run(_build, config)
            stack.callback(engine.close)
        spec = engine.spec
        cache = open_prefix_cache(config.redis, spec.kv_format, config.fleet_secret)
        stack.push_async_callback(cache.close)
        await cache.check()
        identity = new_identity(config, WorkerRole.PREFILL, spec, digest)
        exports = Exports(engine, identity.incarnation, lease_s=config.lease_s)
        progress = Progress()
        status = StatusHub(identity, lambda: worker.load())
        worker = PrefillWorker(config, engine, thread, exports, cache, progress, status.changed)
        stack.push_async_callback(worker.close)

        def add_prefill(server: grpc.aio.Server) -> None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker, spec), server)

        addresses = await stack.enter_async_context(
            listeners(
                config,
                status,
                progress,
                control=Service(PREFILL_SERVICE, add_prefill),
                kv=Service(KV_SERVICE, KvServicer(exports).add_to_server),
            )
        )
        yield App(addresses, worker, cache, status, engine, config)


def _build(config: PrefillConfig) -> Engine:
    from baton.engine.factory import build

    return build(config.engine_config())
