"""The Prefill service. Translates only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc

from baton.engine.contract import EngineSpec
from baton.errors import Cancelled, InvalidRequest
from baton.kv.hashing import MAX_SALT_BYTES
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.process import executors
from baton.process.executors import WORK
from baton.request import (
    MAX_CHOICES,
    Prefilled,
    PrefillProgress,
    PromptLogprobs,
    SamplingParams,
    check_count,
    check_id,
    check_length,
    checked_array,
)
from baton.rpc.convert import (
    cache_policy_from_proto,
    cached_to_proto,
    first_token_to_proto,
    prefix_source_from_proto,
    progress_to_proto,
    sampling_from_proto,
    token_to_proto,
)
from prefill_svc.job import PrefillRequest
from prefill_svc.worker import PrefillWorker

MAX_TENANT_BYTES = 64
_LARGE_TOKENS = 16_384
"""Number of token ids above which a request is converted on another thread."""


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves prefills."""

    def __init__(self, worker: PrefillWorker, spec: EngineSpec) -> None:
        self._worker = worker
        self._spec = spec
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_sent(self) -> None:
        """Wait until no call is open: prompt log-probabilities may be sent after their job has ended; for a drain."""
        await self._idle.wait()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Stream a job's events; if the call ends before `done`, the job is aborted."""
        left = context.time_remaining()
        deadline = None if left is None else time.monotonic() + left
        if _token_ids(request) > _LARGE_TOKENS:
            accepted = await executors.run(WORK, request_from_proto, request, self._spec, deadline)
        else:
            accepted = request_from_proto(request, self._spec, deadline)
        job = self._worker.submit(accepted)
        self._streams += 1
        self._idle.clear()
        try:
            async for event in job.events():
                yield event_to_proto(event)
        finally:
            self._worker.abort(job, Cancelled("the caller went away"))
            self._streams -= 1
            if not self._streams:
                self._idle.set()

    async def Abandon(
        self, request: prefill_pb2.AbandonRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.AbandonResponse:
        """End an export that nobody will fetch."""
        check_id("transfer_id", request.transfer_id)
        self._worker.abandon(request.transfer_id, request.incarnation)
        return prefill_pb2.AbandonResponse()


def request_from_proto(request: prefill_pb2.PrefillRequest, spec: EngineSpec, deadline: float | None) -> PrefillRequest:
    """The request of a message; raises InvalidRequest naming the field and the value seen."""
    check_id("request_id", request.request_id)
    check_id("transfer_id", request.transfer_id, optional=True)
    check_length("cache_salt", request.cache_salt, MAX_SALT_BYTES)
    check_length("tenant", request.tenant, MAX_TENANT_BYTES)
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "must not be empty")
    for name in ("prompt_token_ids", "output_token_ids"):
        check_count(name, len(getattr(request, name)), spec.max_model_len, "token ids")
    prompt_ids = checked_array("prompt_token_ids", request.prompt_token_ids, spec.vocab_size)
    output_ids = checked_array("output_token_ids", request.output_token_ids, spec.vocab_size)
    params = _sampling(request, spec)
    return PrefillRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        transfer_id=request.transfer_id,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        choices=_choices(request, params),
        params=params,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        cache=cache_policy_from_proto(request.cache),
        peer_prefix=prefix_source_from_proto(request.prefix_source) if request.HasField("prefix_source") else None,
        report_progress=request.report_progress,
        in_place=request.in_place,
        deadline=deadline,
    )


def event_to_proto(event: Prefilled | PrefillProgress | PromptLogprobs | None) -> prefill_pb2.PrefillEvent:
    """One message of the stream; None is a heartbeat."""
    if event is None:
        return prefill_pb2.PrefillEvent()
    if isinstance(event, PromptLogprobs):
        tokens = [token_to_proto(token) for token in event.tokens]
        return prefill_pb2.PrefillEvent(prompt_logprobs=prefill_pb2.PromptLogprobs(start=event.start, tokens=tokens))
    if isinstance(event, PrefillProgress):
        return prefill_pb2.PrefillEvent(prefill_progress=progress_to_proto(event))
    return prefill_pb2.PrefillEvent(
        done=prefill_pb2.PrefillDone(
            first_tokens=[first_token_to_proto(first) for first in event.first_tokens],
            cached_tokens=event.cached_tokens,
            cached=cached_to_proto(event.cached),
        )
    )


def _token_ids(request: prefill_pb2.PrefillRequest) -> int:
    prompt, output, allowed = request.prompt_token_ids, request.output_token_ids, request.sampling.allowed_token_ids
    return len(prompt) + len(output) + len(allowed)


def _sampling(request: prefill_pb2.PrefillRequest, spec: EngineSpec) -> SamplingParams:
    params = sampling_from_proto(request.sampling, spec.vocab_size)
    params.check_vocabulary(spec.vocab_size, spec.eos_token_ids)
    if params.max_tokens is None:
        raise InvalidRequest("sampling.max_tokens", "must be set")
    if params.seed is None and not params.greedy:
        raise InvalidRequest("sampling.seed", "must be set")
    if len(request.output_token_ids) >= params.max_tokens:
        raise InvalidRequest(
            "output_token_ids",
            f"must leave room for a token in max_tokens ({params.max_tokens})",
            len(request.output_token_ids),
        )
    return params


def _choices(request: prefill_pb2.PrefillRequest, params: SamplingParams) -> tuple[int, ...]:
    check_count("choice_indexes", len(request.choice_indexes), MAX_CHOICES, "choices")
    choices = tuple(request.choice_indexes)
    if not choices:
        raise InvalidRequest("choice_indexes", "must not be empty")
    if max(choices) >= params.n:
        raise InvalidRequest("choice_indexes", f"must be below n ({params.n})", max(choices))
    if len(set(choices)) != len(choices):
        raise InvalidRequest("choice_indexes", "must not repeat", list(choices))
    return choices
