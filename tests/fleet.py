"""A whole fleet in one process: the real services on real sockets, without the cost of starting interpreters.

    async with Fleet(checkpoint, dtype="float32") as fleet:
        prefill = await fleet.prefill(chunk_size=7, page_size=16)
        decode = await fleet.decode(page_size=256)
        client = await fleet.router([prefill], [decode])

A mixed worker needs neither: `await fleet.router(mixed=[await fleet.mixed()])`. Several routers may share workers.
Leaving the block stops everything, and fails if a worker still holds a page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

import decode_svc.app
import mixed_svc.app
import prefill_svc.app
import router.app
from baton import AsyncClient
from baton.config.router import RouterConfig
from baton.config.worker import DecodeConfig, MixedConfig, PrefillConfig
from baton.engine.contract import Engine
from baton.rpc.channel import control_channel
from baton.rpc.tls import Tls
from tests.certificates import SECRET

__all__ = ["SECRET", "Fleet", "serving"]

KV_MEMORY = 64 << 20


async def serving(address: str, tls: Tls | None = None) -> None:
    """Return when the router at this address serves."""
    async with control_channel(address, tls) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in call:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                call.cancel()
                return


class Fleet:
    """Starts workers and routers for one checkpoint; `settings` go to every worker."""

    def __init__(self, checkpoint: Path, **settings: Any) -> None:
        self._checkpoint = str(checkpoint)
        # A store has all the time that it wants: what it costs to wait less is for tests of just that.
        own = {"kv_memory": KV_MEMORY, "threads": 1, "served_model_name": "m", "cache_budget_s": 60.0}
        self._settings = {**own, **settings}
        self._stack = contextlib.AsyncExitStack()
        self.workers: list[Any] = []

    async def __aenter__(self) -> Fleet:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.__aexit__(*exc)
        for worker in self.workers:
            assert worker.engine.audit() == {}

    async def prefill(self, *, engine: Engine | None = None, **settings: Any) -> Any:
        config = PrefillConfig(model=self._checkpoint, **{"fleet_secret": SECRET, **self._settings, **settings})
        return await self._start(prefill_svc.app.run(config, engine=engine))

    async def decode(self, *, engine: Engine | None = None, **settings: Any) -> Any:
        config = DecodeConfig(model=self._checkpoint, **{**self._settings, **settings})
        return await self._start(decode_svc.app.run(config, engine=engine))

    async def mixed(self, *, engine: Engine | None = None, **settings: Any) -> Any:
        config = MixedConfig(model=self._checkpoint, **{"fleet_secret": SECRET, **self._settings, **settings})
        return await self._start(mixed_svc.app.run(config, engine=engine))

    async def router(
        self, prefill: Sequence[Any] = (), decode: Sequence[Any] = (), mixed: Sequence[Any] = (), **settings: Any
    ) -> AsyncClient:
        """Start a router over these workers; returns a client once it is ready."""
        app = await self.start_router(prefill, decode, mixed, **settings)
        await serving(app.address)
        return await self.client(app)

    async def start_router(
        self, prefill: Sequence[Any] = (), decode: Sequence[Any] = (), mixed: Sequence[Any] = (), **settings: Any
    ) -> Any:
        config = RouterConfig(
            prefill=tuple(worker.addresses.control for worker in prefill),
            decode=tuple(worker.addresses.control for worker in decode),
            mixed=tuple(worker.addresses.control for worker in mixed),
            **{"model": self._checkpoint, "served_model_name": "m", **settings},
        )
        return await self._stack.enter_async_context(router.app.run(config))

    async def client(self, app: Any) -> AsyncClient:
        return await self._stack.enter_async_context(AsyncClient(app.address))

    async def _start(self, app: Any) -> Any:
        worker = await self._stack.enter_async_context(app)
        self.workers.append(worker)
        return worker
