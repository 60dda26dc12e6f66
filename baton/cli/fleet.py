"""Child processes under one roof: their logs in one stream, deaths noticed, the end in bounded time.

    start ── listening ── … ── stop
      │         │ a child ends unasked
      │         ├── it is kept: said which, why, its last words; again ─┐
      │         └── else `death` is set to the same words               │
      └─────────────────────────────────────────────────────────────────┘

A child that is kept gets a successor whenever it ends: at once when it had served for a while, and the first time;
otherwise after a pause that doubles with each early end. Each child leads a session of its own, so that Ctrl-C
reaches only the supervisor, and is killed by the kernel when the supervisor dies. Stopping goes in order, the reverse
of starting: SIGTERM; a second SIGTERM, which cuts a drain short; SIGKILL to the child's whole session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from baton.errors import Unavailable
from baton.launcher import bound_to_me

FIRST_S, CUT_S, KILL_S = 1.0, 2.0, 3.5
"""Seconds since a stop began: the last child has gone first; drains are cut; what is left is killed."""

PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""Seconds from an early end of a child that is kept to its successor: the first time, and at most."""

STEADY_S = 5.0
"""Seconds that a child must have listened for its end not to be an early one."""

OWN_NAME = "up"
"""What the supervisor calls itself in the common log."""

_LAST_WORDS_S = 0.5
_LISTENING = "listening "
_CHUNK = 1 << 16


class Child:
    """A running child; `listening` gets the addresses of its line `listening name=address …` on stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.listening: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.listens_since: float | None = None
        self.last_line = ""
        self.last_words = ""
        self.kept = False
        self.followers: list[asyncio.Task[None]] = []
        self.end: asyncio.Task[None] | None = None
        self._cleared = False

    @property
    def steady(self) -> bool:
        """Whether it has listened for STEADY_S: what ends it then is not its start."""
        now = asyncio.get_running_loop().time()
        return self.listens_since is not None and now - self.listens_since >= STEADY_S

    def signal(self, number: int) -> None:
        """Send a signal, if the child still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def clear(self) -> None:
        """Kill, once, whatever the child started and left behind: it is in the child's session."""
        if not self._cleared:
            self._cleared = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Fleet:
    """An async context manager that stops its children at the end."""

    def __init__(self, log: TextIO | None = None) -> None:
        self.children: list[Child] = []
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._log = log or sys.stderr
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._width = len(OWN_NAME)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        """Start a child from the calling thread, which must live as long as the child may."""
        child = await self._launch(name, command, environ)
        self.children.append(child)
        return child

    def keep(self, child: Child, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """From now on start `command` in the child's place whenever it ends, and its successors too."""
        child.kept = True
        keeper = self._keep(child, command, environ)
        self._keepers.append(asyncio.create_task(keeper, name=f"keeper of {child.name}"))

    async def _launch(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        outputs = [await _Pipe.open(), await _Pipe.open()]
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_me(command),
                env=dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=outputs[0].write_end,
                stderr=outputs[1].write_end,
                start_new_session=True,
            )
        finally:
            for output in outputs:
                os.close(output.write_end)
        child = Child(name, process)
        self._width = max(self._width, len(name))
        child.followers = [
            asyncio.create_task(self._follow(child, output, output is outputs[0]), name=f"log of {name}")
            for output in outputs
        ]
        child.end = asyncio.create_task(self._await_end(child), name=f"end of {name}")
        return child

    async def addresses(self, child: Child) -> dict[str, str]:
        """Where the child listens; raises Unavailable when any child dies first."""
        either: list[asyncio.Future[Any]] = [child.listening, self.death]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not child.listening.done():
            raise Unavailable(self.death.result())
        return child.listening.result()

    async def stop(self) -> None:
        """End all children, the last started first; returns once every one is gone and its log is written."""
        self._stopping.set()
        # They end by themselves, so that none leaves a child behind that is not in the list yet.
        await asyncio.gather(*self._keepers, return_exceptions=True)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        ends = {child: asyncio.create_task(child.process.wait()) for child in self.children}
        if ends:
            self.children[-1].signal(signal.SIGTERM)
            await asyncio.wait([ends[self.children[-1]]], timeout=FIRST_S)
            for number, until in ((signal.SIGTERM, CUT_S), (signal.SIGTERM, KILL_S)):
                alive = [child for child in self.children if not ends[child].done()]
                for child in alive:
                    child.signal(number)
                if alive:
                    await asyncio.wait(ends.values(), timeout=max(0.0, begin + until - loop.time()))
        for child in self.children:
            child.clear()
        tasks = [task for child in self.children for task in (*child.followers, child.end) if task is not None]
        await asyncio.gather(*ends.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if not self.death.done():
            self.death.cancel()
        for child in self.children:
            child.listening.cancel()

    def say(self, name: str, line: str) -> None:
        """Write one line to the common log."""
        with contextlib.suppress(OSError, ValueError):
            print(f"{name:<{self._width}} | {line}", file=self._log, flush=True)

    async def _await_end(self, child: Child) -> None:
        status = await child.process.wait()
        if self._stopping.is_set() or self.death.done():
            return
        # Its last words may still be in the pipes, which close with it unless it left children of its own.
        await asyncio.wait(child.followers, timeout=_LAST_WORDS_S)
        child.last_words = f"{child.name} {_how(status)}; its last line: {child.last_line or 'none'}"
        if not (child.kept or self._stopping.is_set() or self.death.done()):
            self.death.set_result(child.last_words)

    async def _keep(self, child: Child, command: Sequence[str], environ: Mapping[str, str]) -> None:
        pause = 0.0
        while not await self._stops(child.end):
            if child.steady:
                pause = 0.0
            when = f"in {pause:g} s" if pause else "at once"
            self.say(OWN_NAME, f"{child.last_words}; it is started again {when}")
            child.clear()
            if await self._stops(timeout=pause):
                return
            pause = min(2 * pause, MOST_PAUSE_S) or PAUSE_S
            try:
                successor = await self._launch(child.name, command, environ)
            except OSError as error:
                child.last_words = f"{child.name} can't be started: {error.strerror}"
                # What failed now is a start, however long the child had listened.
                child.listens_since = None
                continue
            successor.kept = True
            self.children[self.children.index(child)] = successor
            await asyncio.gather(*(_ended(task) for task in child.followers))
            child = successor

    async def _stops(self, end: asyncio.Task[None] | None = None, timeout: float | None = None) -> bool:
        """Wait for `end`, at most `timeout` seconds; whether the fleet stops, which ends the wait, or must."""
        stopping = asyncio.create_task(self._stopping.wait())
        ends: list[asyncio.Task[Any]] = [stopping, *([end] if end else [])]
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        await _ended(stopping)
        return self._stopping.is_set() or self.death.done()

    async def _follow(self, child: Child, output: _Pipe, is_stdout: bool) -> None:
        rest = b""
        try:
            while data := await output.reader.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(child, line.decode("utf-8", "replace").rstrip("\r"), is_stdout)
            if rest:
                self._take(child, rest.decode("utf-8", "replace"), is_stdout)
        finally:
            output.transport.close()

    def _take(self, child: Child, line: str, is_stdout: bool) -> None:
        if is_stdout and line.startswith(_LISTENING) and not child.listening.done():
            child.listens_since = asyncio.get_running_loop().time()
            child.listening.set_result(dict(part.split("=", 1) for part in line.split()[1:] if "=" in part))
            return
        # The two pipes keep no order between them, and faults are told on stderr.
        if not is_stdout:
            child.last_line = line
        self.say(child.name, line)


@dataclass(frozen=True)
class _Pipe:
    """A pipe of our own: asyncio's take a process for alive as long as a grandchild holds them."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport
    write_end: int

    @classmethod
    async def open(cls) -> _Pipe:
        reader = asyncio.StreamReader()
        read_end, write_end = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        return cls(reader, transport, write_end)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
