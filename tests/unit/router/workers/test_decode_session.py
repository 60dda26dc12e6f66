"""The words of a decode worker about attempts, as a router's session takes them."""

import asyncio
import contextlib
from typing import cast

import grpc.aio
import pytest

from baton.pb import decode_pb2
from baton.request import CachePolicy, ReserveResult
from router.workers.decode_session import DecodeCall, DecodeSession
from router.workers.failures import DecodeEnded, Event, FailureEvent
from tests.property.virtual import VirtualLoop


async def asked(session: DecodeSession, events: list[Event]) -> tuple[DecodeCall, asyncio.Task[ReserveResult]]:
    """An attempt that asks the worker for pages, and its task."""
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
    return attempt, asking


async def granted(session: DecodeSession, events: list[Event]) -> decode_pb2.AttemptKey:
    """An attempt that the worker has granted."""
    attempt, asking = await asked(session, events)
    grant = decode_pb2.ReserveResult(key=attempt.key, granted=True)
    session._deliver_messages(decode_pb2.SessionDown(reserved=[grant]))
    await asking
    assert attempt.granted
    return attempt.key


@pytest.mark.parametrize("ended", [True, False])
async def test_an_attempt_that_the_worker_no_longer_lists_fails_unless_it_was_told_to_have_ended(ended: bool) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        key = await granted(session, events)
        ends = [key] if ended else []
        session._deliver_messages(decode_pb2.SessionDown(ended=ends, heartbeat=decode_pb2.Heartbeat()))
    (event,) = events
    if ended:
        assert event == DecodeEnded()
    else:
        assert isinstance(event, FailureEvent)
        assert "knows nothing of attempt r/0" in str(event.error)


async def test_the_end_of_a_call_that_gave_up_does_not_end_the_next_one_with_its_key() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        gave_up, asking = await asked(session, events)
        asking.cancel()
        gave_up.close()
        attempt, asking = await asked(session, events)
        # A worker that was slow answers both, and ends the first, in one message.
        grant = decode_pb2.ReserveResult(key=attempt.key, granted=True)
        session._deliver_messages(decode_pb2.SessionDown(reserved=[grant, grant], ended=[attempt.key]))
        assert (await asking).granted
    assert attempt.granted
    assert events == []


def test_heartbeats_are_sent_while_other_messages_always_wait() -> None:
    with contextlib.closing(VirtualLoop()) as loop:
        written: list[str | None] = []

        class Stream:
            async def write(self, message: decode_pb2.SessionUp) -> None:
                written.append(message.WhichOneof("message"))
                session.send(decode_pb2.SessionUp(cancel=decode_pb2.Cancel()))
                await asyncio.sleep(0.1)

        async def write() -> None:
            nonlocal session
            async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
                session = DecodeSession(channel, "d", "r0")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(10.05):
                        await session._write(cast(grpc.aio.StreamStreamCall, Stream()))

        session: DecodeSession
        loop.run_until_complete(write())
    assert 5 <= written.count("heartbeat") <= 10
