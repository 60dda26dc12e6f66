"""The words of a decode worker about attempts, as a router's session takes them."""

import asyncio
import contextlib
from typing import Any, cast

import grpc.aio
import pytest

from baton.pb import decode_pb2
from baton.request import CachePolicy, ReserveResult
from router.workers.decode_session import DecodeCall, DecodeSession, SessionEnd
from router.workers.failures import Cause, DecodeEnded, Event, FailureEvent
from tests.property.virtual import VirtualLoop


def asked(session: DecodeSession, events: list[Event], number: int = 0) -> tuple[DecodeCall, list[ReserveResult]]:
    """An attempt that asks the worker for pages, and the answers that it gets."""
    attempt = session.begin_call("r", 0, number, events.append)
    answers: list[ReserveResult] = []
    attempt.reserve(
        answers.append,
        context_tokens=1,
        max_new_tokens=1,
        choices=(0,),
        deadline_ms=1,
        salt=b"",
        cache=CachePolicy.OFF,
        prefix_digests=b"",
    )
    return attempt, answers


KEY = decode_pb2.AttemptKey(request_id="r", attempt=0)
GRANT = decode_pb2.ReserveResult(key=KEY, granted=True, cached_tokens=16)
WAIT = decode_pb2.ReserveResult(key=KEY, waiting=True)


def told(session: DecodeSession, *answers: decode_pb2.ReserveResult, **others: Any) -> None:
    session._deliver_messages(decode_pb2.SessionDown(reserved=answers, **others))


def granted(session: DecodeSession, events: list[Event]) -> decode_pb2.AttemptKey:
    """An attempt that the worker has granted."""
    attempt, answers = asked(session, events)
    told(session, GRANT)
    attempt.keep()
    assert (attempt.granted, len(answers)) == (True, 1)
    return attempt.key


def sent(session: DecodeSession) -> list[str | None]:
    """Kinds of the messages to the worker so far."""
    return [session._up.get_nowait().WhichOneof("message") for _ in range(session._up.qsize())]


@pytest.mark.parametrize("ended", [True, False])
async def test_an_attempt_that_the_worker_no_longer_lists_fails_unless_it_was_told_to_have_ended(ended: bool) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        key = granted(session, events)
        ends = [key] if ended else []
        session._deliver_messages(decode_pb2.SessionDown(ended=ends, heartbeat=decode_pb2.Heartbeat()))
    (event,) = events
    if ended:
        assert event == DecodeEnded()
    else:
        assert isinstance(event, FailureEvent)
        assert "knows nothing of attempt r/0" in str(event.error)


async def test_a_reservation_that_waits_and_that_the_worker_no_longer_lists_is_refused() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        session = DecodeSession(channel, "d", "r0")
        attempt, answers = asked(session, [])
        session._deliver_messages(decode_pb2.SessionDown(heartbeat=decode_pb2.Heartbeat()))
        assert answers == [], "the worker may not have read the reservation yet"
        told(session, WAIT, heartbeat=decode_pb2.Heartbeat(live=[KEY]))
        assert [answer.waiting for answer in answers] == [True]
        session._deliver_messages(decode_pb2.SessionDown(heartbeat=decode_pb2.Heartbeat()))
        assert (answers[-1].waiting, answers[-1].granted, attempt.may_hold_pages) == (False, False, False)


async def test_a_reservation_that_waits_is_listed_as_alive_and_is_cancelled_at_its_end() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        session = DecodeSession(channel, "d", "r0")
        attempt, answers = asked(session, [])
        told(session, WAIT)
        assert (attempt.may_hold_pages, attempt.granted, answers[-1].waiting) == (True, False, True)
        # What waits can't have killed the worker.
        assert session.attempts_without_token == []
        told(session, GRANT)
        assert (attempt.granted, answers[-1].granted, answers[-1].cached_tokens) == (True, True, 16)
        assert session.attempts_without_token == [("r", 0)]
        attempt.close()
        other, _ = asked(session, [])
        told(session, WAIT)
        other.close()
        assert sent(session) == ["hello", "reserve", "cancel", "reserve", "cancel"]
        third, answers = asked(session, [])
        told(session, WAIT, decode_pb2.ReserveResult(key=KEY, reason="drains"))
        assert [(answer.waiting, answer.reason) for answer in answers] == [(True, ""), (False, "drains")]
        assert not third.may_hold_pages
        third.close()
        assert sent(session) == ["reserve"]


@pytest.mark.parametrize("first", [[], [WAIT], [GRANT]])
async def test_a_session_that_ends_refuses_reservations_and_fails_what_is_in_use(
    first: list[decode_pb2.ReserveResult],
) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        attempt, answers = asked(session, events)
        told(session, *first)
        session._close("is lost", lambda: SessionEnd("", Cause.LOST, None))
        assert (answers[-1].granted, answers[-1].waiting, answers[-1].reason) == (
            False,
            False,
            "decode worker d: is lost",
        )
        assert (events, attempt.may_hold_pages) == ([], False)
        session = DecodeSession(channel, "d", "r0")
        granted(session, events)
        session._close("is lost", lambda: SessionEnd("", Cause.LOST, None))
        assert isinstance(events[0], FailureEvent)


async def test_a_session_that_ends_fails_no_attempt_that_has_ended_at_the_worker() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        key = granted(session, events)
        told(session, ended=[key])
        assert session.open_calls == 0
        session._close("is lost", lambda: SessionEnd("", Cause.LOST, None))
    assert events == [DecodeEnded()]


@pytest.mark.parametrize("before", [[], [WAIT]])
async def test_messages_about_a_cancelled_reservation_are_not_about_the_next_one_of_the_attempt(
    before: list[decode_pb2.ReserveResult],
) -> None:
    """The worker granted the first one before it knew that the router had cancelled it, and then ended it."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        events: list[Event] = []
        session = DecodeSession(channel, "d", "r0")
        first, _ = asked(session, events)
        told(session, *before)
        first.close()
        second, answers = asked(session, events, 1)
        failure = decode_pb2.AttemptFailure(key=KEY, kind=decode_pb2.AttemptFailure.KIND_TRANSFER)
        told(session, GRANT, ended=[KEY], failures=[failure], heartbeat=decode_pb2.Heartbeat(live=[KEY]))
        assert (answers, second.granted) == ([], False)
        told(session, decode_pb2.ReserveResult(key=second.key, waiting=True))
        told(session, decode_pb2.ReserveResult(key=second.key, granted=True))
        assert [answer.granted for answer in answers] == [False, True]
        second.keep()
        told(session, heartbeat=decode_pb2.Heartbeat(live=[second.key]))
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
