"""One call of a prefill worker: the request as a message, and the answer as events of the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import grpc

from baton.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import CachePolicy, SamplingParams
from baton.rpc.convert import (
    add_token_ids,
    cache_policy_to_proto,
    cached_from_proto,
    first_token_from_proto,
    prefix_source_to_proto,
    sampling_to_proto,
    token_from_proto,
)
from baton.rpc.errors import from_rpc_error
from baton.rpc.silence import Silence
from baton.transfer.remote import PrefixSource
from router.events import Blame, Cause, Deliver, Failed, Prefilled
from router.serving.threads import Run
from router.workers.link import Seat

LOSS_GRACE_S = 0.5
"""How long after a broken call its worker's watch may still tell that the worker is lost."""

LARGE_REPORT = 256
"""Prompt tokens from which on their log-probabilities are converted on a thread."""

LARGE_REQUEST = 16_384
"""Token ids from which on a request is made into a message on a thread."""


PrefillMessage = prefill_pb2.PrefillRequest


def message(
    *,
    request_id: str,
    attempt: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    choices: Sequence[int],
    params: SamplingParams,
    cache_salt: bytes,
    cache: CachePolicy,
) -> PrefillMessage:
    """The request of one attempt, but for what follows from its place."""
    asked = PrefillMessage(
        request_id=request_id,
        attempt=attempt,
        choice_indexes=choices,
        sampling=sampling_to_proto(params),
        cache_salt=cache_salt,
        cache=cache_policy_to_proto(cache),
    )
    add_token_ids(asked.prompt_token_ids, prompt_ids)
    add_token_ids(asked.output_token_ids, output_ids)
    return asked


async def prefill(
    seat: Seat,
    request: PrefillMessage,
    *,
    transfer_id: str,
    source: PrefixSource | None,
    timeout: float | None,
    silence_s: float,
    deliver: Deliver,
    run: Run,
) -> None:
    """Call the worker and deliver the outcome, exactly one event; cancelling it frees all the worker holds.

    `transfer_id` is empty when no decode follows. Workers say every second how far they are, so `silence_s` without a
    word is a fault. `run` converts large reports.
    """
    link = seat.link
    request.transfer_id = transfer_id
    if source is not None:
        request.prefix_source.CopyFrom(prefix_source_to_proto(source))
    call = prefill_pb2_grpc.PrefillStub(link.channel).Prefill(request, timeout=timeout)
    done = False
    silence = Silence(silence_s, call.cancel)
    try:
        with silence:
            async for event in call:
                silence.heard()
                if event.WhichOneof("event") == "done":
                    # Its part is done, and a thread may be long in coming.
                    silence.stop()
                    large = len(event.done.prompt_tokens) > LARGE_REPORT
                    deliver(await run(partial(_prefilled, event.done)) if large else _prefilled(event.done))
                    done = True
    except grpc.aio.AioRpcError as error:
        if not done:
            deliver(await _failed(seat, from_rpc_error(error)))
        return
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not silence.fell or (task is not None and task.cancelling()):
            raise
        if not done:
            said = f"prefill worker {link.name} was silent for {silence_s:g} s"
            deliver(Failed(Unavailable(said), Blame.PREFILL))
        return
    finally:
        call.cancel()
    if not done:
        deliver(Failed(Unavailable(f"prefill worker {link.name} ended without a token"), Blame.PREFILL))


async def _failed(seat: Seat, error: BatonError) -> Failed:
    """What a failed call means: the worker may be dead, full, or draining, and then nothing is wrong with it."""
    # A prompt that is too large for one worker's memory may find room at another.
    if isinstance(error, Overloaded) or (isinstance(error, InvalidRequest) and error.field == "prompt_token_ids"):
        return Failed(error, Blame.PREFILL, Cause.REFUSED)
    if isinstance(error, Unavailable):
        # Call and watch break at the same moment when a worker dies, and it is the watch that tells so.
        if seat.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
        if await seat.lost_within(LOSS_GRACE_S):
            return Failed(error, Blame.PREFILL, Cause.LOST, seat.loss)
        if seat.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
    return Failed(error, Blame.PREFILL)


def _prefilled(done: prefill_pb2.PrefillDone) -> Prefilled:
    return Prefilled(
        first_tokens=tuple(map(first_token_from_proto, done.first_tokens)),
        cached_tokens=done.cached_tokens,
        prompt_tokens=tuple(map(token_from_proto, done.prompt_tokens)),
        cached=cached_from_proto(done.cached),
    )
