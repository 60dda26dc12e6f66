"""The end of a RequestRunner: it begins nothing after it."""

import asyncio
from typing import cast

import pytest

from baton.config.router import RouterConfig
from baton.errors import Unavailable
from baton.request import SamplingParams
from router.output import OutputProcessor
from router.request import Request
from router.request_runner import RequestRunner
from router.serving.threads import TenantThreads
from router.workers.pool import WorkerPool
from tests.unit.router.dispatching import FULL, FakePool, dispatcher


async def test_a_request_after_the_stop_is_not_begun() -> None:
    pool, config = FakePool(d=FULL), RouterConfig(prefill=("p:1",), decode=("d:1",))
    request_runner = RequestRunner(cast(WorkerPool, pool), dispatcher(pool), config, TenantThreads(1))
    loop = asyncio.get_running_loop()
    outputs = []
    async with asyncio.timeout(60):
        for name in ("running", "late"):
            request = Request(name, [1, 2], SamplingParams(max_tokens=2, seed=1), 2, loop.time(), loop.time() + 60)
            outputs.append(OutputProcessor(request, loop.time))
            task = asyncio.create_task(request_runner.run(request, outputs[-1]))
            if name == "running":
                await asyncio.sleep(0)
                assert (await request_runner.ledger()).entries
            request_runner.stop()
            await asyncio.gather(task, return_exceptions=True)
        await request_runner.wait_stopped()
    assert not (await request_runner.ledger()).entries
    for output in outputs:
        with pytest.raises(Unavailable, match="the router is stopping"):
            await output.queue.take()
