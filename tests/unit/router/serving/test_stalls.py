"""Writes to a client that take too long, in simulated time."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from baton.errors import DeadlineExceeded
from router.serving.front_door import DRAIN_LIMIT_S, StallGuard
from tests.property.virtual import VirtualLoop

LIMIT_S = 20.0


class Rig:
    """One stream whose client takes nothing until `taken` is set."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.taken = asyncio.Event()
        self.generated = self.begun = False
        self.stalls = StallGuard(LIMIT_S)
        self.writing = loop.create_task(self._write())

    async def _write(self) -> None:
        async with self.stalls.run(), self.stalls.stream(self._generate, lambda: self.generated, "r1") as stream:
            async for _ in stream:
                await self.taken.wait()
                self.taken.clear()

    async def _generate(self) -> None:
        """An item; what is waited for here is not the client."""
        if self.begun:
            await asyncio.sleep(10 * LIMIT_S)
        self.begun = True

    def lasts(self, seconds: float) -> None:
        self.loop.advance(seconds)
        assert not self.writing.done()

    def ends(self, within_s: float) -> None:
        self.loop.advance(within_s)
        with pytest.raises(DeadlineExceeded, match=r"^client_stall_s: .*the client took none of its waiting output"):
            self.writing.result()
        assert not self.stalls.writing


@pytest.fixture
def rig() -> Iterator[Rig]:
    with contextlib.closing(VirtualLoop()) as loop:
        made = loop.call(Rig, loop)
        loop.settle()
        yield made
        made.writing.cancel()
        loop.settle()


def test_a_write_has_its_time_each_time(rig: Rig) -> None:
    for _ in range(3):
        rig.lasts(LIMIT_S - 1)
        rig.taken.set()
        rig.lasts(10 * LIMIT_S)
    rig.lasts(LIMIT_S - 1)
    rig.ends(3)


def test_a_process_that_was_paused_looks_once_more(rig: Rig) -> None:
    rig.lasts(1)
    rig.loop.now += 10 * LIMIT_S
    rig.loop.settle()
    assert not rig.writing.done()
    rig.taken.set()
    rig.lasts(5 * LIMIT_S)


def test_a_drain_waits_shortly_for_who_is_only_to_read(rig: Rig) -> None:
    rig.stalls.draining = True
    rig.lasts(DRAIN_LIMIT_S + 3)
    rig.generated = True
    rig.ends(2)


def test_a_client_that_is_slow_to_end_leaves_the_others_watched(rig: Rig) -> None:
    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # As long as several looks at the writes.
            await asyncio.sleep(5)

    async def one() -> None:
        return

    async def slow() -> None:
        async with rig.stalls.stream(one, lambda: False) as stream:
            async for _ in stream:
                await ends_slowly()

    task = rig.loop.create_task(slow())
    rig.loop.advance(1)
    rig.taken.set()
    rig.lasts(10 * LIMIT_S)
    with pytest.raises(DeadlineExceeded):
        task.result()
    rig.ends(LIMIT_S + 3)


def test_the_log_names_a_stream_that_can_not_be_ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    (stream,) = rig.stalls.writing
    stream.timeout = asyncio.Timeout(None)  # one that was never entered
    rig.lasts(LIMIT_S + 3)
    (record,) = caplog.records
    assert vars(record)["request_ids"] == ("r1",)
