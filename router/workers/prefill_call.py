"""Calls to prefill workers: an assignment, by which a prompt counts there, and a call that brings its events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import grpc

from baton.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import CachePolicy, Prefilled, PrefixSource, PromptLogprobs, SamplingParams
from baton.rpc.channel import SilenceTimer
from baton.rpc.convert import (
    cache_policy_to_proto,
    cached_from_proto,
    first_token_from_proto,
    pack_ids,
    prefix_source_to_proto,
    progress_from_proto,
    sampling_to_proto,
    token_from_proto,
)
from baton.rpc.errors import from_rpc_error
from baton.telemetry.logs import about
from baton.worker.status import WorkerIdentity
from router.placement.prefix_directory import BlockNamespace
from router.workers.failures import Blame, Cause, Deliver, FailureEvent, WorkerLoss

_logger = logging.getLogger(__name__)

LOSS_GRACE_S = 0.5
"""Seconds to wait after a broken call for the worker's watch to tell whether the worker is lost."""

_ABANDON_TIMEOUT_S = 2.0
_TENANT_BYTES = 8

LARGE_REQUEST = 16_384
"""Number of token ids above which a message is made on a thread."""


_METHOD = "/baton.v1.Prefill/Prefill"
_IDS = prefill_pb2.PrefillRequest.DESCRIPTOR.fields_by_name


@dataclass(frozen=True, slots=True)
class PrefillMessage:
    """A serialized PrefillRequest without the fields that depend on the placement.

    It asks for log-probabilities of the first `logprob_count` tokens of the prompt. It is serialized here because
    gRPC would serialize it on the event loop.
    """

    data: bytes
    logprob_count: int

    def complete(self, transfer_id: str, source: PrefixSource | None, *, in_place: bool = False) -> bytes:
        """The complete message. Protobuf merges messages that are concatenated, so two parts make one request."""
        last = prefill_pb2.PrefillRequest(transfer_id=transfer_id, in_place=in_place)
        if source is not None:
            last.prefix_source.CopyFrom(prefix_source_to_proto(source))
        return self.data + last.SerializeToString()


class PrefillLink(Protocol):
    """The part of the link to a prefill worker that an assignment needs."""

    address: str
    channel: grpc.aio.Channel
    namespace: BlockNamespace | None

    @property
    def name(self) -> str:
        """The worker's name in logs and messages."""

    @property
    def draining(self) -> bool:
        """Whether the worker says that it takes no new work."""

    def add_suspect(self, assignment: PrefillAssignment, request_id: str) -> None:
        """Make the request a suspect if the worker dies."""

    def remove_suspect(self, assignment: PrefillAssignment) -> None:
        """Make the request no suspect any more: it needs nothing more from the worker."""

    def release(self, assignment: PrefillAssignment) -> bool:
        """Stop counting the prompt at the worker; False if it did not count."""


class PrefillAssignment:
    """The place of a prompt at a prefill worker, where it counts until `release`."""

    def __init__(
        self, link: PrefillLink, identity: WorkerIdentity, tokens: int, cached_tokens: int, lost: asyncio.Event
    ) -> None:
        self.link = link
        self.tokens = tokens
        self.cached_tokens = cached_tokens
        """Leading tokens of the prompt that the worker was thought to hold when it was selected."""
        self.shards = identity.shards_at(link.address)
        """The worker's shards, with the addresses at which decode workers fetch KV."""
        self.incarnation = identity.incarnation
        self.fingerprint = identity.fingerprint
        self.consumer = identity.consumer
        """Audience of KV tickets for this worker."""
        self.lost = lost
        """Set when this incarnation of the worker is lost, also after `release`."""
        self.loss: WorkerLoss | None = None
        """The loss of the worker, if the request was there when it was lost."""
        self._deliver: Deliver | None = None
        self._failure: FailureEvent | None = None

    def add_suspect(self, request_id: str, deliver: Deliver) -> None:
        """Make the request a suspect if the worker dies, because it goes there now.

        If the worker is lost before `release`, FailureEvent is delivered.
        """
        self._deliver = deliver
        if self._failure is not None:
            deliver(self._failure)
        else:
            self.link.add_suspect(self, request_id)

    def remove_suspect(self) -> None:
        """Make the request no suspect any more, because its KV was fetched. Idempotent."""
        self.link.remove_suspect(self)

    def fail(self, error: BatonError, cause: Cause) -> None:
        """Deliver the failure, because the worker is lost."""
        self._failure = FailureEvent(error, Blame.PREFILL, cause, self.loss)
        if self._deliver is not None:
            self._deliver(self._failure)

    async def wait_for_loss(self, seconds: float) -> bool:
        """Wait up to `seconds` for the loss of the worker; returns whether it is lost."""
        if not self.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.lost.wait()
        return self.lost.is_set()

    def release(self) -> bool:
        """Free the place for another prompt; False if it was freed before."""
        return self.link.release(self)


def prefill_message(
    *,
    request_id: str,
    attempt: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    choices: Sequence[int],
    params: SamplingParams,
    tenant: str,
    cache_salt: bytes,
    cache: CachePolicy,
    report_progress: bool,
) -> PrefillMessage:
    """The message for one attempt, without the fields that depend on the placement."""
    message = prefill_pb2.PrefillRequest(
        request_id=request_id,
        attempt=attempt,
        choice_indexes=choices,
        sampling=sampling_to_proto(params),
        tenant=sha256(tenant.encode()).digest()[:_TENANT_BYTES] if tenant else b"",
        cache_salt=cache_salt,
        cache=cache_policy_to_proto(cache),
        report_progress=report_progress,
    )
    parts = [message.SerializeToString()]
    parts += pack_ids(_IDS["prompt_token_ids"].number, prompt_ids)
    parts += pack_ids(_IDS["output_token_ids"].number, output_ids)
    return PrefillMessage(b"".join(parts), 0 if params.prompt_logprobs is None else len(prompt_ids))


async def call_prefill(
    assignment: PrefillAssignment,
    request: PrefillMessage,
    *,
    transfer_id: str,
    source: PrefixSource | None,
    in_place: bool = False,
    timeout: float | None,
    silence_s: float,
    deliver: Deliver,
) -> None:
    """Call the prefill worker and deliver its events; a cancellation frees all that the worker holds for the call.

    Delivers any number of PrefillProgress and PromptLogprobs events, and Prefilled or FailureEvent once. PromptLogprobs
    may come after Prefilled, and FailureEvent too if the rest of them is lost. A call that breaks after all events came
    does no harm. `transfer_id` is empty if no decode follows. `timeout` is in seconds. Workers send a message every
    second, so `silence_s` seconds without one are a fault.
    """
    link = assignment.link
    method = link.channel.unary_stream(_METHOD, response_deserializer=prefill_pb2.PrefillEvent.FromString)
    call = method(request.complete(transfer_id, source, in_place=in_place), timeout=timeout)
    missing = request.logprob_count
    done, failure = False, None
    silence = SilenceTimer(silence_s, call.cancel)
    try:
        with silence:
            async for event in call:
                silence.reset()
                if event.HasField("prefill_progress"):
                    deliver(progress_from_proto(event.prefill_progress))
                if event.HasField("prompt_logprobs"):
                    part = event.prompt_logprobs
                    missing -= len(part.tokens)
                    deliver(PromptLogprobs(part.start, [*map(token_from_proto, part.tokens)]))
                if event.HasField("done"):
                    deliver(prefilled_from_proto(event.done))
                    done = True
    except grpc.aio.AioRpcError as error:
        if not done or missing > 0:
            failure = await _classify_error(assignment, from_rpc_error(error))
    except asyncio.CancelledError:
        if not silence.ended_call():
            raise
        failure = FailureEvent(Unavailable(f"prefill worker {link.name} was silent for {silence_s:g} s"), Blame.PREFILL)
    finally:
        call.cancel()
    if not done or missing > 0:
        left = f"{missing} prompt log-probabilities" if done else "a token"
        deliver(failure or FailureEvent(Unavailable(f"prefill worker {link.name} ended without {left}"), Blame.PREFILL))


async def _classify_error(assignment: PrefillAssignment, error: BatonError) -> FailureEvent:
    """The failure for a broken call: a refusal by a full worker, a drain, a lost worker, or a fault."""
    # Another worker may have more memory, so a prompt that is too large for this one is tried again.
    if isinstance(error, Overloaded) or (isinstance(error, InvalidRequest) and error.field == "prompt_token_ids"):
        return FailureEvent(error, Blame.PREFILL, Cause.REFUSED)
    if isinstance(error, Unavailable):
        # When a worker dies, call and watch break at the same moment, but only the watch tells a death from a fault.
        if assignment.link.draining:
            return FailureEvent(error, Blame.PREFILL, Cause.DRAIN)
        if await assignment.wait_for_loss(LOSS_GRACE_S):
            return FailureEvent(error, Blame.PREFILL, Cause.LOST, assignment.loss)
        if assignment.link.draining:
            return FailureEvent(error, Blame.PREFILL, Cause.DRAIN)
    return FailureEvent(error, Blame.PREFILL)


def prefilled_from_proto(done: prefill_pb2.PrefillDone) -> Prefilled:
    """The event in a message that tells of a computed prompt."""
    return Prefilled(
        first_tokens=tuple(map(first_token_from_proto, done.first_tokens)),
        cached_tokens=done.cached_tokens,
        cached=cached_from_proto(done.cached),
    )


class ExportAbandoner:
    """Tells prefill workers which exports will not be fetched, so that they can free the KV before its lease ends.

    The calls run in the background, one at most for each attempt, each with a timeout. If a call is lost, the end of
    the lease frees the KV.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    def abandon(self, assignment: PrefillAssignment, transfer_id: str, request_id: str) -> None:
        """Start a call that ends an export; no call is made to a lost worker."""
        if assignment.lost.is_set():
            return
        call = asyncio.create_task(_abandon(assignment, transfer_id, request_id), name=f"abandon {transfer_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def finish(self) -> None:
        """Wait until all calls have ended, for their timeout at most."""
        await asyncio.gather(*self._calls, return_exceptions=True)


async def _abandon(assignment: PrefillAssignment, transfer_id: str, request_id: str) -> None:
    request = prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=assignment.incarnation)
    try:
        await prefill_pb2_grpc.PrefillStub(assignment.link.channel).Abandon(request, timeout=_ABANDON_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        _logger.warning(
            "request %s: transfer %s was not abandoned at %s: %s",
            request_id,
            transfer_id,
            assignment.link.name,
            error.code().name,
            extra=about(request_id),
        )
