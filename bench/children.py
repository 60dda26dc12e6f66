"""The processes that benches start, and the messages over their pipes.

    with child([sys.executable, "-m", "router", ...], cores={0}) as router:
        address = router.listening()["grpc"]

    with child(command) as runner:
        runner.answer()                        # its first answer, when it is ready
        runner.ask("decode", batch=8)          # {"decode": {"batch": 8}} and a newline; one line of JSON is the answer

A child lives no longer than the bench. It leads a session of its own: Ctrl-C in a terminal is for the bench, which ends
the child and all that it has started. Its standard error is kept for error messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from baton.errors import Unavailable
from baton.process.supervisor import bind_to_parent

ANSWER_S = 900.0
"""Seconds until the next line. The first line comes after loading, which may compile a model."""

_TAIL_CHARS = 2000
_CHUNK = 1 << 16


class ChildFailed(Unavailable):
    """A process failed, or reported an error."""


class Child:
    """A running process; `child` makes them."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: IO[str], *, suspended: bool) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log
        self._suspended = suspended
        self._came = b""

    def line(self, timeout_s: float | None = None) -> str:
        """The next line of its standard output, without its end. Raises ChildFailed if there is none in time."""
        while b"\n" not in self._came:
            if not self._read(ANSWER_S if timeout_s is None else timeout_s):
                raise ChildFailed(f"{self.name} ended: {self.output_tail()}")
        line, _, self._came = self._came.partition(b"\n")
        return line.decode(errors="replace")

    def listening(self) -> dict[str, str]:
        """The addresses by name of a service that says `listening name=host:port ...`."""
        line = self.line()
        if not line.startswith("listening "):
            raise ChildFailed(f"{self.name} says {line!r} instead of its address: {self.output_tail()}")
        return dict(re.findall(r"(\w+)=(\S+)", line))

    def answer(self) -> dict[str, Any]:
        """The next line, which is a JSON object. Raises ChildFailed with its `error` if it has one."""
        answer: dict[str, Any] = json.loads(self.line())
        if "error" in answer:
            raise ChildFailed(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command. Raises ChildFailed with the error that the process reports."""
        # Threads of OpenMP spin for a while when they have nothing to do, which slows down the next measurement.
        if self._suspended:
            self.signal(signal.SIGCONT)
        try:
            self._write(json.dumps({command: arguments}).encode() + b"\n")
            return self.answer()
        except BrokenPipeError:
            raise ChildFailed(f"{self.name} ended: {self.output_tail()}") from None
        finally:
            self.suspend()

    def suspend(self) -> None:
        """Suspend it until the next question, if it was started with `suspended`."""
        if self._suspended:
            self.signal(signal.SIGSTOP)

    def finish(self, timeout_s: float | None = None) -> str:
        """Close its standard input, and return the rest of its output at its end. Raises ChildFailed if it fails."""
        self._input.close()
        while self._read(ANSWER_S if timeout_s is None else timeout_s):
            pass
        if status := self._process.wait():
            raise ChildFailed(f"{self.name} ended with status {status}: {self.output_tail()}")
        return self._came.decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all processes in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def output_tail(self) -> str:
        """The end of its standard error."""
        self._log.seek(0)
        return self._log.read()[-_TAIL_CHARS:].strip()

    def end(self, grace_s: float) -> None:
        """Ask it to stop, if there is a grace period, and kill the rest after it."""
        if grace_s:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, timeout_s: float) -> bool:
        """Read some output; False at its end."""
        if not select.select([self._output], [], [], timeout_s)[0]:
            # A late answer would be taken for that of the next question.
            self.signal(signal.SIGKILL)
            raise ChildFailed(f"{self.name} has not answered within {timeout_s:g} s")
        piece = os.read(self._output.fileno(), _CHUNK)
        self._came += piece
        return bool(piece)

    def _write(self, data: bytes) -> None:
        # Without a buffer: what can't be written would be tried again when the pipe is closed.
        os.write(self._input.fileno(), data)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


@contextlib.contextmanager
def child(
    command: Sequence[str],
    *,
    name: str = "",
    environ: Mapping[str, str] | None = None,
    cores: Iterable[int] = (),
    grace_s: float = 0.0,
    suspended: bool = False,
    unread: bool = False,
) -> Iterator[Child]:
    """A process that runs until the block ends; it then has `grace_s` seconds from SIGTERM to SIGKILL.

    `environ` is added to the environment of this process. `cores` are the cores that it may use; empty means those of
    this process. With `suspended`, it is stopped (SIGSTOP) between questions. With `unread`, nobody reads its
    output; it is kept for error messages.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with pinned(cores):
            process = subprocess.Popen(
                bind_to_parent(command),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log if unread else subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )
        started = Child(name or " ".join(command), process, log, suspended=suspended)
        try:
            yield started
        finally:
            started.end(grace_s)


@contextlib.contextmanager
def pinned(cores: Iterable[int]) -> Iterator[None]:
    """Bind this thread, and the processes that are started in the block, to `cores`; an empty list changes nothing."""
    chosen = set(cores)
    if not chosen:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
