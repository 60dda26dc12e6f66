"""Starts and stops a decode worker: engine, service, listeners. They stop in reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.transfer.fetcher import ExportFetcher
from baton.worker.start import Service, WorkerAddresses, WorkerApp, WorkerRuntime, start_runtime
from baton.worker.status import WorkerRole
from decode_svc.servicer import DecodeServicer
from decode_svc.worker import DecodeWorker


class DecodeApp(WorkerApp):
    """A running decode worker."""

    def __init__(
        self, runtime: WorkerRuntime, addresses: WorkerAddresses, drain_s: float, worker: DecodeWorker
    ) -> None:
        super().__init__(runtime, addresses, drain_s, [worker])
        self.worker = worker


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
        # Decode writes to the cache and never reads from it, so copies in host memory would be useless.
        base = await stack.enter_async_context(
            start_runtime(
                config,
                WorkerRole.DECODE,
                lambda: worker.load_report(),
                engine=engine,
                converts_kv=config.convert_kv,
            )
        )
        fetcher = ExportFetcher(base.engine, base.tls, base.identity.consumer, config.fetch_silence_s)
        stack.push_async_callback(fetcher.close)
        worker = DecodeWorker(config, base, fetcher)
        addresses = await stack.enter_async_context(base.serve([decode_service(worker)], worker.set_gauges))
        worker.start(base.thread)
        stack.push_async_callback(worker.close)
        stack.callback(base.status.drain)
        yield DecodeApp(base, addresses, config.drain_s, worker)
