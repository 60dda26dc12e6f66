"""One prompt at a prefill worker: its assignment there, the call, and the end of an export that nobody fetches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

import grpc

from baton.config import parse_address
from baton.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.kv.format import Shard
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import CachePolicy, PrefixSource, SamplingParams
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
from baton.worker.status import WorkerIdentity
from router.placement.prefix_directory import BlockNamespace
from router.request import Blame, Cause, Deliver, Failed, Prefilled, PromptReport
from router.workers.failures import WorkerLoss

_logger = logging.getLogger(__name__)

LOSS_GRACE_S = 0.5
"""Seconds after a broken call in which its worker's watch may still tell that the worker is lost."""

_ABANDON_TIMEOUT_S = 2.0
_TENANT_BYTES = 8

LARGE_REQUEST = 16_384
"""Token ids from which on a request is made into a message on a thread."""


_METHOD = "/baton.v1.Prefill/Prefill"
_IDS = prefill_pb2.PrefillRequest.DESCRIPTOR.fields_by_name


@dataclass(frozen=True, slots=True)
class PrefillMessage:
    """A serialized request, but for what follows from its placement, and how many tokens of the prompt it asks a
    report on.

    gRPC would have the generated class serialize it on the event loop.
    """

    data: bytes
    reported_tokens: int

    def complete(self, transfer_id: str, source: PrefixSource | None) -> bytes:
        """All of the request: messages one after the other are one message."""
        last = prefill_pb2.PrefillRequest(transfer_id=transfer_id)
        if source is not None:
            last.prefix_source.CopyFrom(prefix_source_to_proto(source))
        return self.data + last.SerializeToString()


class PrefillLink(Protocol):
    """The link to a prefill worker, as far as an assignment needs it."""

    address: str
    channel: grpc.aio.Channel
    namespace: BlockNamespace | None

    @property
    def name(self) -> str:
        """The worker's name in logs and messages."""

    @property
    def draining(self) -> bool:
        """Whether the worker says that it takes no new work."""

    def attach(self, assignment: PrefillAssignment, request_id: str) -> None:
        """The request is at the worker."""

    def detach(self, assignment: PrefillAssignment) -> None:
        """The request needs nothing more of the worker."""

    def unassign(self, assignment: PrefillAssignment) -> bool:
        """Count a prompt no longer; False if it did not count."""


class PrefillAssignment:
    """A request's right to be computed at a prefill worker, where it counts until it is released."""

    def __init__(
        self, link: PrefillLink, identity: WorkerIdentity, tokens: int, cached_tokens: int, lost: asyncio.Event
    ) -> None:
        self.link = link
        self.tokens = tokens
        self.cached_tokens = cached_tokens
        """Of the tokens, those that the worker was thought to hold when it was chosen."""
        self.shards = complete_shards(identity.shards, link.address)
        """The worker's KV addresses for decode workers."""
        self.incarnation = identity.incarnation
        self.consumer = identity.consumer
        """Audience of KV tickets for this worker."""
        self.lost = lost
        """Set when this incarnation of the worker is lost, whether or not the assignment was released before."""
        self.loss: WorkerLoss | None = None
        """The lost connection with this incarnation, if the request was there."""
        self._deliver: Deliver | None = None
        self._failed: Failed | None = None

    def attach(self, request_id: str, deliver: Deliver) -> None:
        """The request goes to the worker, whose loss is delivered until the assignment is released."""
        self._deliver = deliver
        if self._failed is not None:
            deliver(self._failed)
        else:
            self.link.attach(self, request_id)

    def detach(self) -> None:
        """The request needs nothing more of the worker: its prompt is computed and its KV is fetched; idempotent."""
        self.link.detach(self)

    def fail(self, error: BatonError, cause: Cause) -> None:
        """The worker is lost."""
        self._failed = Failed(error, Blame.PREFILL, cause, self.loss)
        if self._deliver is not None:
            self._deliver(self._failed)

    async def wait_for_loss(self, seconds: float) -> bool:
        """Whether the worker is lost by then; tells a worker's death from a fault that merely looks like it."""
        if not self.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.lost.wait()
        return self.lost.is_set()

    def release(self) -> bool:
        """Free the place for another prompt; False if it was free before."""
        return self.link.unassign(self)


def _host(address: str) -> str:
    """The host of "host:port", without brackets."""
    return parse_address(address)[0]


def complete_shards(shards: Sequence[Shard], dialled: str) -> tuple[Shard, ...]:
    """The shards of a worker that was dialled there, each with the host of its address."""
    return tuple(replace(shard, kv_address=complete_address(shard.kv_address, dialled)) for shard in shards)


def complete_address(kv_address: str, dialled: str) -> str:
    """`kv_address` with an empty host replaced by that of the dialled address."""
    host, _, port = kv_address.rpartition(":")
    return kv_address if host else join_address(_host(dialled), int(port))


def join_address(host: str | int, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


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
    """The request of one attempt, but for what follows from its placement."""
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
    timeout: float | None,
    silence_s: float,
    deliver: Deliver,
) -> None:
    """Call the worker, and deliver its progress, the report on the prompt and the outcome; cancelling it frees all the
    worker holds.

    Delivers Prefilled once, or Failed once. Parts of the report may come after Prefilled, and Failed if the rest of it
    is lost. A call that breaks when all has come fails nothing. `transfer_id` is empty when no decode follows. Workers
    send a message every second, so `silence_s` without one is a fault.
    """
    link = assignment.link
    method = link.channel.unary_stream(_METHOD, response_deserializer=prefill_pb2.PrefillEvent.FromString)
    call = method(request.complete(transfer_id, source), timeout=timeout)
    missing = request.reported_tokens
    done, failed = False, None
    silence = SilenceTimer(silence_s, call.cancel)
    try:
        with silence:
            async for event in call:
                silence.reset()
                if event.HasField("prefill_progress"):
                    deliver(progress_from_proto(event.prefill_progress))
                if event.HasField("report"):
                    missing -= len(event.report.tokens)
                    deliver(PromptReport(event.report.start, [*map(token_from_proto, event.report.tokens)]))
                if event.HasField("done"):
                    deliver(prefilled_from_proto(event.done))
                    done = True
    except grpc.aio.AioRpcError as error:
        if not done or missing > 0:
            failed = await _judge_error(assignment, from_rpc_error(error))
    except asyncio.CancelledError:
        if not silence.ended_call():
            raise
        failed = Failed(Unavailable(f"prefill worker {link.name} was silent for {silence_s:g} s"), Blame.PREFILL)
    finally:
        call.cancel()
    if not done or missing > 0:
        left = f"{missing} prompt log-probabilities" if done else "a token"
        deliver(failed or Failed(Unavailable(f"prefill worker {link.name} ended without {left}"), Blame.PREFILL))


async def _judge_error(assignment: PrefillAssignment, error: BatonError) -> Failed:
    """The meaning of a failed call: the worker may be dead, full, or draining, and then nothing is wrong with it."""
    # A prompt that is too large for one worker's memory may find room at another.
    if isinstance(error, Overloaded) or (isinstance(error, InvalidRequest) and error.field == "prompt_token_ids"):
        return Failed(error, Blame.PREFILL, Cause.REFUSED)
    if isinstance(error, Unavailable):
        # Call and watch break at the same moment when a worker dies, and it is the watch that tells so.
        if assignment.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
        if await assignment.wait_for_loss(LOSS_GRACE_S):
            return Failed(error, Blame.PREFILL, Cause.LOST, assignment.loss)
        if assignment.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
    return Failed(error, Blame.PREFILL)


def prefilled_from_proto(done: prefill_pb2.PrefillDone) -> Prefilled:
    """The event of a prompt that is computed."""
    return Prefilled(
        first_tokens=tuple(map(first_token_from_proto, done.first_tokens)),
        cached_tokens=done.cached_tokens,
        cached=cached_from_proto(done.cached),
    )


class Abandoner:
    """Tells prefill workers which exports nobody will fetch, so that KV is not pinned until its lease ends.

    Best effort, in the background: the lease is what frees KV when a call gets lost. Calls are bounded in time, and
    there is at most one for each attempt.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    def abandon(self, assignment: PrefillAssignment, transfer_id: str) -> None:
        """End the export of an attempt, unless its worker is lost and holds nothing."""
        if assignment.lost.is_set():
            return
        call = asyncio.create_task(_abandon(assignment, transfer_id), name=f"abandon {transfer_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def finish(self) -> None:
        """Wait for the calls under way, which takes no longer than their timeout."""
        await asyncio.gather(*self._calls, return_exceptions=True)


async def _abandon(assignment: PrefillAssignment, transfer_id: str) -> None:
    request = prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=assignment.incarnation)
    try:
        await prefill_pb2_grpc.PrefillStub(assignment.link.channel).Abandon(request, timeout=_ABANDON_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        _logger.warning("transfer %s was not abandoned at %s: %s", transfer_id, assignment.link.name, error.code().name)
