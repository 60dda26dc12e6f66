"""The words of a decode worker about attempts, as a router's session takes them."""

import asyncio

import grpc.aio
import pytest

from baton.pb import decode_pb2
from baton.request import CachePolicy
from router.workers.decode_session import DecodeSession
from router.workers.failures import DecodeEnded, Event, FailureEvent


async def granted(session: DecodeSession, events: list[Event]) -> decode_pb2.AttemptKey:
    """An attempt that the worker has granted."""
    attempt = session.begin_call("r", 0, events.append)
    asking = asyncio.create_task(
        attempt.reserve(
            context_tokens=1,
            max_new_tokens=1,
            choices=(0,),
            deadline_ms=1,
            salt=b"",
            cache=CachePolicy.OFF,
            prefix_digests=b"",
        )
    )
    await asyncio.sleep(0)
    session._deliver_messages(
        decode_pb2.SessionDown(reserved=[decode_pb2.ReserveResult(key=attempt.key, granted=True)])
    )
    await asking
    assert attempt.granted
    return attempt.key


BEATS = [decode_pb2.SessionDown(heartbeat=decode_pb2.Heartbeat())] * 3


@pytest.mark.parametrize("ended", [True, False])
async def test_an_attempt_that_the_worker_no_longer_lists_fails_unless_it_was_told_to_have_ended(ended: bool) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        key = await granted(session, events)
        for down in (decode_pb2.SessionDown(ended=[key] if ended else []), *BEATS):
            session._deliver_messages(down)
    (event,) = events
    if ended:
        assert event == DecodeEnded()
    else:
        assert isinstance(event, FailureEvent)
        assert "knows nothing of attempt r/0" in str(event.error)
