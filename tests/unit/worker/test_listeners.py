"""The three listeners of a worker on real sockets."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.worker import WorkerConfig
from baton.engine.contract import EngineSpec
from baton.engine.fake import FakeEngine
from baton.kv.format import KvFormat, KvPart
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.process.load_progress import LoadProgress
from baton.rpc.channel import control_channel
from baton.worker import health as health_module
from baton.worker import start
from baton.worker.health import AuditedService, Watchdog
from baton.worker.start import LOAD_STALL_S, Service, WorkerAddresses, start_runtime
from baton.worker.status import StatusHub, WorkerLoad, WorkerRole, new_identity, status_from_proto

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)),), layers=3, block_size=16)
SPEC = EngineSpec("print", FORMAT, 100, 64, frozenset({1}), 16, 8, 4)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def nothing(server: grpc.aio.Server) -> None:
    """Add no service."""


async def ops_answer(address: str, path: str) -> tuple[int, str]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


async def ops_status(address: str, path: str) -> int:
    return (await ops_answer(address, path))[0]


@contextlib.asynccontextmanager
async def listeners(
    config: WorkerConfig, watchdog: Watchdog, fail: Callable[[Exception], object] = lambda _: None
) -> AsyncIterator[tuple[StatusHub, WorkerAddresses]]:
    """The status and the addresses of a worker with one service, which fails by `fail`."""
    async with start_runtime(config, WorkerRole.DECODE, WorkerLoad, engine=FakeEngine(pages=4)) as base:
        runtime = replace(base, watchdog=watchdog)
        runtime.audit.add(cast(AuditedService, SimpleNamespace(fail_engine=fail)))
        async with runtime.serve([Service("x.Control", nothing)], lambda: None) as addresses:
            yield runtime.status, addresses


async def test_watchers_learn_of_worker_and_drain_and_health_follows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "HANG_CHECKS", 1_000_000)
    config = WorkerConfig(stall_s=0.05)
    now = 0.0
    watchdog = Watchdog(lambda: now)
    async with (
        listeners(config, watchdog) as (hub, addresses),
        control_channel(addresses.control) as channel,
    ):
        watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        first = status_from_proto(await watch.read())
        assert first.identity == hub.identity
        assert first.identity.shards[0].kv_address == f":{addresses.kv.split(':')[1]}"
        assert await ops_status(addresses.ops, "/ready") == 200

        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x.Control"))
        while (await health.read()).status != SERVING:
            pass
        watchdog.record()
        now = 1.0
        assert (await health.read()).status == NOT_SERVING
        assert await ops_status(addresses.ops, "/ready") == 503
        assert await ops_status(addresses.ops, "/live") == 200
        while not (await watch.read()).stalled:
            pass
        watchdog.set_idle()
        while (await watch.read()).stalled:
            pass
        assert (await health.read()).status == SERVING

        hub.drain()
        while not (await watch.read()).draining:
            pass
        assert await ops_status(addresses.ops, "/ready") == 503
        health.cancel()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watch-engine"]


@pytest.mark.parametrize("drains", [True, False])
async def test_a_watcher_hears_of_a_drain_that_ends_at_once(drains: bool) -> None:
    hub = StatusHub(new_identity(WorkerConfig(), WorkerRole.PREFILL, SPEC, "digest"), WorkerLoad)
    watch = hub.watch()
    said = [(await anext(watch)).draining]
    if drains:
        hub.drain()
    hub.close()
    said += [status.draining async for status in watch]
    assert said == ([False, True] if drains else [False])


async def test_a_worker_whose_engine_hangs_is_not_live_and_fails() -> None:
    config, watchdog = WorkerConfig(stall_s=0.01), Watchdog()
    failures: asyncio.Queue[Exception] = asyncio.Queue()
    async with listeners(config, watchdog, failures.put_nowait) as (_, addresses):
        assert await ops_status(addresses.ops, "/live") == 200
        watchdog.record()
        error = await asyncio.wait_for(failures.get(), 60)
        assert str(error).endswith("it hangs (--stall-s)")
        while await ops_status(addresses.ops, "/live") != 503:
            pass


async def test_an_advertised_address_replaces_the_bound_one() -> None:
    config = WorkerConfig(kv_advertise="kv.example:7001")
    async with listeners(config, Watchdog()) as (hub, _):
        assert hub.identity.shards[0].kv_address == "kv.example:7001"


async def test_probes_answer_while_the_model_loads_and_live_follows_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loading, go_on, now = threading.Event(), threading.Event(), 0.0

    def build(config: WorkerConfig, progress: LoadProgress) -> FakeEngine:
        progress._clock = lambda: now
        progress.begin("reading the weights", 8 << 20)
        progress.add(2 << 20)
        loading.set()
        assert go_on.wait(60)
        return FakeEngine(pages=4)

    address = ""

    async def load() -> str:
        async with start_runtime(WorkerConfig(), WorkerRole.DECODE, WorkerLoad) as runtime:
            return runtime.probes.address

    monkeypatch.setattr(start, "_build", build)
    monkeypatch.setattr(start, "_LOG_PROGRESS_S", 0.01)
    serve = start.serve_ops

    @contextlib.asynccontextmanager
    async def serve_ops(*args: Any, **given: Any) -> AsyncIterator[Any]:
        nonlocal address
        async with serve(*args, **given) as listener:
            address = listener.address
            yield listener

    monkeypatch.setattr(start, "serve_ops", serve_ops)
    starting = asyncio.create_task(load())
    assert await asyncio.to_thread(loading.wait, 60)
    try:
        assert await ops_answer(address, "/live") == (200, "live\n")
        assert await ops_answer(address, "/ready") == (503, "loading: reading the weights: 2 of 8 MiB (25 %)\n")
        while "INFO loading: reading the weights: 2 of 8 MiB" not in levels(caplog):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        now = LOAD_STALL_S
        status, words = await ops_answer(address, "/live")
        assert (status, words[:24]) == (503, "no progress for 120 s: r")
        while "ERROR loading: no progress for 120 s: reading the weights" not in levels(caplog):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    finally:
        go_on.set()
    assert await starting == address


def levels(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)
