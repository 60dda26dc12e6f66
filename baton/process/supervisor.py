"""Child processes of this one: their output is relayed, their deaths are noticed, and they end in bounded time.

    start ── ready ── … ── stop:  SIGTERM ── drain_s ── SIGTERM ── kill_s ── SIGKILL
      │        │
      │        │ a child ends unasked
      │        ├── restart_on_death: the log says how it ended; a pause; its successor ──┐
      │        └── otherwise `death` gets the same message, and its waiter stops all     │
      └──────────────────────────────────────────────────────────────────────────────────┘

A supervisor has a group of processes that stops as one. Groups that stop one after the other are supervisors in nested
blocks. A successor starts at once if the child had served for `steady_s`, and after the first early end. After further
early ends it starts after a pause, which doubles each time. A successor that hangs at its start is killed, and has a
successor of its own.

Each child leads a session of its own: Ctrl-C in a terminal reaches only the supervisor, and when the child ends, other
processes in its session are killed. On Linux the kernel kills the children when the supervisor dies, even by SIGKILL:
`bind_to_parent` has a command run by a tiny interpreter, which asks the kernel for SIGKILL at the end of its parent,
and then becomes the command. So even a parent that is killed leaves no process behind. What ends the child is the end
of the *thread* that started it: start children from the main thread, or from another one that lives long enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from baton.errors import Unavailable

CUT_S = 1.0
"""Seconds from SIGTERM to a second one, which cuts a drain short, unless a drain may take longer."""

LISTENING = r'listening |\{"listening": '
"""The beginning of a service's ready line, on standard output, as a regular expression; see `ready_line`."""

FATAL = re.compile(r"(prefill|decode|router): ")
"""The beginning of the line, on standard error, in which a service says why it can't start.

It is not relayed, because whoever is told of the service's end shows it.
"""

Relay = Callable[[str, str], None]
"""Called with the name of a child and one line of its output."""

_LAST_OUTPUT_S = 0.5
_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


class End(NamedTuple):
    """The unexpected end of a process."""

    words: str
    """Name of the process, how it ended, and its last line."""
    status: int | None
    """Exit status; negative for a signal, None for a process that was never started."""
    last_line: str

    def __str__(self) -> str:
        return self.words


class SupervisorTimes(NamedTuple):
    """Limits of a supervisor, in seconds."""

    kill_s: float = 2.5
    """Time from the second SIGTERM to SIGKILL."""
    pause_s: float = 1.0
    """Pause from the second early end in a row to the next start; doubles with each further early end."""
    max_pause_s: float = 30.0
    steady_s: float = 5.0
    """Seconds after ready from which a child's end does not count as early."""
    start_stall_s: float = 60.0
    """A successor that uses no processor time for this long before it is ready hangs, and is replaced."""


def ready_line(listening: str, *, as_json: bool) -> str:
    """The line that a service prints when it serves; `listening` is "name=host:port" for each listener.

    It is `listening name=host:port …`, or `{"listening": {"name": "host:port", …}}` where logs are JSON, so that a
    collector of both outputs finds JSON in each line.
    """
    line = f"listening {listening}"
    return json.dumps({"listening": parse_listeners(line)}) if as_json else line


def parse_listeners(line: str) -> dict[str, str]:
    """The listeners of a service, "host:port" by name, from its ready line."""
    if line.startswith("{"):
        return {str(name): str(address) for name, address in json.loads(line)["listening"].items()}
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


class SupervisedProcess:
    """A process of a supervisor, and after its death its successor; `Supervisor.start` makes them."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None, ready_line: str, relay: Relay
    ) -> None:
        self.name = name
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The ready line of the first process."""
        self.restarts = False
        self._command = command
        self._environ = environ
        self._ready_line = re.compile(ready_line)
        self._ready_since: float | None = None
        self._relay = relay
        self._process: asyncio.subprocess.Process | None = None
        self._followers: list[asyncio.Task[None]] = []
        self._last_lines = ["", ""]

    def restart_on_death(self, command: Sequence[str] | None = None) -> None:
        """Start a successor at each end of the process from now on, with `command` if given, else as before."""
        self._command = command or self._command
        self.restarts = True

    @property
    def ready_s(self) -> float | None:
        """Seconds since the process was ready; None if it never was."""
        return None if self._ready_since is None else asyncio.get_running_loop().time() - self._ready_since

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            # Process.send_signal may consume the exit status that the loop waits for.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def processor_time(self) -> int | None:
        """Processor time of all its threads so far, in clock ticks (proc(5)); None if the system does not report it."""
        if self._process is None:
            return None
        try:
            after_name = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return int(after_name[11]) + int(after_name[12])

    async def launch(self) -> None:
        """Start the process. Raises Unavailable if it can't be started.

        The calling thread must live as long as the process, because the kernel kills the process when that thread ends
        (`bind_to_parent`).
        """
        self._ready_since = None
        self._last_lines = ["", ""]
        pipes: list[_Pipe] = []
        self._followers = []
        try:
            for number in range(2):
                pipes.append(await _Pipe.open())
                following = self._follow(pipes[number], number)
                self._followers.append(asyncio.create_task(following, name=f"output of {self.name}"))
            self._process = await asyncio.create_subprocess_exec(
                *bind_to_parent(self._command),
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipes[0].write_end,
                stderr=pipes[1].write_end,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{self.name} can't be started: {error.strerror}") from None
        finally:
            for pipe in pipes:
                os.close(pipe.write_end)

    async def end(self) -> End:
        """Wait for the end of the process."""
        process = self._process
        if process is None:
            return End(f"{self.name} has not been started", None, "")
        status = await process.wait()
        # Processes that it has left behind are in its session, and keep the pipes open.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _, late = await asyncio.wait(self._followers, timeout=_LAST_OUTPUT_S)
        for follower in late:
            follower.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        # Errors are on standard error. The order of lines in two pipes is not known.
        out, err = self._last_lines
        last = err or out
        return End(f"{self.name} {describe_exit(status)}; its last line: {last or 'none'}", status, last)

    async def _follow(self, pipe: _Pipe, number: int) -> None:
        rest = b""
        try:
            while data := await pipe.reader.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._handle_line(line, number)
            if rest:
                self._handle_line(rest, number)
        finally:
            pipe.transport.close()

    def _handle_line(self, data: bytes, number: int) -> None:
        line = data.decode("utf-8", "replace").rstrip("\r")
        if number == 0 and self._ready_since is None and self._ready_line.match(line):
            self._ready_since = asyncio.get_running_loop().time()
            if self.ready.done():
                _log.info("%s is ready again", self.name)
            else:
                self.ready.set_result(line)
            return
        self._last_lines[number] = line
        if number == 0 or not FATAL.match(line):
            self._relay(self.name, line)


class Supervisor:
    """A group of children that stops as one, at the end of the block at the latest.

    The loop must run in the main thread, or another that lives as long as the children may.
    """

    def __init__(self, relay: Relay, times: SupervisorTimes | None = None) -> None:
        self.death: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        """The end of the first child that is not restarted, if nobody had asked for it."""
        self._relay = relay
        self._times = times or SupervisorTimes()
        self._tasks: dict[SupervisedProcess, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None, ready_line: str = LISTENING
    ) -> SupervisedProcess:
        """Start a child; `environ` None means the environment of this process.

        The child says that it serves by a line on standard output. The regular expression `ready_line` matches the
        beginning of that line. Raises Unavailable when the child can't be started.
        """
        child = SupervisedProcess(name, command, environ, ready_line, self._relay)
        await child.launch()
        self._tasks[child] = asyncio.create_task(self._supervise(child), name=f"life of {name}")
        return child

    async def ready(self, child: SupervisedProcess) -> str:
        """The ready line of a child; raises Unavailable when any child dies first."""
        either: list[asyncio.Future[Any]] = [child.ready, self.death]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not child.ready.done():
            raise Unavailable(str(self.death.result()))
        return child.ready.result()

    async def stop(self, drain_s: float = CUT_S) -> None:
        """End all children, which may drain for `drain_s` seconds; returns when they are gone and their output is read.

        A second call, while the first one drains or after it was cancelled, cuts the drain short.
        """
        self._stopping.set()
        for seconds in (drain_s, self._times.kill_s):
            self._signal(signal.SIGTERM)
            if running := [life for life in self._tasks.values() if not life.done()]:
                await asyncio.wait(running, timeout=seconds)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*self._tasks.values())

    def _signal(self, number: int) -> None:
        for child, life in self._tasks.items():
            if not life.done():
                child.signal(number)

    async def _supervise(self, child: SupervisedProcess) -> None:
        """Wait for the end of a child, and of its successors."""
        ended, pause = await child.end(), 0.0
        while child.restarts and not self._stopping.is_set():
            if child.ready_s is not None and child.ready_s >= self._times.steady_s:
                pause = 0.0
            _log.error("%s; it is started again %s", ended, f"in {pause:g} s" if pause else "at once")
            if await self._wait_for_stop(pause):
                return
            pause = min(2 * pause, self._times.max_pause_s) or self._times.pause_s
            try:
                await child.launch()
            except Unavailable as error:
                ended = End(str(error), None, "")
                continue
            if self._stopping.is_set():
                child.signal(signal.SIGTERM)
            watching = asyncio.create_task(self._watch_start(child), name=f"start of {child.name}")
            ended = await child.end()
            watching.cancel()
        if not (self._stopping.is_set() or self.death.done()):
            self.death.set_result(ended)

    async def _watch_start(self, child: SupervisedProcess) -> None:
        """Kill a child whose start makes no progress; a large model may load for long."""
        used = None
        while child.ready_s is None and (used is None or used != child.processor_time()):
            used = child.processor_time()
            await asyncio.sleep(self._times.start_stall_s)
        if child.ready_s is None:
            _log.error("%s hangs at its start: it uses no processor time", child.name)
            child.signal(signal.SIGKILL)

    async def _wait_for_stop(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()


class _Pipe(NamedTuple):
    """A pipe of our own: asyncio's own pipes treat a process as alive as long as a grandchild holds them."""

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


def describe_exit(status: int) -> str:
    """The end of a process in words; `status` is negative for a signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


# prctl(PR_SET_PDEATHSIG = 1, SIGKILL = 9). If the parent died before this call, the parent id has changed.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str]) -> list[str]:
    """`command`, whose first word is the path of an executable, so that its process ends with this one."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
