"""The one stream between this router and a decode worker, shared by all attempts there.

    up    Hello, then Reserve, Start, Cancel as attempts need them, Heartbeat when there is nothing else to say
    down  one message a step; each attempt's part is delivered to that attempt alone

Nothing here waits for a client: what comes down is handed on at once. When the stream ends, for whatever reason, the
worker has freed all that it owned, so every attempt on it fails, and a new session starts with none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import grpc

from baton.errors import BatonError, DeadlineExceeded, EngineError, SourceUnreachable, TransferError, Unavailable
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.rpc.convert import finish_from_proto, token_from_proto
from router.events import Blame, DecodeTimings, Deliver, Failed, Output

HEARTBEAT_S = 1.0

_Kind = decode_pb2.AttemptFailure.Kind
_FAULTS: dict[int, tuple[type[BatonError], Blame]] = {
    _Kind.KIND_SOURCE_UNREACHABLE: (SourceUnreachable, Blame.PAIR),
    _Kind.KIND_TRANSFER: (TransferError, Blame.PAIR),
    _Kind.KIND_ENGINE: (EngineError, Blame.DECODE),
    _Kind.KIND_DEADLINE: (DeadlineExceeded, Blame.DECODE),
    _Kind.KIND_DRAINING: (Unavailable, Blame.DECODE),
}


@dataclass(frozen=True, slots=True)
class Reserved:
    """The answer to a reservation; `never` when it can't be granted even by an empty worker."""

    granted: bool
    reason: str
    never: bool


class DecodeAttempt:
    """One attempt's part of a session; lives until `close`."""

    def __init__(self, session: DecodeSession, request_id: str, number: int, deliver: Deliver) -> None:
        self._session = session
        self._key = decode_pb2.AttemptKey(request_id=request_id, attempt=number)
        self._deliver = deliver
        self._answer: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._live: set[int] = set()
        self._held = False
        self._unanswered = False

    async def reserve(self, *, context_tokens: int, max_new_tokens: int, choices: tuple[int, ...]) -> Reserved:
        """Ask for pages and wait for the answer. Raises Unavailable when the session ends before it."""
        self._live.update(choices)
        self._held = self._unanswered = True
        self._session.send(
            decode_pb2.SessionUp(
                reserve=decode_pb2.Reserve(
                    key=self._key,
                    context_tokens=context_tokens,
                    max_new_tokens=max_new_tokens,
                    choices=len(choices),
                )
            )
        )
        answer = await self._answer
        self._held = answer.granted
        return answer

    def start(self, *, transfer_id: str, source: str, incarnation: str, deadline_ms: int) -> None:
        """Tell where to fetch the KV."""
        self._session.send(
            decode_pb2.SessionUp(
                start=decode_pb2.Start(
                    key=self._key,
                    transfer_id=transfer_id,
                    source_address=source,
                    source_incarnation=incarnation,
                    deadline_ms=deadline_ms,
                )
            )
        )

    def cancel_choice(self, choice: int) -> None:
        """End one choice; the others go on."""
        if choice in self._live:
            self._live.discard(choice)
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key, choice_index=choice)))

    def close(self) -> None:
        """End the attempt; the worker is told unless it ended all choices itself."""
        if not self._session.forget(self._key):
            return
        if self._unanswered:
            self._session.skip_answer(self._key)
        if self._held and self._live:
            self._session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=self._key)))

    def on_reserved(self, message: decode_pb2.ReserveResult) -> None:
        """Take the answer to `reserve`."""
        self._unanswered = False
        if not self._answer.done():
            self._answer.set_result(Reserved(message.granted, message.reason, message.never))

    def on_output(self, message: decode_pb2.SequenceOutput) -> None:
        """Hand on a choice's tokens."""
        finish = finish_from_proto(message.finish_reason)
        if finish is not None:
            self._live.discard(message.choice_index)
        timings = None
        if message.HasField("timings"):
            timings = DecodeTimings(message.timings.fetch_ms, message.timings.slot_wait_ms)
        tokens = tuple(map(token_from_proto, message.tokens))
        self._deliver(Output(message.choice_index, message.output_index, tokens, finish, timings))

    def on_failure(self, error: BatonError, blame: Blame) -> None:
        """Take the attempt's end by a fault; the worker holds nothing of it any more.

        Before the answer to `reserve`, that answer is where the fault goes: another worker may still be asked.
        """
        self._held = self._unanswered = False
        if self._answer.done():
            self._deliver(Failed(error, blame))
            return
        self._answer.set_exception(error)
        # An attempt that is closed before it asks leaves the answer to nobody.
        self._answer.exception()


class DecodeSession:
    """One stream, from `run`'s begin to its end."""

    def __init__(self, channel: grpc.aio.Channel, worker: str, router_id: str) -> None:
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._worker = worker
        self._up: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        self._up.put_nowait(decode_pb2.SessionUp(hello=decode_pb2.Hello(router_id=router_id)))
        self._attempts: dict[tuple[str, int], DecodeAttempt] = {}
        self._skipped: Counter[tuple[str, int]] = Counter()
        self.open = True
        """Whether attempts can be made."""

    @property
    def attempts(self) -> int:
        """Number of attempts that live."""
        return len(self._attempts)

    def attempt(self, request_id: str, number: int, deliver: Deliver) -> DecodeAttempt:
        """A new attempt whose events go to `deliver`; raises Unavailable when the session is over."""
        if not self.open:
            raise Unavailable(f"decode worker {self._worker} is lost")
        attempt = DecodeAttempt(self, request_id, number, deliver)
        self._attempts[request_id, number] = attempt
        return attempt

    async def run(self) -> None:
        """Carry messages both ways until the stream breaks or the task is cancelled."""
        call = self._stub.Session()
        writing = asyncio.create_task(self._write(call), name=f"session up {self._worker}")
        reason = "ended the session"
        try:
            async for down in call:
                self._dispatch(down)
        except grpc.aio.AioRpcError as error:
            reason = f"is lost: {error.code().name} {error.details()}"
        except asyncio.CancelledError:
            reason = "is gone"
            raise
        finally:
            self._close(Unavailable(f"decode worker {self._worker} {reason}"))
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def send(self, message: decode_pb2.SessionUp) -> None:
        """Queue a message; nothing is sent once the session is over."""
        if self.open:
            self._up.put_nowait(message)

    def forget(self, key: decode_pb2.AttemptKey) -> bool:
        """Deliver nothing to the attempt any more; False if it was forgotten before."""
        return self._attempts.pop((key.request_id, key.attempt), None) is not None

    def skip_answer(self, key: decode_pb2.AttemptKey) -> None:
        """The next answer to a reservation of this name is for one that was given up; a later one may ask again."""
        self._skipped[key.request_id, key.attempt] += 1

    def _close(self, error: Unavailable) -> None:
        self.open = False
        for attempt in list(self._attempts.values()):
            attempt.on_failure(error, Blame.DECODE)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    message = await self._up.get()
            except TimeoutError:
                message = decode_pb2.SessionUp(heartbeat=decode_pb2.Heartbeat())
            await call.write(message)

    def _dispatch(self, down: decode_pb2.SessionDown) -> None:
        for reserved in down.reserved:
            key = reserved.key.request_id, reserved.key.attempt
            if key in self._skipped:
                self._skipped -= Counter((key,))
            elif attempt := self._attempts.get(key):
                attempt.on_reserved(reserved)
        for output in down.outputs:
            if attempt := self._attempts.get((output.key.request_id, output.key.attempt)):
                attempt.on_output(output)
        for failure in down.failures:
            if attempt := self._attempts.get((failure.key.request_id, failure.key.attempt)):
                make, blame = _FAULTS.get(failure.kind, (EngineError, Blame.DECODE))
                attempt.on_failure(make(f"decode worker {self._worker}: {failure.message}"), blame)
