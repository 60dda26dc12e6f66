"""The front door without any transport: a request goes in, updates come out, and everything ends with the block."""

import asyncio
from typing import cast

import pytest

from baton.errors import Overloaded, Unavailable
from baton.request import FinishReason, Output, SamplingParams, TokenInfo
from router.output import OutputProcessor
from router.request_runner import RequestRunner
from router.serving.front_door import Caller, FrontDoor, StallGuard, Tenants
from router.serving.threads import TenantThreads
from router.serving.validator import GenerateRequest, Request, RequestValidator, ServedModel, TokenPrompt
from router.workers.pool import Pool
from tests.unit.router.dispatching import FakePool, dispatcher

ONE = GenerateRequest(prompt=TokenPrompt([1, 2]), size=2, make_params=lambda vocabulary: SamplingParams(max_tokens=2))


class FakeRequestRunner:
    """Says one token at once, and the last one when it may."""

    def __init__(self) -> None:
        self.last = asyncio.Event()
        self.request: Request | None = None
        self.running = 0

    async def run(self, request: Request, output: OutputProcessor) -> None:
        self.request, self.running = request, self.running + 1
        try:
            output.add(Output(0, 0, (TokenInfo(7),)))
            await self.last.wait()
            output.add(Output(0, 1, (TokenInfo(8),), FinishReason.LENGTH))
            output.close()
        finally:
            self.running -= 1


def made() -> tuple[FrontDoor, FakeRequestRunner]:
    model, request_runner = ServedModel("m", 300, (), None), FakeRequestRunner()
    validator = RequestValidator(model, lambda: 100, TenantThreads(1))
    pool = FakePool()
    place, serve = dispatcher(pool), cast(RequestRunner, request_runner)
    return FrontDoor(model, validator, cast(Pool, pool), place, serve, Tenants(), StallGuard(60.0)), request_runner


async def test_updates_come_until_the_last_and_the_deadline_goes_with_the_request() -> None:
    door, request_runner = made()
    tokens = []
    async with asyncio.timeout(60), door.generate(ONE, Caller("t"), 1e9) as (request_id, updates):
        async for update in updates:
            tokens += [token.token_id for delta in update.deltas.values() for token in delta.tokens]
            request_runner.last.set()
    assert tokens == [7, 8]
    assert (request_runner.request.id, request_runner.request.tenant, request_runner.request.deadline) == (
        request_id,
        "t",
        1e9,
    )


async def test_the_end_of_the_block_ends_the_request() -> None:
    door, request_runner = made()
    async with asyncio.timeout(60):
        async with door.generate(ONE, Caller(), None) as (_, updates):
            await anext(updates)
            assert (request_runner.running, door.running) == (1, 1)
        assert (request_runner.running, door.running) == (0, 0)


async def test_a_tenant_has_no_more_streams_than_it_may() -> None:
    door, _ = made()
    caller = Caller("t", max_streams=1)
    async with door.generate(ONE, caller, None):
        with pytest.raises(Overloaded, match="max_streams"):
            async with door.generate(ONE, caller, None):
                pass


async def test_a_drain_refuses_new_requests_and_waits_for_those_that_run() -> None:
    door, request_runner = made()
    async with asyncio.timeout(60):
        async with door.generate(ONE, Caller(), None) as (_, updates):
            await anext(updates)
            draining = asyncio.create_task(door.drain())
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="the router is draining"):
                async with door.generate(ONE, Caller(), None):
                    pass
            assert not draining.done()
            request_runner.last.set()
            assert [update.usage is not None async for update in updates][-1]
        await draining
