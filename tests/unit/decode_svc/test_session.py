"""Messages to a router: how they are gathered, and the translation of both directions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.kv.format import Shard
from baton.pb import decode_pb2, inference_pb2, kv_pb2
from baton.request import DecodeTimings, FinishReason, Output, RemoteExport, ReserveResult, TokenInfo
from baton.rpc.convert import export_to_proto
from baton.worker.status import WIRE_VERSION
from decode_svc.messages import AttemptKey, Cancel, Failure, FailureKind, Heartbeat, Reserve, SessionDown, Start
from decode_svc.servicer import command_from_proto, down_to_proto
from decode_svc.session import RouterSession
from tests.property.virtual import VirtualLoop

KEY = AttemptKey("r", 2, 3)
KEY_MESSAGE = decode_pb2.AttemptKey(request_id="r", attempt=2, reservation=3)


async def test_events_of_one_moment_are_one_message_and_the_end_comes_after_the_last() -> None:
    session = RouterSession(1, "router")
    output = Output(0, 1, (TokenInfo(5),), None, None)
    failure = Failure(FailureKind.ENGINE, "why")
    session.send(KEY, output)
    session.send(KEY, failure)
    messages = session.messages()
    assert await anext(messages) == SessionDown(outputs=[(KEY, output)], failures=[(KEY, failure)])
    session.send(KEY, ReserveResult(True))
    session.end()
    assert await anext(messages) == SessionDown(reserved=[(KEY, ReserveResult(True))])
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


def test_once_a_second_a_message_lists_who_lives_whatever_else_it_says() -> None:
    loop = VirtualLoop()
    live = [KEY]
    told: list[tuple[float, list[AttemptKey] | None]] = []

    async def talk() -> None:
        session = RouterSession(1, "router", lambda: live)

        async def listen() -> None:
            told.extend([(round(loop.time(), 3), down.live) async for down in session.messages()])

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.75)
        session.send(KEY, ReserveResult(True))
        await asyncio.sleep(0.75)
        live.clear()
        session.send(KEY, Failure(FailureKind.ENGINE, "why"))
        await asyncio.sleep(0.75)
        session.end()
        await listening

    loop.run_until_complete(talk())
    loop.close()
    assert told == [(0.75, None), (1.0, [KEY]), (1.5, None), (2.0, [])]


async def test_a_session_that_ends_by_an_error_keeps_nothing() -> None:
    session = RouterSession(1, "router")
    for _ in range(3):
        session.send(KEY, ReserveResult(False))
    assert session.unread == 3
    session.end(Overloaded("3 answers were not read"))
    assert [down async for down in session.messages()] == []
    assert session.unread == 0


def test_commands_are_read() -> None:
    up = decode_pb2.SessionUp
    reserve = decode_pb2.Reserve(key=KEY_MESSAGE, context_tokens=5, max_new_tokens=6, choices=2)
    assert command_from_proto(up(reserve=reserve)) == Reserve(KEY, 5, 6, 2)
    reserve.deadline_ms = 2500
    assert command_from_proto(up(reserve=reserve)) == Reserve(KEY, 5, 6, 2, 2.5)
    source = RemoteExport("t", "i", (Shard("h:1", range(2), range(3)), Shard("h:2", range(2, 4), range(3))), b"signed")
    start = decode_pb2.Start(key=KEY_MESSAGE, source=export_to_proto(source), deadline_ms=1500)
    assert command_from_proto(up(start=start)) == Start(KEY, source, 1.5)
    assert command_from_proto(up(cancel=decode_pb2.Cancel(key=KEY_MESSAGE))) == Cancel(KEY)
    choice = decode_pb2.Cancel(key=KEY_MESSAGE, choice_index=0)
    assert command_from_proto(up(cancel=choice)) == Cancel(KEY, 0)
    beat = decode_pb2.Heartbeat(live=[KEY_MESSAGE])
    assert command_from_proto(up(heartbeat=beat)) == Heartbeat(frozenset({KEY}))


def test_messages_that_are_no_command_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="message: must be a command, got 'nothing'"):
        command_from_proto(decode_pb2.SessionUp())
    with pytest.raises(InvalidRequest, match=r"cache: must be one of .*, got 99"):
        command_from_proto(decode_pb2.SessionUp(reserve=decode_pb2.Reserve(key=KEY_MESSAGE, cache=99)))
    with pytest.raises(InvalidRequest, match=r"cancel\.key\.request_id"):
        command_from_proto(decode_pb2.SessionUp(cancel=decode_pb2.Cancel()))
    with pytest.raises(InvalidRequest, match="hello"):
        command_from_proto(decode_pb2.SessionUp(hello=decode_pb2.Hello(router_id="x", wire_version=WIRE_VERSION)))


LONG = "x" * (1 << 20)


def source(**fields: Any) -> dict[str, Any]:
    return {"start": decode_pb2.Start(key=KEY_MESSAGE, source=kv_pb2.RemoteExport(**fields))}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("reserve.key.request_id", {"reserve": decode_pb2.Reserve(key=decode_pb2.AttemptKey(request_id=LONG))}),
        ("start.key.request_id", {"start": decode_pb2.Start(key=decode_pb2.AttemptKey(request_id=LONG))}),
        ("start.source.transfer_id", source(transfer_id=LONG)),
        ("start.source.incarnation", source(incarnation=LONG)),
        ("start.source.shards.kv_address", source(shards=[kv_pb2.Shard(kv_address=LONG)])),
        ("start.prefix_transfer_id", {"start": decode_pb2.Start(key=KEY_MESSAGE, prefix_transfer_id=LONG)}),
        ("start.source.ticket", source(ticket=LONG.encode())),
        ("cancel.key.request_id", {"cancel": decode_pb2.Cancel(key=decode_pb2.AttemptKey(request_id=LONG))}),
        (
            "heartbeat.live.key.request_id",
            {"heartbeat": decode_pb2.Heartbeat(live=[KEY_MESSAGE, decode_pb2.AttemptKey(request_id=LONG)])},
        ),
    ],
)
def test_ids_of_a_router_are_bounded(field: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must have at most ") as refused:
        command_from_proto(decode_pb2.SessionUp(**message))
    assert len(str(refused.value)) < 250


def test_messages_are_written() -> None:
    timings = DecodeTimings(1.0, 2.0)
    down = SessionDown(
        reserved=[(KEY, ReserveResult(False, "full", too_small=True))],
        outputs=[(KEY, Output(1, 7, (TokenInfo(5, -0.5, ((5, -0.5),)),), FinishReason.STOP, timings))],
        failures=[(KEY, Failure(kind, "why")) for kind in FailureKind],
    )
    message = down_to_proto(down)
    (reserved,), (output,) = message.reserved, message.outputs
    assert (reserved.key, reserved.granted, reserved.reason, reserved.too_small) == (KEY_MESSAGE, False, "full", True)
    assert not message.HasField("heartbeat")
    assert list(down_to_proto(SessionDown(live=[KEY])).heartbeat.live) == [KEY_MESSAGE]
    assert down_to_proto(SessionDown(live=[])).HasField("heartbeat")
    assert (output.choice_index, output.output_index, output.tokens[0].token_id) == (1, 7, 5)
    assert output.tokens[0].top[0].logprob == -0.5
    assert output.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert output.timings.slot_wait_ms == 2.0
    kinds = {failure.kind for failure in message.failures}
    assert kinds == set(decode_pb2.AttemptFailure.Kind.values()) - {0}
