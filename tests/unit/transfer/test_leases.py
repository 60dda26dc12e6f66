"""Exports by id: finding, waiting, leases and releases."""

import asyncio
from contextlib import aclosing

import pytest

from baton.errors import NotFound, TransferError, Unavailable
from baton.telemetry.metrics import LEASES_EXPIRED
from baton.transfer.export import REASON_LENGTH, ExportRegistry
from tests.metrics import count
from tests.unit.transfer.support import INCARNATION, Engine, prefilled, ready, whole

TOKENS = 12


class Clock:
    """The loop's clock, moved by hand."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = loop.time()

    def time(self) -> float:
        return self._now

    async def advance(self, seconds: float) -> None:
        """Let time pass, and the loop do what is due."""
        self._now += seconds
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    loop = asyncio.get_running_loop()
    clock = Clock(loop)
    monkeypatch.setattr(loop, "time", clock.time)
    return clock


async def test_the_lease_ends_an_export_without_fetches(exports: ExportRegistry, engine: Engine, clock: Clock) -> None:
    before = count(LEASES_EXPIRED)
    uncommitted = exports.open("u", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    _, ends = ready(exports, engine, "t", TOKENS)
    await clock.advance(9.9)
    assert ends == []
    await clock.advance(0.2)
    assert ends == ["t"]
    assert count(LEASES_EXPIRED) == before + 1
    assert not uncommitted.ended
    with pytest.raises(NotFound, match="lease"):
        await exports.find("t", INCARNATION)


async def test_a_stream_that_takes_nothing_has_no_lease(exports: ExportRegistry, engine: Engine, clock: Clock) -> None:
    export, ends = ready(exports, engine, "t", TOKENS)
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        await anext(frames)
        await clock.advance(10.1)
        await exports.wait_closed()
        assert ends == ["t"]
        with pytest.raises(TransferError, match="lease"):
            async for _ in frames:
                pass


async def test_an_announced_id_is_waited_for_longer(exports: ExportRegistry, engine: Engine, clock: Clock) -> None:
    exports.announce("late")
    names = ("late", "late", "refused", "unknown")
    *late, refused, unknown = [asyncio.create_task(exports.find(name, INCARNATION)) for name in names]
    await clock.advance(0)
    await clock.advance(1.9)
    exports.announce("refused")
    await clock.advance(0.2)
    assert unknown.done()
    with pytest.raises(NotFound, match=r"not opened within 2\.0 s"):
        await unknown
    await clock.advance(100)
    assert not any(task.done() for task in [*late, refused])
    exports.withdraw("refused", "was refused: no pages")
    with pytest.raises(NotFound, match="no pages"):
        await refused
    export, ends = ready(exports, engine, "late", TOKENS)
    exports.withdraw("late", "too late")
    assert [await task for task in late] == [export, export]
    assert ends == []
    assert exports._waiters == {}


async def test_errors_of_ended_exports_are_shortened(exports: ExportRegistry, engine: Engine) -> None:
    handle = prefilled(engine, TOKENS)
    export = exports.open("failed", handle, TOKENS, on_closed=lambda: engine.free(handle))
    export.fail(RuntimeError("x" * (1 << 20)))
    with pytest.raises(NotFound, match="failed at its source: xxx") as late:
        await exports.find("failed", INCARNATION)
    assert len(str(late.value)) < 250
    assert all(len(reason) <= REASON_LENGTH for reason in exports._ended.values())


async def test_close_fails_everything(engine: Engine) -> None:
    exports = ExportRegistry(engine, INCARNATION)
    export, ends = ready(exports, engine, "t", TOKENS)
    waiting = asyncio.create_task(exports.find("u", INCARNATION))
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        await anext(frames)
        exports.close()
        exports.close()
        with pytest.raises(TransferError, match="closing"):
            await anext(frames)
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        exports.open("v", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    await exports.wait_closed()
    assert ends == ["t"]
