"""The stream between this router and a decode worker, shared by all attempts there.

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
import logging
from collections import Counter
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
from baton.request import CachePolicy
from baton.rpc.convert import cache_policy_to_proto, export_to_proto, finish_from_proto, token_from_proto
from baton.rpc.silence import HEARTBEAT_S, SILENCE_S, SilenceTimer
from baton.transfer.remote import RemoteExport
from baton.worker.messages import DecodeTimings, Output, ReserveResult
from baton.worker.status import WIRE_VERSION
from router.request import Blame, Cause, DecodeEnded, Deliver, Failed
from router.workers.failures import WorkerLoss

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
class Prefix:
    """The prefix of a reservation: digests of blocks that may be cached, one after the other."""

    digests: bytes = b""
    salt: bytes = b""
    policy: CachePolicy = CachePolicy.READ_WRITE


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The meaning of a session's end; `reason` is empty where the session knows no more."""

    reason: str
    cause: Cause
    loss: WorkerLoss | None


class DecodeAttempt:
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
        self, *, context_tokens: int, max_new_tokens: int, choices: tuple[int, ...], deadline_ms: int, prefix: Prefix
    ) -> ReserveResult:
        """Ask for pages and wait for the answer. Raises Unavailable when the session ends before it."""
        self._live.update(choices)
        self._reserved = self._unanswered = True
        message = decode_pb2.SessionUp(
            reserve=decode_pb2.Reserve(
                key=self._key,
                context_tokens=context_tokens,
                max_new_tokens=max_new_tokens,
                choices=len(choices),
                deadline_ms=deadline_ms,
                cache_salt=prefix.salt,
                cache=cache_policy_to_proto(prefix.policy),
            )
        )
        # Set here, because a message within a message is copied: there may be megabytes.
        message.reserve.prefix_digests = prefix.digests
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
        """Tell a worker that refused the attempt that nobody asks again; it may have set pages aside."""
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
                    message.never,
                    retry_after_s,
                    message.cached_tokens,
                    message.room_tokens,
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
        self._attempts: dict[tuple[str, int], DecodeAttempt] = {}
        self._skipped: Counter[tuple[str, int]] = Counter()
        self._missed: set[tuple[str, int]] = set()
        self.open = True
        """Whether attempts can be made."""

    @property
    def attempts(self) -> int:
        """Number of attempts that live."""
        return len(self._attempts)

    @property
    def newcomers(self) -> int:
        """Number of attempts that the worker was asked for, and has sent no token of."""
        return sum(attempt.asked and not attempt.has_output for attempt in self._attempts.values())

    def attempt(self, request_id: str, number: int, deliver: Deliver) -> DecodeAttempt:
        """A new attempt whose events go to `deliver`; raises Unavailable when the session is over."""
        if not self.open:
            raise Unavailable(f"decode worker {self._worker} is lost")
        attempt = DecodeAttempt(self, request_id, number, deliver)
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
                    self._dispatch(down)
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

    def _dispatch(self, down: decode_pb2.SessionDown) -> None:
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
