"""A service as a process: signals, drain and exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import pytest

from baton.errors import EngineError
from baton.process import service as process
from baton.process.service import serve
from baton.telemetry.logs import configure


class Worker:
    """A worker that drains when told to, and remembers its life."""

    def __init__(self) -> None:
        self.listening = "control=127.0.0.1:1 kv=127.0.0.1:2"
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

    async def serve(self) -> asyncio.Task[int]:
        """The service, once the worker is up."""
        serving = asyncio.create_task(serve(self.run(), "decode"))
        await self.up.wait()
        return serving

    async def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal that begins the drain."""
        os.kill(os.getpid(), number)
        await asyncio.wait_for(self.draining.wait(), 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_in_success(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker()
    serving = await worker.serve()
    await worker.signal(number)
    worker.drained.set()
    assert await asyncio.wait_for(serving, 60) == 0
    assert worker.life == ["drained", "stopped"]
    assert capsys.readouterr().out == "listening control=127.0.0.1:1 kv=127.0.0.1:2\n"


async def test_where_logs_are_json_the_ready_line_is_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    configure("info", "decode", log_format="json")
    worker = Worker()
    serving = await worker.serve()
    await worker.signal()
    worker.drained.set()
    assert await asyncio.wait_for(serving, 60) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"listening": {"control": "127.0.0.1:1", "kv": "127.0.0.1:2"}}
    assert all(map(json.loads, shown.err.splitlines()))


async def test_a_second_signal_cuts_the_drain_short() -> None:
    worker = Worker()
    serving = await worker.serve()
    await worker.signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 60) == 0
    assert worker.life == ["stopped"]


@pytest.mark.parametrize("draining", [False, True])
async def test_a_worker_that_fails_ends_with_an_error(draining: bool) -> None:
    worker = Worker()
    serving = await worker.serve()
    if draining:
        await worker.signal()
    worker.failed.set_exception(EngineError("page audit failed"))
    assert await asyncio.wait_for(serving, 60) == 1
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

    monkeypatch.setattr(process, "FAILED_STOP_S", 0.02)
    monkeypatch.setattr(os, "_exit", end)
    worker = Wedged()
    worker.failed.set_exception(EngineError("the engine hangs"))
    await asyncio.wait_for(serve(worker.run(), "decode"), 60)
    assert statuses == [1]


BEGIN = """
import asyncio, atexit, contextlib, os, signal, socket, sys, threading
from dataclasses import dataclass
from baton.process.service import main

@dataclass(frozen=True)
class Settings:
    pass

class Service:
    listening = "x=1"
    def __init__(self):
        self.failed = asyncio.get_running_loop().create_future()
    async def drain(self):
        print("drained", flush=True)
"""
END = 'sys.exit(main("decode", "decode_svc", Settings, run))'


@contextlib.asynccontextmanager
async def script(*parts: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of a service whose code has these parts, killed at the end."""
    code = "\n".join([BEGIN, *parts, END])
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(60):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


ENDING = """
@contextlib.asynccontextmanager
async def run(settings):
    service = Service()
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    yield service
    print("stopped")

atexit.register(print, "taken apart")
"""


async def test_the_process_ends_when_all_is_stopped_and_takes_nothing_apart() -> None:
    async with script(ENDING) as child:
        said, errors = await child.communicate()
    assert (child.returncode, said) == (0, b"listening x=1\ndrained\nstopped\n"), errors


LOOKING_UP = """
def getaddrinfo(*_, **__):
    print("looking up", flush=True)
    threading.Event().wait()

@contextlib.asynccontextmanager
async def run(settings):
    socket.getaddrinfo = getaddrinfo
    look_up = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo("name", 1))
    yield Service()
    look_up.cancel()
    print("stopped", flush=True)
"""


async def test_a_look_up_of_a_name_that_hangs_does_not_hold_up_the_end() -> None:
    async with script(LOOKING_UP) as child:
        said = {await child.stdout.readline(), await child.stdout.readline()}
        child.send_signal(signal.SIGTERM)
        rest, errors = await child.communicate()
    assert said == {b"listening x=1\n", b"looking up\n"}
    assert (child.returncode, rest) == (0, b"drained\nstopped\n"), errors


LOADING = """
@contextlib.asynccontextmanager
async def run(settings):
    def load():
        print("loading", flush=True)
        threading.Event().wait()
    try:
        await asyncio.to_thread(load)
    finally:
        print("left", flush=True)
    yield
"""
IMPORTING = """
def run(settings):
    print("importing", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("code", "said"), [(LOADING, b"loading\nleft\n"), (IMPORTING, b"importing\n")])
async def test_a_signal_during_the_start_ends_it_at_once(number: signal.Signals, code: str, said: bytes) -> None:
    async with script(code) as child:
        first = await child.stdout.readline()
        child.send_signal(number)
        rest, errors = await child.communicate()
    assert (child.returncode, first + rest) == (0, said), errors
    assert b"Traceback" not in errors
