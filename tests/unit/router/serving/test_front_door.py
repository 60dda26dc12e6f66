"""The front door without any transport: a request goes in, updates come out, and everything ends with the block."""

import asyncio
from typing import cast

import pytest

from baton.errors import BatonError
from baton.request import FinishReason, Output, SamplingParams, TokenInfo
from router.output import OutputProcessor
from router.request import Request, TokenPrompt, UncheckedRequest
from router.request_runner import RequestRunner
from router.serving.front_door import ApiKeys, Caller, FrontDoor, StallGuard
from router.serving.threads import TenantThreads
from router.serving.validator import RequestValidator, ServedModel
from router.workers.pool import WorkerPool
from tests.unit.router.dispatching import FakePool, dispatcher

ONE = UncheckedRequest(prompt=TokenPrompt([1, 2]), size=2, make_params=lambda *given: SamplingParams(max_tokens=2))


class FakeRequestRunner:
    """Says one token at once, and the last one when it may."""

    def __init__(self) -> None:
        self.last = asyncio.Event()
        self.request: Request | None = None

    async def run(self, request: Request, output: OutputProcessor) -> None:
        self.request = request
        output.add(Output(0, 0, (TokenInfo(7),)))
        await self.last.wait()
        output.add(Output(0, 1, (TokenInfo(8),), FinishReason.LENGTH))
        output.close()


def door_of(request_runner: FakeRequestRunner) -> FrontDoor:
    model, pool = ServedModel("m", 300, (), None), FakePool()
    return FrontDoor(
        model,
        RequestValidator(model, lambda: 100, TenantThreads(1)),
        cast(WorkerPool, pool),
        dispatcher(pool),
        cast(RequestRunner, request_runner),
        ApiKeys(),
        StallGuard(60.0),
        request_timeout_s=100.0,
    )


async def test_updates_come_until_the_last_and_the_deadline_goes_with_the_request() -> None:
    request_runner = FakeRequestRunner()
    door, tokens = door_of(request_runner), []
    async with asyncio.timeout(60), door.generate(ONE, Caller("t"), 1e9) as (checked, updates):
        async for update in updates:
            tokens += [token.token_id for delta in update.deltas.values() for token in delta.tokens]
            request_runner.last.set()
    assert tokens == [7, 8]
    request = request_runner.request
    assert request is not None
    assert (request.id, request.tenant, request.deadline) == (checked.id, "t", 1e9)


async def test_a_request_without_a_deadline_gets_that_of_the_router() -> None:
    request_runner, now = FakeRequestRunner(), asyncio.get_running_loop().time
    before = now()
    async with asyncio.timeout(60), door_of(request_runner).generate(ONE, Caller(), None) as (_, updates):
        await anext(updates)
    assert request_runner.request is not None
    assert before + 100 <= request_runner.request.deadline <= now() + 100


async def test_an_unexpected_error_is_logged_once_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BatonError, match=r"^internal error in the router \(KeyError\)$"):
        async with asyncio.timeout(60), door_of(FakeRequestRunner()).generate(ONE, Caller(), None) as (checked, _):
            raise KeyError
    (record,) = caplog.records
    assert vars(record)["request_ids"] == (checked.id,)
