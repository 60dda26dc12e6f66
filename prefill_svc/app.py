"""Starts and stops a prefill worker: engine, prefix cache, worker, listeners. They stop in reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial

import grpc

from baton.config.worker import PrefillConfig
from baton.engine.contract import Engine
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.worker.start import Service, WorkerAddresses, WorkerApp, WorkerRuntime, start_runtime
from baton.worker.status import WorkerRole
from prefill_svc.prefix import PeerFetcher
from prefill_svc.servicer import PrefillServicer
from prefill_svc.worker import ChunkRunner, PrefillWorker


class PrefillApp(WorkerApp):
    """A running prefill worker."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        addresses: WorkerAddresses,
        drain_s: float,
        worker: PrefillWorker,
        servicer: PrefillServicer,
    ) -> None:
        super().__init__(runtime, addresses, drain_s, [worker])
        self.worker = worker
        self._servicer = servicer

    async def wait_finished(self) -> None:
        """As in WorkerApp; answers are sent too."""
        await super().wait_finished()
        await self._servicer.wait_sent()


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
        base = await stack.enter_async_context(
            start_runtime(
                config,
                WorkerRole.PREFILL,
                lambda: worker.load_report(),
                engine=engine,
                cache_memory=config.cache_memory,
                lease_s=config.lease_s,
            )
        )
        peers = PeerFetcher(base.engine, base.tls, base.identity.consumer, config.cache_budget_s)
        worker = PrefillWorker(config, base, peers, partial(ChunkRunner, base.engine, base.thread, base.watchdog))
        worker.start()
        stack.push_async_callback(worker.close)
        servicer = PrefillServicer(worker, base.engine.spec)
        addresses = await stack.enter_async_context(base.serve([prefill_service(servicer)], worker.set_gauges))
        yield PrefillApp(base, addresses, config.drain_s, worker, servicer)
