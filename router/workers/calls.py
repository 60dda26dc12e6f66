"""Calls of an attempt to its two workers: the one to prefill, and its part of the session with decode.

A prompt has an assignment at a prefill worker, where it counts, and a call that brings its events. Between this router
and a decode worker there is one stream, shared by all attempts there:

    up    Hello, then Reserve, Start, Cancel as attempts need them, and every second a Heartbeat
    down  one message a step; each attempt's part is delivered to that attempt alone; Heartbeats

Heartbeats list the attempts that a side believes to be alive. The stream is ordered, so what the other side lists and
this one does not know has ended here, and what was granted and is not listed there, twice in a row, is lost: a message
that got lost costs two seconds, and never a hang. Once is not enough, since decode lists nothing of an attempt that
prefill's first token has ended, and the two streams race. Silence for `SILENCE_S` ends the session.

Nothing here waits for a client: what comes down is handed on at once. When the stream ends, for whatever reason, the
worker has freed all that it owned, so every attempt on it fails, and a new session starts with none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Protocol

import grpc

from baton.config import parse_address
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    SourceUnreachable,
    TransferError,
    Unavailable,
)
from baton.kv.format import Shard
from baton.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.request import (
    CachePolicy,
    DecodeTimings,
    Output,
    Prefilled,
    PrefillProgress,
    PrefixSource,
    PromptReport,
    RemoteExport,
    ReserveResult,
    SamplingParams,
)
from baton.rpc.channel import HEARTBEAT_S, SILENCE_S, SilenceTimer
from baton.rpc.convert import (
    cache_policy_to_proto,
    cached_from_proto,
    export_to_proto,
    finish_from_proto,
    first_token_from_proto,
    pack_ids,
    prefix_source_to_proto,
    progress_from_proto,
    sampling_to_proto,
    token_from_proto,
)
from baton.rpc.errors import from_rpc_error
from baton.worker.status import WIRE_VERSION, WorkerIdentity
from router.placement.prefix_directory import BlockNamespace
from router.workers.failures import Blame, Cause, Failed, WorkerLoss

PREEMPTED_RETRY_S = 1.0
"""Seconds after which a client that was preempted too often should try again."""

_Kind = decode_pb2.AttemptFailure.Kind
_FAULTS: dict[int, tuple[Callable[[str], BatonError], Blame, Cause]] = {
    _Kind.KIND_SOURCE_UNREACHABLE: (SourceUnreachable, Blame.PAIR, Cause.FAULT),
    _Kind.KIND_TRANSFER: (TransferError, Blame.PAIR, Cause.FAULT),
    _Kind.KIND_ENGINE: (EngineError, Blame.DECODE, Cause.FAULT),
    _Kind.KIND_DEADLINE: (DeadlineExceeded, Blame.DECODE, Cause.FAULT),
    _Kind.KIND_DRAINING: (Unavailable, Blame.DECODE, Cause.DRAIN),
    _Kind.KIND_PREEMPTED: (partial(Overloaded, retry_after=PREEMPTED_RETRY_S), Blame.DECODE, Cause.PREEMPTED),
}
_UNKNOWN = (EngineError, Blame.DECODE, Cause.FAULT)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The decode worker holds nothing of the attempt any more, and nothing is wrong."""


Event = PrefillProgress | PromptReport | Prefilled | Output | DecodeEnded | Failed
Deliver = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The meaning of a session's end; `reason` is empty where the session knows no more."""

    reason: str
    cause: Cause
    loss: WorkerLoss | None


class DecodeCall:
    """One attempt's part of a session; lives until `close`."""

    def __init__(self, session: DecodeSession, request_id: str, number: int, deliver: Deliver) -> None:
        self._session = session
        self._key = decode_pb2.AttemptKey(request_id=request_id, attempt=number)
        self._deliver = deliver
        self._answer: asyncio.Future[ReserveResult] = asyncio.get_running_loop().create_future()
        self._live: set[int] = set()
        self._reserved = False
        self._unanswered = False
        self.has_output = False
        """Whether the worker has sent a token of it."""

    @property
    def key(self) -> decode_pb2.AttemptKey:
        """Its name on the stream."""
        return self._key

    @property
    def asked(self) -> bool:
        """Whether the worker was asked for pages and, for all that is known, has not given them up."""
        return self._unanswered or self.granted

    @property
    def granted(self) -> bool:
        """Whether the worker must hold something of it."""
        return self._reserved and not self._unanswered and bool(self._live)

    async def reserve(
        self,
        *,
        context_tokens: int,
        max_new_tokens: int,
        choices: tuple[int, ...],
        deadline_ms: int,
        salt: bytes,
        cache: CachePolicy,
        prefix_digests: bytes,
    ) -> ReserveResult:
        """Ask for pages and wait for the answer. Raises Unavailable when the session ends before it.

        `prefix_digests` are those of blocks that may be cached, one after the other.
        """
        self._live.update(choices)
        self._reserved = self._unanswered = True
        message = decode_pb2.SessionUp(
            reserve=decode_pb2.Reserve(
                key=self._key,
                context_tokens=context_tokens,
                max_new_tokens=max_new_tokens,
                choices=len(choices),
                deadline_ms=deadline_ms,
                cache_salt=salt,
                cache=cache_policy_to_proto(cache),
            )
        )
        # Set here, because a message within a message is copied: there may be megabytes.
        message.reserve.prefix_digests = prefix_digests
        self._session.send(message)
        return await self._answer

    def start(
        self,
        *,
        source: RemoteExport,
        deadline_ms: int,
        prefix_transfer_id: str = "",
    ) -> None:
        """Tell where to fetch the KV, and under which id to export the pinned prefix, if any."""
        self._session.send(
            decode_pb2.SessionUp(
                start=decode_pb2.Start(
                    key=self._key,
                    source=export_to_proto(source),
                    deadline_ms=deadline_ms,
                    prefix_transfer_id=prefix_transfer_id,
                )
            )
        )

    def cancel_choice(self, choice: int) -> None:
        """End one choice; the others go on."""
        if choice in self._live:
            self._live.discard(choice)
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key, choice_index=choice)))

    def withdraw(self) -> None:
        """Tell a worker that refused the attempt that it does not ask again; pages may be set aside for it."""
        self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def close(self) -> None:
        """End the attempt, and tell the worker unless it ended all choices itself."""
        if not self._session.forget(self._key):
            return
        if self._unanswered:
            self._session.skip_answer(self._key)
        if self._reserved and self._live:
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def on_reserved(self, message: decode_pb2.ReserveResult) -> None:
        """Take the answer to `reserve`."""
        self._unanswered = False
        self._reserved = message.granted
        if not self._answer.done():
            retry_after_s = message.retry_after_ms / 1e3
            self._answer.set_result(
                ReserveResult(
                    message.granted,
                    message.reason,
                    message.too_small,
                    retry_after_s,
                    message.cached_tokens,
                    message.reservable_tokens,
                )
            )

    def on_output(self, message: decode_pb2.SequenceOutput) -> None:
        """Hand on a choice's tokens."""
        finish = finish_from_proto(message.finish_reason)
        if finish is not None:
            self._live.discard(message.choice_index)
        timings = None
        if message.HasField("timings"):
            timings = DecodeTimings(message.timings.fetch_ms, message.timings.slot_wait_ms)
        tokens = tuple([token_from_proto(token) for token in message.tokens])
        self.has_output = True
        self._deliver(Output(message.choice_index, message.output_index, tokens, finish, timings))

    def on_ended(self) -> None:
        """Take the attempt's end without a fault: none of its choices goes on; the worker holds nothing of it."""
        self._reserved = False
        self._deliver(DecodeEnded())

    def on_failure(
        self, error: BatonError, blame: Blame, cause: Cause = Cause.FAULT, loss: WorkerLoss | None = None
    ) -> None:
        """Take the attempt's end by a fault; the worker holds nothing of it any more.

        Before the answer to `reserve`, that answer is where the fault goes: another worker may still be asked.
        """
        self._reserved = self._unanswered = False
        if self._answer.done():
            self._deliver(Failed(error, blame, cause, loss))
            return
        self._answer.set_exception(error)
        # An attempt that is closed before it asks leaves the answer to nobody.
        self._answer.exception()


class DecodeSession:
    """One stream, from `run`'s begin to its end."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: str, router_id: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`on_change` is called when the number of attempts changes."""
        self._on_change = on_change
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._worker = worker
        # Holds a few messages for each attempt, and attempts are bounded by the assignments at prefill workers and by
        # the pages of the decode worker; a worker that takes none of them falls silent as well, which ends the session.
        self._up: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        hello = decode_pb2.Hello(router_id=router_id, wire_version=WIRE_VERSION)
        self._up.put_nowait(decode_pb2.SessionUp(hello=hello))
        self._attempts: dict[tuple[str, int], DecodeCall] = {}
        self._skipped: Counter[tuple[str, int]] = Counter()
        self._missed: set[tuple[str, int]] = set()
        self.open = True
        """Whether attempts can be made."""

    @property
    def attempts(self) -> int:
        """Number of attempts that live."""
        return len(self._attempts)

    @property
    def requests_without_token(self) -> int:
        """Number of attempts that the worker was asked for, and has sent no token of."""
        return sum(attempt.asked and not attempt.has_output for attempt in self._attempts.values())

    def begin_call(self, request_id: str, number: int, deliver: Deliver) -> DecodeCall:
        """A new attempt whose events go to `deliver`; raises Unavailable when the session is over."""
        if not self.open:
            raise Unavailable(f"decode worker {self._worker} is lost")
        attempt = DecodeCall(self, request_id, number, deliver)
        self._attempts[request_id, number] = attempt
        self._on_change()
        return attempt

    async def run(self, ended: Callable[[int], SessionEnd]) -> None:
        """Carry messages both ways until the stream breaks, falls silent, or the task is cancelled.

        `ended` is then called with the number of suspects, and says what the end means for the attempts.
        """
        call = self._stub.Session()
        writing = asyncio.create_task(self._write(call), name=f"session up {self._worker}")
        reason = "ended the session"
        silence = SilenceTimer(SILENCE_S, call.cancel)
        try:
            with silence:
                async for down in call:
                    silence.reset()
                    self._deliver_messages(down)
        except grpc.aio.AioRpcError as error:
            reason = f"is lost: {error.code().name} {error.details()}"
        except asyncio.CancelledError:
            if not silence.ended_call():
                raise
        except Exception as error:
            # The next session may fare better; without one the worker would stand idle.
            _logger.exception("a message of decode worker %s can't be handled", self._worker)
            reason = f"sent what can't be handled: {type(error).__name__}: {error}"
        finally:
            if silence.expired:
                reason = f"was silent for {SILENCE_S:g} s"
            self._close(reason, ended)
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def send(self, message: decode_pb2.SessionUp) -> None:
        """Queue a message; nothing is sent once the session is over."""
        if self.open:
            self._up.put_nowait(message)

    def forget(self, key: decode_pb2.AttemptKey) -> bool:
        """Deliver nothing to the attempt any more; False if it was forgotten before."""
        if self._attempts.pop((key.request_id, key.attempt), None) is None:
            return False
        self._on_change()
        return True

    def skip_answer(self, key: decode_pb2.AttemptKey) -> None:
        """The next answer to a reservation of this name is for one that was given up; a later one may ask again."""
        self._skipped[key.request_id, key.attempt] += 1

    def _close(self, reason: str, ended: Callable[[int], SessionEnd]) -> None:
        self.open = False
        granted = [attempt for attempt in self._attempts.values() if attempt.granted]
        suspects = [attempt for attempt in granted if not attempt.has_output] or granted
        ending = ended(len({attempt.key.request_id for attempt in suspects}))
        error = Unavailable(f"decode worker {self._worker}: {ending.reason or reason}")
        for attempt in list(self._attempts.values()):
            attempt.on_failure(error, Blame.DECODE, ending.cause, ending.loss if attempt in suspects else None)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        now = asyncio.get_running_loop().time
        beat = now() + HEARTBEAT_S
        while True:
            try:
                async with asyncio.timeout_at(beat):
                    message = await self._up.get()
            except TimeoutError:
                live = [attempt.key for attempt in self._attempts.values() if attempt.asked]
                message = decode_pb2.SessionUp(heartbeat=decode_pb2.Heartbeat(live=live))
                beat = now() + HEARTBEAT_S
            await call.write(message)

    def _deliver_messages(self, down: decode_pb2.SessionDown) -> None:
        for reserved in down.reserved:
            name = reserved.key.request_id, reserved.key.attempt
            if name in self._skipped:
                self._skipped -= Counter((name,))
            elif attempt := self._attempts.get(name):
                attempt.on_reserved(reserved)
        for output in down.outputs:
            key = output.key
            if attempt := self._attempts.get((key.request_id, key.attempt)):
                attempt.on_output(output)
        for key in down.ended:
            if attempt := self._attempts.get((key.request_id, key.attempt)):
                attempt.on_ended()
        for failure in down.failures:
            if attempt := self._attempts.get((failure.key.request_id, failure.key.attempt)):
                make, blame, cause = _FAULTS.get(failure.kind, _UNKNOWN)
                attempt.on_failure(make(f"decode worker {self._worker}: {failure.message}"), blame, cause)
        if down.HasField("heartbeat"):
            self._compare(down.heartbeat.live)

    def _compare(self, live: Iterable[decode_pb2.AttemptKey]) -> None:
        """Fail what the worker was thought to hold and does not."""
        known = {(key.request_id, key.attempt) for key in live}
        missed = {key for key, attempt in self._attempts.items() if attempt.granted and key not in known}
        for key in missed & self._missed:
            error = EngineError(f"decode worker {self._worker} knows nothing of attempt {key[0]}/{key[1]}")
            self._attempts[key].on_failure(error, Blame.DECODE)
        self._missed = missed


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
        """Leading tokens that the worker was thought to hold when it was selected."""
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
            failed = await _classify_error(assignment, from_rpc_error(error))
    except asyncio.CancelledError:
        if not silence.ended_call():
            raise
        failed = Failed(Unavailable(f"prefill worker {link.name} was silent for {silence_s:g} s"), Blame.PREFILL)
    finally:
        call.cancel()
    if not done or missing > 0:
        left = f"{missing} prompt log-probabilities" if done else "a token"
        deliver(failed or Failed(Unavailable(f"prefill worker {link.name} ended without {left}"), Blame.PREFILL))


async def _classify_error(assignment: PrefillAssignment, error: BatonError) -> Failed:
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


class AbandonCalls:
    """Tells prefill workers which exports will not be fetched, so that KV is not pinned until its lease ends.

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
