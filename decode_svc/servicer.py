"""The Session stream: commands from the router, results and heartbeats to it. Translates only.

A router sends something every second. If nothing comes for SILENCE_S, the router is considered dead, whatever the state
of its connection, and its session ends. If this process itself was stopped for a while, it first reads the messages
that came meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.request import DecodeTimings, Output, ReserveResult, check_id
from baton.rpc.channel import SILENCE_S, SilenceTimer
from baton.rpc.convert import add_token, cache_policy_from_proto, export_from_proto, finish_to_proto
from baton.worker.status import WIRE_VERSION
from decode_svc.messages import (
    AttemptKey,
    Cancel,
    Command,
    Failure,
    FailureKind,
    Heartbeat,
    Reserve,
    SessionDown,
    Start,
)
from decode_svc.session import RouterSession
from decode_svc.worker import DecodeWorker

HELLO_TIMEOUT_S = 10.0

_KINDS = {
    FailureKind.SOURCE_UNREACHABLE: decode_pb2.AttemptFailure.KIND_SOURCE_UNREACHABLE,
    FailureKind.TRANSFER: decode_pb2.AttemptFailure.KIND_TRANSFER,
    FailureKind.ENGINE: decode_pb2.AttemptFailure.KIND_ENGINE,
    FailureKind.DEADLINE: decode_pb2.AttemptFailure.KIND_DEADLINE,
    FailureKind.DRAINING: decode_pb2.AttemptFailure.KIND_DRAINING,
    FailureKind.PREEMPTED: decode_pb2.AttemptFailure.KIND_PREEMPTED,
}


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves sessions."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.SessionDown]:
        """Serve one router until either side ends the stream; what it owned is then freed.

        Raises InvalidRequest if the first message is no Hello, or a later one is no valid command; DeadlineExceeded if
        the router falls silent, Overloaded if it does not read what it asked for.
        """
        session = self._worker.open_session(await _hello(request_iterator))
        reading = asyncio.create_task(self._read(request_iterator, session), name="session-up")
        try:
            async for down in session.messages():
                yield down_to_proto(down)
            if session.error is not None:
                raise session.error
            if reading.done():
                reading.result()
        finally:
            self._worker.close_session(session)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionUp], session: RouterSession) -> None:
        error = DeadlineExceeded(f"nothing was heard from the router for {SILENCE_S:g} s")
        try:
            with SilenceTimer(SILENCE_S, lambda: self._worker.close_session(session, error)) as silence:
                while (message := await anext(requests, None)) is not None:
                    silence.reset()
                    self._worker.handle_command(session, command_from_proto(message))
        finally:
            self._worker.close_session(session)


async def _hello(requests: AsyncIterator[decode_pb2.SessionUp]) -> str:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no hello came within {HELLO_TIMEOUT_S:g} s") from None
    kind = first.WhichOneof("message") if first is not None else None
    if first is None or kind != "hello":
        raise InvalidRequest("message", "the first message of a session must be hello", kind or "nothing")
    check_id("hello.router_id", first.hello.router_id, optional=True)
    if first.hello.wire_version != WIRE_VERSION:
        problem = f"this worker speaks version {WIRE_VERSION}, the router must be of the same release"
        raise InvalidRequest("hello.wire_version", problem, first.hello.wire_version)
    return first.hello.router_id


def command_from_proto(message: decode_pb2.SessionUp) -> Command:
    """A router's command.

    Raises InvalidRequest for a second hello, an empty message, and for invalid ids, addresses, tickets and policies.
    """
    kind = message.WhichOneof("message")
    match kind:
        case "reserve":
            reserve = message.reserve
            return Reserve(
                _key(reserve.key, kind),
                reserve.context_tokens,
                reserve.max_new_tokens,
                reserve.choices,
                reserve.deadline_ms / 1e3 if reserve.deadline_ms else None,
                reserve.prefix_digests,
                reserve.cache_salt,
                cache_policy_from_proto(reserve.cache),
            )
        case "start":
            start = message.start
            check_id("start.prefix_transfer_id", start.prefix_transfer_id, optional=True)
            return Start(
                _key(start.key, kind),
                export_from_proto("start.source", start.source),
                start.deadline_ms / 1e3 if start.deadline_ms else None,
                start.prefix_transfer_id,
            )
        case "cancel":
            cancel = message.cancel
            return Cancel(_key(cancel.key, kind), cancel.choice_index if cancel.HasField("choice_index") else None)
        case "heartbeat":
            return Heartbeat(frozenset(_key(key, "heartbeat.live") for key in message.heartbeat.live))
        case "hello":
            raise InvalidRequest("hello", "must come once, as the first message")
    raise InvalidRequest("message", "must be a command", kind or "nothing")


def down_to_proto(down: SessionDown) -> decode_pb2.SessionDown:
    """A message to a router as its proto message."""
    heartbeat = None if down.live is None else decode_pb2.Heartbeat(live=map(_key_to_proto, down.live))
    message = decode_pb2.SessionDown(
        heartbeat=heartbeat,
        reserved=[_reserved(*each) for each in down.reserved],
        failures=[_failure(*each) for each in down.failures],
        ended=map(_key_to_proto, down.ended),
    )
    for key, output in down.outputs:
        _add_output(message, key, output)
    return message


def _key(key: decode_pb2.AttemptKey, kind: str) -> AttemptKey:
    check_id(f"{kind}.key.request_id", key.request_id)
    return AttemptKey(key.request_id, key.attempt, key.reservation)


def _key_to_proto(key: AttemptKey) -> decode_pb2.AttemptKey:
    return decode_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt, reservation=key.reservation)


def _reserved(key: AttemptKey, result: ReserveResult) -> decode_pb2.ReserveResult:
    return decode_pb2.ReserveResult(
        key=_key_to_proto(key),
        granted=result.granted,
        reason=result.reason,
        too_small=result.too_small,
        cached_tokens=result.cached_tokens,
        waiting=result.waiting,
    )


def _add_output(down: decode_pb2.SessionDown, key: AttemptKey, output: Output) -> None:
    """Add an output to the message.

    It is filled in place: copying submessages costs three times as much, at every step.
    """
    message = down.outputs.add(
        choice_index=output.choice_index,
        output_index=output.output_index,
        finish_reason=finish_to_proto(output.finish),
        timings=_timings(output.timings),
    )
    name = message.key
    name.request_id, name.attempt, name.reservation = key.request_id, key.attempt, key.reservation
    for token in output.tokens:
        add_token(message.tokens, token)


def _timings(timings: DecodeTimings | None) -> decode_pb2.DecodeTimings | None:
    if timings is None:
        return None
    return decode_pb2.DecodeTimings(fetch_ms=timings.fetch_ms, slot_wait_ms=timings.slot_wait_ms)


def _failure(key: AttemptKey, failure: Failure) -> decode_pb2.AttemptFailure:
    return decode_pb2.AttemptFailure(key=_key_to_proto(key), kind=_KINDS[failure.kind], message=failure.message)
