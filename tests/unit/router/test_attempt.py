"""An attempt's own race: what has arrived against a deadline that has passed."""

import asyncio
import threading
import time
from typing import Any, cast

import pytest

import router.request_runner
from baton.config.router import RouterConfig
from baton.errors import DeadlineExceeded
from baton.request import FinishReason, FirstToken, Prefilled, SamplingParams, TokenInfo
from router.output import OutputProcessor
from router.request import Request
from router.request_runner import Attempt, AttemptDeps, RequestState
from router.retries import RetryHistory
from router.serving.threads import TenantThreads
from router.workers.failures import Deliver
from router.workers.pool import WorkerPool
from router.workers.prefill_call import ExportAbandoner
from tests.unit.router.dispatching import FakePool, dispatcher, settle


def attempt_of(
    pool: FakePool, threads: TenantThreads, *, deadline: float | None = None, tenant: str = ""
) -> tuple[Attempt, OutputProcessor]:
    """An attempt at one token after a prompt of two; without a `deadline` it has a minute."""
    now = asyncio.get_running_loop().time
    arrived = now()
    until = arrived + 60 if deadline is None else deadline
    config = RouterConfig(prefill=("p:1",), decode=("d:1",))
    deps = AttemptDeps(cast(WorkerPool, pool), dispatcher(pool), config, ExportAbandoner(), None, threads)
    request = Request("r", [1, 2], SamplingParams(max_tokens=1, seed=1), 1, arrived, until, tenant=tenant)
    output = OutputProcessor(request, now)
    return Attempt(deps, RequestState(request, output), (0,), RetryHistory()), output


async def outcome(monkeypatch: pytest.MonkeyPatch, *, arrives: bool) -> OutputProcessor:
    """Run an attempt whose last token arrives after its deadline's timer went off, and before it is judged; or not."""
    loop = asyncio.get_running_loop()
    # Late enough for a slow machine to come to the prefill before it.
    deadline = loop.time() + 1.0

    async def prefill(*_: Any, deliver: Deliver, **__: Any) -> None:
        def deliver_last() -> None:
            if arrives:
                deliver(Prefilled((FirstToken(0, TokenInfo(7), FinishReason.LENGTH),), 0))

        def block() -> None:
            time.sleep(max(0.0, deadline + 0.05 - loop.time()))
            # One more turn of the loop, in which the timer goes off, and the token comes in the next.
            loop.call_soon(loop.call_soon, deliver_last)

        loop.call_soon(block)
        await loop.create_future()

    monkeypatch.setattr(router.request_runner, "call_prefill", prefill)
    attempt, output = attempt_of(FakePool(), TenantThreads(1), deadline=deadline)
    await attempt.run(0.0)
    return output


async def test_a_token_that_has_arrived_beats_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    output = await outcome(monkeypatch, arrives=True)
    assert output.output_ids(0) == [7]
    assert output.unfinished([0]) == ()


async def test_an_attempt_without_a_token_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineExceeded, match=r"^the request's deadline passed after 1\.\d s$"):
        await outcome(monkeypatch, arrives=False)


async def test_a_long_prompt_waits_for_its_tenants_threads_before_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.request_runner, "LARGE_REQUEST", 1)

    async def prefill(*_: Any, deliver: Deliver, **__: Any) -> None:
        deliver(Prefilled((FirstToken(0, TokenInfo(7), FinishReason.LENGTH),), 0))

    monkeypatch.setattr(router.request_runner, "call_prefill", prefill)
    pool, loop, threads = FakePool(), asyncio.get_running_loop(), TenantThreads(1, 1)
    busy, go = asyncio.Event(), threading.Event()

    def work() -> None:
        loop.call_soon_threadsafe(busy.set)
        go.wait(60)

    working = asyncio.create_task(threads.run("t", work))
    await busy.wait()
    made, output = attempt_of(pool, threads, tenant="t")
    attempt = asyncio.create_task(made.run(0.0))
    await settle()
    early = pool.assignments
    go.set()
    await asyncio.gather(working, attempt)
    assert (early, output.output_ids(0)) == (0, [7])
