"""The call to a prefill worker over real gRPC: the events that it delivers when it breaks."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from baton.errors import EngineError
from baton.pb import inference_pb2, prefill_pb2, prefill_pb2_grpc
from baton.request import CachePolicy, Prefilled, PromptLogprobs, SamplingParams
from baton.rpc.channel import control_channel
from baton.rpc.server import listen
from router.workers.failures import Event, FailureEvent
from router.workers.prefill_call import PrefillAssignment, call_prefill, prefill_message


class Breaking(prefill_pb2_grpc.PrefillServicer):
    """Computes a prompt, reports on `reported` of its tokens, and breaks."""

    def __init__(self, reported: int) -> None:
        self.reported = reported

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone())
        for start in range(self.reported):
            tokens = [inference_pb2.TokenInfo(token_id=1)]
            yield prefill_pb2.PrefillEvent(prompt_logprobs=prefill_pb2.PromptLogprobs(start=start, tokens=tokens))
        raise EngineError("it broke")


async def deliver(reported: int, prompt_logprobs: int | None) -> list[Event]:
    """All events of a call with a prompt of two tokens."""
    service, events = Breaking(reported), list[Event]()

    def add(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)

    request = prefill_message(
        request_id="r",
        attempt=0,
        prompt_ids=[1, 1],
        output_ids=[],
        choices=(0,),
        params=SamplingParams(prompt_logprobs=prompt_logprobs),
        tenant="",
        cache_salt=b"",
        cache=CachePolicy.OFF,
        report_progress=False,
    )
    async with (
        listen("127.0.0.1:0", insecure=False, add=add, services=[]) as listener,
        control_channel(listener.address) as channel,
        asyncio.timeout(60),
    ):
        assignment = SimpleNamespace(link=SimpleNamespace(channel=channel, name="p", draining=False))
        await call_prefill(
            cast(PrefillAssignment, assignment),
            request,
            transfer_id="",
            source=None,
            timeout=None,
            silence_s=60.0,
            deliver=events.append,
        )
    return events


@pytest.mark.parametrize(("reported", "prompt_logprobs"), [(0, None), (2, 0)])
async def test_a_call_that_breaks_when_all_has_come_fails_nothing(reported: int, prompt_logprobs: int | None) -> None:
    events = await deliver(reported, prompt_logprobs)
    assert [type(event) for event in events] == [Prefilled] + [PromptLogprobs] * reported


async def test_a_call_that_breaks_before_the_end_of_its_report_fails() -> None:
    events = await deliver(1, 0)
    assert [type(event) for event in events] == [Prefilled, PromptLogprobs, FailureEvent]
