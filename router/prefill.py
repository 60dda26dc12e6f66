"""One call of a prefill worker: the request as a message, and the answer as events of the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from baton.errors import Unavailable
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import SamplingParams
from baton.rpc.convert import first_token_from_proto, sampling_to_proto, token_from_proto
from baton.rpc.errors import from_rpc_error
from router.events import Blame, Deliver, Failed, Prefilled
from router.worker import WorkerLink

LARGE_REPORT = 256
"""Prompt tokens from which on their log-probabilities are converted on a thread."""


def message(
    *,
    request_id: str,
    attempt: int,
    transfer_id: str,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    choices: Sequence[int],
    params: SamplingParams,
) -> prefill_pb2.PrefillRequest:
    """The request of one attempt; `transfer_id` is empty when no decode follows."""
    return prefill_pb2.PrefillRequest(
        request_id=request_id,
        attempt=attempt,
        transfer_id=transfer_id,
        prompt_token_ids=prompt_ids,
        output_token_ids=output_ids,
        choice_indexes=choices,
        sampling=sampling_to_proto(params),
    )


async def prefill(
    link: WorkerLink, request: prefill_pb2.PrefillRequest, timeout: float | None, deliver: Deliver
) -> None:
    """Call the worker and deliver the outcome, exactly one event; cancelling it frees all the worker holds."""
    call = prefill_pb2_grpc.PrefillStub(link.channel).Prefill(request, timeout=timeout)
    done = False
    try:
        async for event in call:
            if event.WhichOneof("event") == "done":
                large = len(event.done.prompt_tokens) > LARGE_REPORT
                deliver(await asyncio.to_thread(_prefilled, event.done) if large else _prefilled(event.done))
                done = True
    except grpc.aio.AioRpcError as error:
        if not done:
            deliver(Failed(from_rpc_error(error), Blame.PREFILL))
        return
    finally:
        call.cancel()
    if not done:
        deliver(Failed(Unavailable(f"prefill worker {link.name} ended without a token"), Blame.PREFILL))


def _prefilled(done: prefill_pb2.PrefillDone) -> Prefilled:
    return Prefilled(
        first_tokens=tuple(map(first_token_from_proto, done.first_tokens)),
        cached_tokens=done.cached_tokens,
        prompt_tokens=tuple(map(token_from_proto, done.prompt_tokens)),
    )
