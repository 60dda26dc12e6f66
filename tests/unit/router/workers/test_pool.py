"""Workers that a pool watches, and addresses that it keeps dialling."""

import asyncio
import logging
import socket

import pytest

from baton.config.router import RouterConfig
from baton.pb.worker_pb2_grpc import add_WorkerServicer_to_server
from baton.rpc.server import listen
from baton.worker.status import StatusHub, WorkerIdentity, WorkerLoad, WorkerRole, WorkerServicer
from router.dispatcher import Dispatcher
from router.workers.pool import WorkerPool
from tests.unit.router.dispatching import KV


async def test_each_status_lets_refused_requests_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.status.MAX_INTERVAL_S", 0.05)
    identity = WorkerIdentity("p", WorkerRole.PREFILL, "i", "m", "f", KV, False, "t", 64, (KV.whole,))
    status = StatusHub(identity, WorkerLoad)

    def add(server: object) -> None:
        add_WorkerServicer_to_server(WorkerServicer(status), server)

    async with listen("127.0.0.1:0", insecure=False, add=add, services=[], grace=0) as listener:
        status.advertise(":1")
        config = RouterConfig(prefill=(listener.address,), decode=("127.0.0.1:1",), served_model_name="m")
        pool = WorkerPool(config, "router", "t")
        scheduler, identities = Dispatcher(pool, config).scheduler, set()
        async with asyncio.timeout(60), pool.run():
            while scheduler.fleet_epoch < 5:
                identities.update(each.incarnation for each in pool.identities)
                await asyncio.sleep(0.01)
        status.close()
    assert identities == {"i"}


async def test_a_worker_that_is_listed_again_while_it_is_given_up_is_dialled_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    pool = WorkerPool(RouterConfig(prefill=("dns:///workers:1",), decode=("127.0.0.1:1",)), "router", "")
    found = pool._finder(WorkerRole.PREFILL)
    found({address})
    link, watching = pool._links[WorkerRole.PREFILL, address]
    close, closing, listed = link.channel.close, asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        closing.set()
        await listed.wait()
        await close()

    link.channel.close = slowly
    async with asyncio.timeout(60):
        # Nobody listens there, so the watch ends, and with it what is not listed.
        found(set())
        await closing.wait()
        found({address})
        listed.set()
        await watching
        await asyncio.sleep(0)
    again, dialling = pool._links[WorkerRole.PREFILL, address]
    assert again is not link
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert not pool._links


async def test_a_new_worker_that_does_not_listen_yet_is_no_warning_until_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    pool = WorkerPool(RouterConfig(prefill=(address,), decode=(address,)), "router", "")
    async with asyncio.timeout(60), pool.run():
        while caplog.text.count("does not listen yet") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        links = [link for link, _ in pool._links.values()]
        for link in links:
            link._log_absence("again")
        assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
        for link in links:
            link._expected_by = 0.0
        while caplog.text.count("has not listened for 600 s") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for link in links:
            link._log_absence("again")
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING", "WARNING"]
