"""Addresses that a pool of workers keeps dialling."""

import asyncio
import socket

from baton.config.router import RouterConfig
from baton.worker.status import WorkerRole
from router.workers.pool import Pool


async def test_a_worker_that_is_listed_again_while_it_is_given_up_is_dialled_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    pool = Pool(RouterConfig(prefill=("dns:///workers:1",), decode=("127.0.0.1:1",)), "router", "")
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
