"""A runner seen from outside: asked one thing at a time, stopped while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.launcher import bound_to_me

ANSWER_S = 900.0
"""For one answer; the first one has the loading in it, which may compile the model."""


class RunnerError(Exception):
    """A runner said that it failed, or ended."""


class Absent:
    """A runner that did not start."""

    def __init__(self, words: str) -> None:
        self._words = words

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Raises RunnerError with what it said."""
        raise RunnerError(self._words)


class Runner:
    """A running runner; it holds the processor only while it is asked."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Any) -> None:
        self.name = name
        self._process = process
        self._log = log
        self.about: dict[str, Any] = self._answer()["ready"]
        self._signal(signal.SIGSTOP)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command; raises RunnerError with the runner's words."""
        # Threads of OpenMP spin for a while when they have nothing to do, at the expense of who is measured next.
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            # Not through the buffer: what can't be written would be tried again when the pipe is closed.
            os.write(self._process.stdin.fileno(), json.dumps({command: arguments}).encode() + b"\n")
            return self._answer()
        except BrokenPipeError:
            raise RunnerError(f"{self.name} ended: {self._last_words()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # Nothing is buffered: the line before was the only one of its question.
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            # A late answer would be taken for that of the next question.
            self._signal(signal.SIGKILL)
            raise RunnerError(f"{self.name} has not answered within {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RunnerError(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunnerError(f"{self.name}: {answer['error']}")
        return answer

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        self._log.seek(0)
        return str(self._log.read()[-2000:])


@contextlib.contextmanager
def runner(name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Runner]:
    """Start a runner and wait until it is ready; it is killed at the end."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            bound_to_me(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Runner(name, process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
