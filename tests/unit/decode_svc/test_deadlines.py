"""Deadlines of attempts: judged once, at the right time, and after whatever has arrived by then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.engine.fake import FakeEngine
from decode_svc.attempts import Attempts
from decode_svc.deadlines import Deadlines
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.sequence import DecodeAttempt
from tests.property.virtual import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


class Watched:
    """An attempt that is reserved for 10 seconds, and when it was found overdue."""

    def __init__(self, loop: VirtualLoop, deadline_s: float | None = None) -> None:
        self.attempts = Attempts(FakeEngine(), 10)
        self.overdue: list[float] = []
        self.deadlines = loop.call(lambda: Deadlines(lambda _: self.overdue.append(loop.now)))
        request = Reserve(AttemptKey("r", 0), 5, 5, 1, deadline_s)
        self.attempt: DecodeAttempt = self.attempts.reserve(1, request, loop.now, 10.0)
        loop.call(self.deadlines.set, self.attempt)


def test_an_attempt_is_overdue_when_its_state_is(loop: VirtualLoop) -> None:
    watched = Watched(loop)
    loop.advance(9.9)
    assert watched.overdue == []
    loop.advance(20.0)
    assert watched.overdue == [pytest.approx(10.0)]
    assert len(watched.deadlines) == 0


def test_a_later_state_has_a_deadline_of_its_own_and_a_dropped_attempt_none(loop: VirtualLoop) -> None:
    watched = Watched(loop, deadline_s=30.0)
    loop.advance(9.0)
    watched.attempts.start(watched.attempt, loop.now, 15.0)
    loop.call(watched.deadlines.set, watched.attempt)
    loop.advance(14.0)
    assert watched.overdue == []
    loop.call(watched.deadlines.drop, watched.attempt)
    loop.advance(60.0)
    assert watched.overdue == []


def test_what_has_arrived_by_the_deadline_comes_before_its_judgement(loop: VirtualLoop) -> None:
    watched = Watched(loop)

    def arrives() -> None:
        # A report that the engine thread has queued, while the timer was already due.
        asyncio.get_running_loop().call_soon(watched.deadlines.drop, watched.attempt)

    loop.call_at(9.99999, lambda: None)
    loop.call_at(watched.attempt.life.deadline, arrives)
    loop.advance(20.0)
    # `arrives` ran after the timer of the attempt, at the same instant, and still came first.
    assert watched.overdue == []
