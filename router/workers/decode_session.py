"""Sessions with decode workers: one stream between this router and each worker, which all attempts there share.

    up    Hello, then Reserve, Start and Cancel for single attempts, and a Heartbeat every second
    down  parts for several attempts: answers, outputs of one step or several, ends and failures; and Heartbeats

A reservation that lacks room waits at the worker, which answers `waiting` first, and again when it has room.

A Heartbeat lists the attempts that its sender believes to be alive. Decode reports the end of an attempt before a list
without it. So an attempt that was granted or waits, has not ended, and is not on the list is lost, and it fails: an
error of the worker costs a second, and never a hang. Silence for `SILENCE_S` seconds ends the session.

Messages from decode are delivered at once, and never wait for a client. When the stream ends, the worker has freed all
that belonged to it. Every attempt of the session that has not ended there then fails, and a new session starts without
attempts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import grpc

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    SourceUnreachable,
    TransferError,
    Unavailable,
)
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.request import CachePolicy, DecodeTimings, Output, RemoteExport, ReserveResult
from baton.rpc.channel import HEARTBEAT_S, SILENCE_S, SilenceTimer
from baton.rpc.convert import cache_policy_to_proto, export_to_proto, finish_from_proto, token_from_proto
from baton.worker.status import WIRE_VERSION
from router.workers.failures import Blame, Cause, DecodeEnded, Deliver, FailureEvent, WorkerLoss

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

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The cause of a session's end; `reason` is empty if only the session's own error is known.

    `all_suspected` tells whether requests with a token from the worker are suspects of the loss too.
    """

    reason: str
    cause: Cause
    loss: WorkerLoss | None
    all_suspected: bool = False


class DecodeCall:
    """The part of a session that belongs to one attempt; it ends with `close`."""

    def __init__(self, session: DecodeSession, key: decode_pb2.AttemptKey, deliver: Deliver) -> None:
        self._session = session
        self._key = key
        self._deliver = deliver
        self._on_answer: Callable[[ReserveResult], None] | None = None
        """Gets the answers, and a refusal if the attempt fails, until `keep`."""
        self._live: set[int] = set()
        self._reserved = False
        self._unanswered = self._waiting = False
        self.has_output = False
        """Whether the worker has sent a token of the attempt."""

    @property
    def key(self) -> decode_pb2.AttemptKey:
        """The key of the attempt in messages."""
        return self._key

    @property
    def may_hold_pages(self) -> bool:
        """Whether the worker may hold pages of the attempt, or keeps its reservation: no refusal or end is known."""
        return self._unanswered or self._waiting or self.granted

    @property
    def granted(self) -> bool:
        """Whether the worker must hold pages of the attempt."""
        return self._reserved and not (self._unanswered or self._waiting) and bool(self._live)

    @property
    def waits(self) -> bool:
        """Whether the worker keeps the reservation until it has room; until then it holds nothing that could fail."""
        return self._waiting

    def reserve(
        self,
        on_answer: Callable[[ReserveResult], None],
        *,
        context_tokens: int,
        max_new_tokens: int,
        choices: tuple[int, ...],
        deadline_ms: int,
        salt: bytes,
        cache: CachePolicy,
        prefix_digests: bytes,
    ) -> None:
        """Ask for pages. `on_answer` gets one answer, or two if the first one is `waiting`.

        If the attempt fails before `keep`, or the session ends, it gets a refusal. `prefix_digests` are the digests of
        leading blocks that the worker may have, 32 bytes each, without separators.
        """
        self._on_answer = on_answer
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

    def keep(self) -> None:
        """Use the pages that were granted: from now on a failure of the attempt is delivered as an event."""
        self._on_answer = None

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

    def close(self) -> None:
        """End the attempt; the worker cancels it unless all of its choices have ended there. Idempotent."""
        if not self._session.forget(self._key):
            return
        if self._reserved and self._live:
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def on_reserved(self, message: decode_pb2.ReserveResult) -> None:
        """Handle an answer to `reserve`."""
        self._unanswered = False
        self._waiting = message.waiting and not message.granted
        self._reserved = message.granted or message.waiting
        if self._on_answer is not None:
            self._on_answer(
                ReserveResult(
                    message.granted,
                    message.reason,
                    message.too_small,
                    cached_tokens=message.cached_tokens,
                    waiting=self._waiting,
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
        self._session.forget(self._key)
        self._deliver(DecodeEnded())

    def on_failure(
        self, error: BatonError, blame: Blame, cause: Cause = Cause.FAULT, loss: WorkerLoss | None = None
    ) -> None:
        """Handle the end of the attempt by a fault, after which the worker holds nothing of it.

        Before `keep` it is a refusal, so that another worker can be asked. Later, the failure is delivered.
        """
        self._reserved = self._unanswered = self._waiting = False
        if self._on_answer is not None:
            self._on_answer(ReserveResult(False, str(error)))
        else:
            self._deliver(FailureEvent(error, blame, cause, loss))


class DecodeSession:
    """A stream between this router and a decode worker; it lasts as long as `run`."""

    def __init__(
        self, channel: grpc.aio.Channel, name: str, router_id: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`name` is the worker's name in logs; `on_change` is called when the number of open calls changes."""
        self._on_change = on_change
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._name = name
        # The queue needs no limit: it has a few messages for each attempt, and assignments and pages limit attempts.
        # A worker that reads no messages also falls silent, which ends the session.
        self._up: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        hello = decode_pb2.Hello(router_id=router_id, wire_version=WIRE_VERSION)
        self._up.put_nowait(decode_pb2.SessionUp(hello=hello))
        self._calls: dict[_Name, DecodeCall] = {}
        self.open = True
        """Whether new calls can begin."""

    @property
    def open_calls(self) -> int:
        """Number of calls that have not been closed."""
        return len(self._calls)

    @property
    def attempts_without_token(self) -> list[tuple[str, int]]:
        """Attempts, as request id and number, for which the worker was asked for pages, but has sent no token yet."""
        calls = self._calls.items()
        return [key[:2] for key, call in calls if call.may_hold_pages and not call.waits and not call.has_output]

    def granted_requests(self, *, without_token: bool = False) -> set[str]:
        """Ids of the requests that hold pages at the worker, or only of those `without_token` from it."""
        granted = [(key, call) for key, call in self._calls.items() if call.granted]
        return {request_id for (request_id, *_), call in granted if not (without_token and call.has_output)}

    def begin_call(self, request_id: str, attempt_number: int, reservation: int, deliver: Deliver) -> DecodeCall:
        """Begin the call of an attempt, whose events go to `deliver`. Raises Unavailable if the session has ended.

        `reservation` is another number for each call of the same attempt.
        """
        if not self.open:
            raise Unavailable(f"decode worker {self._name} is lost")
        key = decode_pb2.AttemptKey(request_id=request_id, attempt=attempt_number, reservation=reservation)
        call = self._calls[_name(key)] = DecodeCall(self, key, deliver)
        self._on_change()
        return call

    async def run(self, ended: Callable[[], SessionEnd]) -> None:
        """Send and receive until the stream breaks or falls silent, or the task is cancelled.

        At the end, `ended` is called. Its result tells the attempts why the session ended.
        """
        stream = self._stub.Session()
        writing = asyncio.create_task(self._write(stream), name=f"session up {self._name}")
        reason = "ended the session"
        silence = SilenceTimer(SILENCE_S, stream.cancel)
        try:
            with silence:
                async for down in stream:
                    silence.reset()
                    self._deliver_messages(down)
        except grpc.aio.AioRpcError as error:
            reason = f"is lost: {error.code().name} {error.details()}"
        except asyncio.CancelledError:
            if not silence.ended_call():
                raise
        except Exception as error:
            # A new session must start after any error, or the worker would stay unused.
            _logger.exception("a message of decode worker %s can't be handled", self._name)
            reason = f"sent what can't be handled: {type(error).__name__}: {error}"
        finally:
            if silence.expired:
                reason = f"was silent for {SILENCE_S:g} s"
            self._close(reason, ended)
            writing.cancel()
            stream.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def send(self, message: decode_pb2.SessionUp) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if self.open:
            self._up.put_nowait(message)

    def forget(self, key: decode_pb2.AttemptKey) -> bool:
        """Deliver no more messages to the attempt; False if it was forgotten before."""
        if self._calls.pop(_name(key), None) is None:
            return False
        self._on_change()
        return True

    def _close(self, reason: str, ended: Callable[[], SessionEnd]) -> None:
        self.open = False
        # The attempts are placed anew at once, and must not find this worker.
        self._on_change()
        ending = ended()
        error = Unavailable(f"decode worker {self._name}: {ending.reason or reason}")
        for call in list(self._calls.values()):
            suspected = call.granted and (ending.all_suspected or not call.has_output)
            call.on_failure(error, Blame.DECODE, ending.cause, ending.loss if suspected else None)

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        now = asyncio.get_running_loop().time
        beat_at = now() + HEARTBEAT_S
        while True:
            if now() >= beat_at:
                # At the end of the queue: decode must first read of the attempts that the list lacks.
                live = [call.key for call in self._calls.values() if call.may_hold_pages]
                self._up.put_nowait(decode_pb2.SessionUp(heartbeat=decode_pb2.Heartbeat(live=live)))
                beat_at = now() + HEARTBEAT_S
            try:
                async with asyncio.timeout_at(beat_at):
                    message = await self._up.get()
            except TimeoutError:
                continue
            await stream.write(message)

    def _deliver_messages(self, down: decode_pb2.SessionDown) -> None:
        for output in down.outputs:
            if call := self._calls.get(_name(output.key)):
                call.on_output(output)
        for reserved in down.reserved:
            if call := self._calls.get(_name(reserved.key)):
                call.on_reserved(reserved)
        for key in down.ended:
            if call := self._calls.get(_name(key)):
                call.on_ended()
        for failure in down.failures:
            if call := self._calls.get(_name(failure.key)):
                make, blame, cause = _FAULTS[failure.kind]
                call.on_failure(make(f"decode worker {self._name}: {failure.message}"), blame, cause)
        if down.HasField("heartbeat"):
            self._compare(down.heartbeat.live)

    def _compare(self, live: Iterable[decode_pb2.AttemptKey]) -> None:
        """Fail attempts that a Heartbeat lacks although they were granted, or wait, and have not ended."""
        known = {_name(key) for key in live}
        held = [key for key, call in self._calls.items() if call.granted or call.waits]
        for key in [key for key in held if key not in known]:
            error = EngineError(f"decode worker {self._name} knows nothing of attempt {key[0]}/{key[1]}")
            self._calls[key].on_failure(error, Blame.DECODE)


_Name = tuple[str, int, int]
"""Request id, number of the attempt, and number of the reservation."""


def _name(key: decode_pb2.AttemptKey) -> _Name:
    return key.request_id, key.attempt, key.reservation
