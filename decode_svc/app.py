"""Starts and stops a decode worker: engine, service, listeners; in reverse at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.digest import tokenizer_digest
from baton.engine.contract import Engine
from baton.model.checkpoint import resolve
from baton.pb import decode_pb2_grpc
from baton.transfer.exports import Exports
from baton.transfer.fetcher import fetch
from baton.transfer.servicer import KvServicer
from baton.worker.listeners import Addresses, Service, listeners
from baton.worker.status import WorkerRole, new_identity
from baton.worker.thread import EngineThread
from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService
from decode_svc.servicer import DecodeServicer

DECODE_SERVICE = "baton.v1.Decode"
KV_SERVICE = "baton.v1.Kv"


@dataclass(frozen=True, slots=True)
class App:
    """A running decode worker."""

    addresses: Addresses
    service: DecodeService
    engine: Engine
    config: DecodeConfig

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.service.failed

    async def drain(self) -> None:
        """Refuse new reservations and let the accepted attempts finish, for `drain_s` seconds at most."""
        await self.service.drain(self.config.drain_s)


@contextlib.asynccontextmanager
async def run(config: DecodeConfig, *, engine: Engine | None = None) -> AsyncIterator[App]:
    """Run a decode worker until the block ends; `engine` None builds the torch engine from the settings.

    An engine that is passed in stays open, with all its pages back. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        thread = EngineThread("decode-engine")
        stack.push_async_callback(thread.close)
        directory = await asyncio.to_thread(resolve, config.checkpoint)
        digest = await asyncio.to_thread(tokenizer_digest, directory)
        if engine is None:
            engine = await thread.run(_build, config)
            stack.callback(engine.close)
        identity = new_identity(config, WorkerRole.DECODE, engine.spec, digest, converts_kv=config.convert_kv)
        exports = Exports(engine, identity.incarnation)
        stack.callback(exports.close)
        service = DecodeService(config, engine, identity, fetch)

        def add_decode(server: grpc.aio.Server) -> None:
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service), server)

        addresses = await stack.enter_async_context(
            listeners(
                config,
                service.status,
                service.progress,
                control=Service(DECODE_SERVICE, add_decode),
                kv=Service(KV_SERVICE, KvServicer(exports).add_to_server),
            )
        )
        turning = service.start(thread)
        stack.push_async_callback(service.close, turning)
        yield App(addresses, service, engine, config)


def _build(config: DecodeConfig) -> Engine:
    from baton.engine.factory import build

    return build(config.engine_config())
