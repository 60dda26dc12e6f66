"""Calls of an attempt to its two workers: a call to the prefill worker, and a share of the session with decode.

At a prefill worker, an attempt has an assignment, by which its prompt counts, and a call that brings its events.
Between this router and a decode worker there is one stream, the session, which all attempts there share:

    up    Hello, then Reserve, Start and Cancel for single attempts, and a Heartbeat every second
    down  one message for each step, with parts for several attempts, and Heartbeats

A Heartbeat lists the attempts that its sender believes to be alive. If two Heartbeats in a row lack an attempt that was
granted, the worker has lost it, and it fails: a lost message costs two seconds, and never a hang. One Heartbeat is not
enough, because decode no longer lists an attempt that has ended with prefill's first token, and this router may get
that token later. Silence for `SILENCE_S` seconds ends the session.

Messages from decode are delivered at once, and never wait for a client. When the stream ends, the worker has freed all
that belonged to it. Every attempt of the session then fails, and a new session starts without attempts.
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
    PromptLogprobs,
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
"""Seconds after which a client should try again, if its request was preempted too often."""

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
    """The attempt has ended at the decode worker without a fault, and holds nothing there."""


Event = PrefillProgress | PromptLogprobs | Prefilled | Output | DecodeEnded | Failed
Deliver = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The cause of a session's end; `reason` is empty if only the session's own error is known."""

    reason: str
    cause: Cause
    loss: WorkerLoss | None


class DecodeCall:
    """The part of a session that belongs to one attempt; it ends with `close`."""

    def __init__(self, session: DecodeSession, request_id: str, number: int, deliver: Deliver) -> None:
        self._session = session
        self._key = decode_pb2.AttemptKey(request_id=request_id, attempt=number)
        self._deliver = deliver
        self._answer: asyncio.Future[ReserveResult] = asyncio.get_running_loop().create_future()
        self._live: set[int] = set()
        self._reserved = False
        self._unanswered = False
        self.has_output = False
        """Whether the worker has sent a token of the attempt."""

    @property
    def key(self) -> decode_pb2.AttemptKey:
        """The key of the attempt in messages."""
        return self._key

    @property
    def may_hold_pages(self) -> bool:
        """Whether the worker may hold pages of the attempt: it was asked, and no refusal or end is known."""
        return self._unanswered or self.granted

    @property
    def granted(self) -> bool:
        """Whether the worker must hold pages of the attempt."""
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
        """Ask for pages and wait for the answer. Raises Unavailable if the session ends before.

        `prefix_digests` are the digests of leading blocks that the worker may have, 32 bytes each, without separators.
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
        # Set only now, because protobuf copies the inner message, and the digests may have megabytes.
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
        """Tell the worker where to fetch the KV.

        If `prefix_transfer_id` is not empty, the worker exports its pinned prefix under this id.
        """
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
        """End one choice at the worker; the others go on."""
        if choice in self._live:
            self._live.discard(choice)
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key, choice_index=choice)))

    def withdraw(self) -> None:
        """Tell a worker that refused the attempt not to set pages aside: the attempt will not ask again."""
        self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def close(self) -> None:
        """End the attempt; the worker cancels it unless all of its choices have ended there. Idempotent."""
        if not self._session.forget(self._key):
            return
        if self._unanswered:
            self._session.skip_answer(self._key)
        if self._reserved and self._live:
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def on_reserved(self, message: decode_pb2.ReserveResult) -> None:
        """Handle the answer to `reserve`."""
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
        """Deliver tokens of a choice."""
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
        """Handle the end of the attempt without a fault: all of its choices have ended at the worker."""
        self._reserved = False
        self._deliver(DecodeEnded())

    def on_failure(
        self, error: BatonError, blame: Blame, cause: Cause = Cause.FAULT, loss: WorkerLoss | None = None
    ) -> None:
        """Handle the end of the attempt by a fault, after which the worker holds nothing of it.

        While `reserve` waits, it raises `error`, so that another worker can be asked. Later, Failed is delivered.
        """
        self._reserved = self._unanswered = False
        if self._answer.done():
            self._deliver(Failed(error, blame, cause, loss))
            return
        self._answer.set_exception(error)
        # If `reserve` was not called, nobody reads this future: asyncio must not warn about its exception.
        self._answer.exception()


class DecodeSession:
    """A stream between this router and a decode worker; it lasts as long as `run`."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: str, router_id: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`worker` is the name for logs; `on_change` is called when the number of attempts changes."""
        self._on_change = on_change
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._worker = worker
        # The queue needs no limit: it has a few messages for each attempt, and assignments and pages limit attempts.
        # A worker that reads no messages also falls silent, which ends the session.
        self._up: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        hello = decode_pb2.Hello(router_id=router_id, wire_version=WIRE_VERSION)
        self._up.put_nowait(decode_pb2.SessionUp(hello=hello))
        self._attempts: dict[tuple[str, int], DecodeCall] = {}
        self._skipped: Counter[tuple[str, int]] = Counter()
        self._missed: set[tuple[str, int]] = set()
        self.open = True
        """Whether new calls can begin."""

    @property
    def attempts(self) -> int:
        """Number of attempts whose call is open."""
        return len(self._attempts)

    @property
    def requests_without_token(self) -> int:
        """Number of attempts for which the worker was asked for pages, but has sent no token yet."""
        return sum(attempt.may_hold_pages and not attempt.has_output for attempt in self._attempts.values())

    def begin_call(self, request_id: str, number: int, deliver: Deliver) -> DecodeCall:
        """Begin the call of an attempt, whose events go to `deliver`. Raises Unavailable if the session has ended."""
        if not self.open:
            raise Unavailable(f"decode worker {self._worker} is lost")
        attempt = DecodeCall(self, request_id, number, deliver)
        self._attempts[request_id, number] = attempt
        self._on_change()
        return attempt

    async def run(self, ended: Callable[[int], SessionEnd]) -> None:
        """Send and receive until the stream breaks or falls silent, or the task is cancelled.

        At the end, `ended` is called with the number of requests that may have killed the worker. Its result tells the
        attempts why the session ended.
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
            # A new session must start after any error, or the worker would stay unused.
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
        """Queue a message; it is dropped if the session has ended."""
        if self.open:
            self._up.put_nowait(message)

    def forget(self, key: decode_pb2.AttemptKey) -> bool:
        """Deliver no more messages to the attempt; False if it was forgotten before."""
        if self._attempts.pop((key.request_id, key.attempt), None) is None:
            return False
        self._on_change()
        return True

    def skip_answer(self, key: decode_pb2.AttemptKey) -> None:
        """Ignore the next answer to a reservation with this key: the attempt gave up, and may ask again later."""
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
                live = [attempt.key for attempt in self._attempts.values() if attempt.may_hold_pages]
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
        """Fail attempts that two Heartbeats in a row lack although they were granted."""
        known = {(key.request_id, key.attempt) for key in live}
        missed = {key for key, attempt in self._attempts.items() if attempt.granted and key not in known}
        for key in missed & self._missed:
            error = EngineError(f"decode worker {self._worker} knows nothing of attempt {key[0]}/{key[1]}")
            self._attempts[key].on_failure(error, Blame.DECODE)
        self._missed = missed


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

    def complete(self, transfer_id: str, source: PrefixSource | None) -> bytes:
        """The complete message. Protobuf merges messages that are concatenated, so two parts make one request."""
        last = prefill_pb2.PrefillRequest(transfer_id=transfer_id)
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

    def attach(self, assignment: PrefillAssignment, request_id: str) -> None:
        """Record that the request is at the worker."""

    def detach(self, assignment: PrefillAssignment) -> None:
        """Record that the request needs nothing more from the worker."""

    def unassign(self, assignment: PrefillAssignment) -> bool:
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
        self.shards = complete_shards(identity.shards, link.address)
        """The worker's shards, with the addresses at which decode workers fetch KV."""
        self.incarnation = identity.incarnation
        self.consumer = identity.consumer
        """Audience of KV tickets for this worker."""
        self.lost = lost
        """Set when this incarnation of the worker is lost, also after `release`."""
        self.loss: WorkerLoss | None = None
        """The loss of the worker, if the request was there when it was lost."""
        self._deliver: Deliver | None = None
        self._failed: Failed | None = None

    def attach(self, request_id: str, deliver: Deliver) -> None:
        """Record that the request goes to the worker. If the worker is lost before `release`, Failed is delivered."""
        self._deliver = deliver
        if self._failed is not None:
            deliver(self._failed)
        else:
            self.link.attach(self, request_id)

    def detach(self) -> None:
        """Record that the request needs this worker no more: its KV was fetched. Idempotent."""
        self.link.detach(self)

    def fail(self, error: BatonError, cause: Cause) -> None:
        """Deliver Failed, because the worker is lost."""
        self._failed = Failed(error, Blame.PREFILL, cause, self.loss)
        if self._deliver is not None:
            self._deliver(self._failed)

    async def wait_for_loss(self, seconds: float) -> bool:
        """Wait up to `seconds` for the loss of the worker; returns whether it is lost."""
        if not self.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.lost.wait()
        return self.lost.is_set()

    def release(self) -> bool:
        """Free the place for another prompt; False if it was freed before."""
        return self.link.unassign(self)


def _host(address: str) -> str:
    """The host of "host:port", without brackets."""
    return parse_address(address)[0]


def complete_shards(shards: Sequence[Shard], dialled: str) -> tuple[Shard, ...]:
    """Shards with complete KV addresses; `dialled` is the "host:port" at which the router reached the worker."""
    return tuple(replace(shard, kv_address=complete_address(shard.kv_address, dialled)) for shard in shards)


def complete_address(kv_address: str, dialled: str) -> str:
    """`kv_address`; an empty host in it is replaced by the host of the `dialled` address."""
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
    timeout: float | None,
    silence_s: float,
    deliver: Deliver,
) -> None:
    """Call the prefill worker and deliver its events; a cancellation frees all that the worker holds for the call.

    Delivers any number of PrefillProgress and PromptLogprobs events, and Prefilled or Failed once. PromptLogprobs may
    come after Prefilled, and Failed too if the rest of them is lost. A call that breaks after all events came
    does no harm. `transfer_id` is empty if no decode follows. `timeout` is in seconds. Workers send a message every
    second, so `silence_s` seconds without one are a fault.
    """
    link = assignment.link
    method = link.channel.unary_stream(_METHOD, response_deserializer=prefill_pb2.PrefillEvent.FromString)
    call = method(request.complete(transfer_id, source), timeout=timeout)
    missing = request.logprob_count
    done, failed = False, None
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
    """The failure for a broken call: a refusal by a full worker, a drain, a lost worker, or a fault."""
    # Another worker may have more memory, so a prompt that is too large for this one is tried again.
    if isinstance(error, Overloaded) or (isinstance(error, InvalidRequest) and error.field == "prompt_token_ids"):
        return Failed(error, Blame.PREFILL, Cause.REFUSED)
    if isinstance(error, Unavailable):
        # When a worker dies, call and watch break at the same moment, but only the watch tells a death from a fault.
        if assignment.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
        if await assignment.wait_for_loss(LOSS_GRACE_S):
            return Failed(error, Blame.PREFILL, Cause.LOST, assignment.loss)
        if assignment.link.draining:
            return Failed(error, Blame.PREFILL, Cause.DRAIN)
    return Failed(error, Blame.PREFILL)


def prefilled_from_proto(done: prefill_pb2.PrefillDone) -> Prefilled:
    """The event in a message that tells of a computed prompt."""
    return Prefilled(
        first_tokens=tuple(map(first_token_from_proto, done.first_tokens)),
        cached_tokens=done.cached_tokens,
        cached=cached_from_proto(done.cached),
    )


class AbandonCalls:
    """Tells prefill workers which exports will not be fetched, so that they can free the KV before its lease ends.

    The calls run in the background, one at most for each attempt, each with a timeout. If a call is lost, the end of
    the lease frees the KV.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    def abandon(self, assignment: PrefillAssignment, transfer_id: str) -> None:
        """Start a call that ends an export; no call is made to a lost worker."""
        if assignment.lost.is_set():
            return
        call = asyncio.create_task(_abandon(assignment, transfer_id), name=f"abandon {transfer_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def finish(self) -> None:
        """Wait until all calls have ended, for their timeout at most."""
        await asyncio.gather(*self._calls, return_exceptions=True)


async def _abandon(assignment: PrefillAssignment, transfer_id: str) -> None:
    request = prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=assignment.incarnation)
    try:
        await prefill_pb2_grpc.PrefillStub(assignment.link.channel).Abandon(request, timeout=_ABANDON_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        _logger.warning("transfer %s was not abandoned at %s: %s", transfer_id, assignment.link.name, error.code().name)
