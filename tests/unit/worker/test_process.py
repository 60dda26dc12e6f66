"""A worker as a process: signals, drain and exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from baton.errors import EngineError
from baton.worker import process
from baton.worker.listeners import Addresses
from baton.worker.process import serve


class Worker:
    """A worker that drains when told to, and remembers its life."""

    def __init__(self) -> None:
        self.addresses = Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining, self.drained, self.up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.life: list[str] = []

    async def drain(self) -> None:
        self.draining.set()
        await self.drained.wait()
        self.life.append("drained")

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Worker]:
        self.up.set()
        yield self
        self.life.append("stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_success(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker()
    serving = asyncio.create_task(serve(worker.run(), "decode"))
    await worker.up.wait()
    os.kill(os.getpid(), number)
    await asyncio.wait_for(worker.draining.wait(), 10)
    worker.drained.set()
    assert await asyncio.wait_for(serving, 10) == 0
    assert worker.life == ["drained", "stopped"]
    expected = "listening control=127.0.0.1:1 kv=127.0.0.1:2 ops=127.0.0.1:3\n"
    assert capsys.readouterr().out == expected


async def test_a_second_signal_cuts_the_drain_short() -> None:
    worker = Worker()
    serving = asyncio.create_task(serve(worker.run(), "decode"))
    await worker.up.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(worker.draining.wait(), 10)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 10) == 0
    assert worker.life == ["stopped"]


async def test_a_worker_that_fails_ends_with_an_error() -> None:
    worker = Worker()
    serving = asyncio.create_task(serve(worker.run(), "decode"))
    await worker.up.wait()
    worker.failed.set_exception(EngineError("page audit failed"))
    assert await asyncio.wait_for(serving, 10) == 1
    assert worker.life == ["stopped"]


async def test_a_worker_that_does_not_stop_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, statuses = asyncio.Event(), []

    def end(status: int) -> None:
        statuses.append(status)
        stopped.set()

    class Wedged(Worker):
        @contextlib.asynccontextmanager
        async def run(self) -> AsyncIterator[Worker]:
            yield self
            await stopped.wait()

    monkeypatch.setattr(process, "STOP_S", 0.02)
    monkeypatch.setattr(os, "_exit", end)
    worker = Wedged()
    worker.failed.set_exception(EngineError("the engine hangs"))
    await asyncio.wait_for(serve(worker.run(), "decode"), 10)
    assert statuses == [1]
