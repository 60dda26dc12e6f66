"""Silence of a session's router, in simulated time."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest
from baton.pb import decode_pb2
from baton.worker.status import WIRE_VERSION
from decode_svc.messages import Command
from decode_svc.servicer import SILENCE_S, DecodeServicer
from decode_svc.session import RouterSession
from decode_svc.worker import DecodeWorker
from tests.property.virtual import VirtualLoop


class FakeWorker:
    """One session, which owns nothing."""

    def __init__(self) -> None:
        self.session: RouterSession | None = None
        self.heard = 0

    def open_session(self, router_id: str) -> RouterSession:
        self.session = RouterSession(1, router_id)
        return self.session

    def close_session(self, session: RouterSession, error: BatonError | None = None) -> None:
        if self.session is not None:
            self.session = None
            session.end(error)

    def handle_command(self, session: RouterSession, command: Command) -> None:
        self.heard += 1


class SessionPeer:
    """The router's side of a session with the real servicer."""

    def __init__(self, loop: VirtualLoop, wire_version: int = WIRE_VERSION) -> None:
        self.worker = FakeWorker()
        self._loop = loop
        self._up: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        hello = decode_pb2.Hello(router_id="r", wire_version=wire_version)
        loop.call(self._up.put_nowait, decode_pb2.SessionUp(hello=hello))
        self.task = loop.spawn(self._session())

    def beat(self) -> None:
        self._up.put_nowait(decode_pb2.SessionUp(heartbeat=decode_pb2.Heartbeat()))

    async def _session(self) -> None:
        async def said() -> Any:
            while True:
                yield await self._up.get()

        servicer = DecodeServicer(cast(DecodeWorker, self.worker))
        async for _ in servicer.Session(said(), cast(grpc.aio.ServicerContext, None)):
            pass


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    for task in asyncio.all_tasks(made):
        task.cancel()
    made.settle()
    made.close()


def test_a_silent_router_loses_its_session(loop: VirtualLoop) -> None:
    router = SessionPeer(loop)
    for _ in range(10):
        loop.advance(1.0)
        loop.call(router.beat)
    assert router.worker.session is not None
    loop.advance(SILENCE_S + 0.1)
    assert router.worker.session is None
    assert isinstance(router.task.exception(), DeadlineExceeded)


def test_a_router_of_another_wire_version_is_refused_by_name(loop: VirtualLoop) -> None:
    router = SessionPeer(loop, WIRE_VERSION - 1)
    loop.advance(0.1)
    assert isinstance(error := router.task.exception(), InvalidRequest)
    assert f"hello.wire_version: this worker speaks version {WIRE_VERSION}" in str(error)


def test_a_worker_that_was_paused_judges_no_router_by_that_time(loop: VirtualLoop) -> None:
    router = SessionPeer(loop)
    loop.advance(1.0)
    # The process stands still; when it wakes, all timers are due before what came meanwhile is read.
    loop.now += 2 * SILENCE_S
    loop.call_later(0.05, router.beat)
    loop.advance(1.0)
    assert (router.worker.heard, router.task.done()) == (1, False)
    loop.advance(SILENCE_S + 0.1)
    assert isinstance(router.task.exception(), DeadlineExceeded)
