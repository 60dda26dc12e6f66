"""A RequestRunner from request to end, with workers that answer as the test says; no network."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest

import router.request_runner
from baton.config.router import RouterConfig
from baton.errors import DeadlineExceeded, EngineError, Overloaded, TransferError, Unavailable
from baton.pb import prefill_pb2
from baton.request import FinishReason, FirstToken, Prefilled, ReserveResult, SamplingParams, TokenInfo
from baton.telemetry.metrics import PLACEMENTS
from router.output import OutputProcessor
from router.request import Request
from router.request_runner import RequestRunner
from router.serving.threads import TenantThreads
from router.workers.failures import Blame, Cause, Deliver, FailureEvent
from router.workers.pool import WorkerPool
from router.workers.prefill_call import ExportAbandoner, PrefillMessage
from tests.metrics import count
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import FULL, GRANTED, FakePool, dispatcher


def runner(pool: FakePool) -> RequestRunner:
    config = RouterConfig(prefill=("p:1",), decode=("d:1",))
    return RequestRunner(cast(WorkerPool, pool), dispatcher(pool), config, TenantThreads(1))


def requested(name: str = "r", *, n: int = 1, seconds: float = 60.0) -> tuple[Request, OutputProcessor]:
    """A request for two tokens after a prompt of two, and its output."""
    now = asyncio.get_running_loop().time
    params = SamplingParams(max_tokens=2, seed=1, n=n)
    request = Request(name, [1, 2], params, 2, now(), now() + seconds)
    return request, OutputProcessor(request, now)


Answer = Callable[[prefill_pb2.PrefillRequest, Deliver], None]


def answer_prefill(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """Let `answer` deliver the events of each call to a prefill worker."""

    async def call(assignment: object, message: PrefillMessage, *, deliver: Deliver, **_: Any) -> None:
        answer(prefill_pb2.PrefillRequest.FromString(message.data), deliver)

    monkeypatch.setattr(router.request_runner, "call_prefill", call)


async def test_after_a_token_each_choice_is_tried_again_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def answer(asked: prefill_pb2.PrefillRequest, deliver: Deliver) -> None:
        choices, index = list(asked.choice_indexes), len(asked.output_token_ids)
        calls.append((choices, list(asked.output_token_ids)))
        finish = FinishReason.LENGTH if index else None
        deliver(Prefilled(tuple(FirstToken(each, TokenInfo(10 * index + each), finish) for each in choices), 0))
        if not index:
            deliver(FailureEvent(EngineError("the step failed"), Blame.DECODE))

    answer_prefill(monkeypatch, answer)
    request, output = requested(n=2)
    await runner(pool := FakePool()).run(request, output)
    assert [calls[0], *sorted(calls[1:])] == [([0, 1], []), ([0], [0]), ([1], [1])]
    assert [output.output_ids(choice) for choice in range(2)] == [[0, 10], [1, 11]]
    assert pool.assignments == 0


def test_the_deadline_ends_a_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def answer(asked: prefill_pb2.PrefillRequest, deliver: Deliver) -> None:
        calls.append(asked)
        deliver(FailureEvent(Overloaded("full", 30.0), Blame.PREFILL, Cause.REFUSED))

    async def run() -> float:
        request, output = requested(seconds=1.5)
        await runner(FakePool()).run(request, output)
        with pytest.raises(DeadlineExceeded, match=r"passed after 1\.5 s"):
            await output.queue.take()
        return asyncio.get_running_loop().time()

    answer_prefill(monkeypatch, answer)
    with contextlib.closing(VirtualLoop()) as loop:
        assert loop.run_until_complete(run()) == 1.5
    assert len(calls) == 1


async def test_a_request_after_the_stop_is_not_begun() -> None:
    request_runner = runner(FakePool(d=FULL))
    outputs = []
    async with asyncio.timeout(60):
        for name in ("running", "late"):
            request, output = requested(name)
            outputs.append(output)
            task = asyncio.create_task(request_runner.run(request, output))
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


async def test_on_a_mixed_worker_the_prompt_is_computed_in_place_and_no_export_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[prefill_pb2.PrefillRequest, object]] = []

    async def call(
        assignment: Any, message: PrefillMessage, *, deliver: Deliver, transfer_id: str, in_place: bool, **others: Any
    ) -> None:
        data = message.complete(transfer_id, others["source"], in_place=in_place)
        seen.append((prefill_pb2.PrefillRequest.FromString(data), assignment.link.address))
        entry = (await request_runner.ledger()).entries[0]
        assert entry.detail == f"prefill: on {assignment.link.name}" + (", in place" if in_place else ", decode: at e")
        if in_place:
            # The request goes to a pair that has joined. Decode reports a failed job as it reports a failed transfer.
            pool.open_requests["p"], pool.by_name["e"] = 0, GRANTED
            deliver(FailureEvent(TransferError("the job failed"), Blame.PAIR))
        else:
            deliver(Prefilled((FirstToken(0, TokenInfo(7), FinishReason.LENGTH),), 0))

    abandoned: list[str] = []
    monkeypatch.setattr(router.request_runner, "call_prefill", call)
    monkeypatch.setattr(
        ExportAbandoner, "abandon", lambda self, assignment, *_: abandoned.append(assignment.link.address)
    )
    before = {kind: count(PLACEMENTS, kind) for kind in ("in_place", "transfer")}
    request_runner = runner(pool := FakePool(prefill=("m",), m=ReserveResult(True, cached_tokens=16)))
    request, output = requested()
    async with asyncio.timeout(60):
        await request_runner.run(request, output)
    assert [(asked.in_place, bool(asked.transfer_id), asked.HasField("prefix_source"), at) for asked, at in seen] == [
        (True, True, False, "m"),
        (False, True, False, "p"),
    ]
    assert abandoned == ["p"]
    assert {kind: count(PLACEMENTS, kind) - before[kind] for kind in before} == {"in_place": 1, "transfer": 1}
    assert (output.output_ids(0), pool.assignments, pool.running.total()) == ([7], 0, 0)
