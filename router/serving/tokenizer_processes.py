"""Processes that tokenize long texts.

`tokenizers` makes the list of token ids in one call, which holds the GIL for 20 ns per token, also on a thread. A text
of a million tokens would hold up the event loop for 20 ms. Another process has its own GIL, and returns the ids as
bytes.

    thread ── text in UTF-8 ──▶ process ── ids as uint32 ──▶ the same thread

A process starts when a long text comes and no other process is idle, so there are at most as many processes as
threads. A process ends at the end of its standard input, at `close`, and with the thread that started it. It is killed
if it does not answer for far longer than its text can take. If no process can be started, or if it ends before it is
ready (the checkpoint's folder is gone, or has another tokenizer now), the thread tokenizes the text itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from subprocess import PIPE
from typing import IO

from baton.errors import EngineError, Unavailable
from baton.model.checkpoint import tokenizer_digest
from baton.process import allocator
from baton.process.supervisor import bind_to_parent
from baton.tokenizer import Tokenizer

LONG_TEXT = 128 << 10
"""Bytes from which on a text is long. The list of tokens of a shorter text takes 2.6 ms at most, as a rule."""

_MIN_LIMIT_S = 60.0
_MIN_BYTES_PER_S = 16 << 10
"""Time limit of a text: the first value in seconds, plus its bytes divided by the second. Most need 1 s per MB."""

_TEXT = struct.Struct("=?Q")
"""Header of a text: whether special tokens are added, and the number of bytes of text that follow."""
_READY = b"1"
"""Written by a process that has loaded its tokenizer."""
_ANSWER = struct.Struct("=?Q")
"""Header of an answer: whether the text was tokenized, and the number of bytes of ids, or of an error, that follow."""


_log = logging.getLogger(__name__)


class TokenizerProcesses:
    """Processes with the tokenizer of the checkpoint in `folder`, whose `tokenizer_digest` is `digest`.

    `tokenizer` is the same in this process. Safe to use from several threads.
    """

    def __init__(self, folder: str | Path, digest: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # -P keeps modules in the working directory from being imported.
        self._command = bind_to_parent([sys.executable, "-P", "-m", __name__, str(folder), digest])
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self._failed = False
        """Whether the last start of a process failed; only the first of several failures is logged."""
        self._closed = False

    def encode(self, text: bytes, *, add_special_tokens: bool) -> array[int]:
        """Token ids of a text in UTF-8, the same as from `Tokenizer.encode`.

        Raises Unavailable if the process ends or does not answer, EngineError if the tokenizer fails.
        """
        answer: bytes | bytearray
        if (process := self._take()) is None:
            tokenized, answer = _tokenize(self._tokenizer, text, add_special_tokens)
        else:
            tokenized, answer = self._ask(process, text, add_special_tokens)
        if not tokenized:
            raise EngineError(f"the text can't be tokenized: {answer.decode()}")
        return array("I", answer)

    def _ask(self, process: subprocess.Popen[bytes], text: bytes, add_special_tokens: bool) -> tuple[bool, bytearray]:
        """The result of `_tokenize` from the process, which is idle afterwards."""
        limit_s = _MIN_LIMIT_S + len(text) / _MIN_BYTES_PER_S
        deadline = time.monotonic() + limit_s
        try:
            _send(process, _TEXT.pack(add_special_tokens, len(text)), deadline)
            _send(process, text, deadline)
            tokenized, size = _ANSWER.unpack(_receive(process, _ANSWER.size, deadline))
            answer = _receive(process, size, deadline)
        except TimeoutError:
            self._end(process)
            problem = f"the process that tokenizes {len(text)} bytes of text did not answer within {limit_s:.0f} s"
            _log.warning("%s; it was killed", problem)
            raise Unavailable(f"{problem}; try again") from None
        except (OSError, EOFError):
            self._end(process)
            self._check_open()
            problem = f"the process that tokenized the text ended with status {process.returncode}"
            raise Unavailable(f"{problem}; try again") from None
        except BaseException:
            # A late answer would be read as the answer to the next text.
            self._end(process)
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return tokenized, answer
        self._end(process)
        return tokenized, answer

    def close(self) -> None:
        """Kill all processes; `encode` raises Unavailable for the texts that they tokenize."""
        with self._lock:
            self._closed = True
        for process in list(self._running):
            process.kill()
        for process in list(self._running):
            # The threads that wait for it close its pipes: after a close here, another file could get the same numbers.
            process.wait()
        while self._idle:
            self._end(self._idle.pop())

    def _take(self) -> subprocess.Popen[bytes] | None:
        """An idle process, or a new one; None if none can be started."""
        with self._lock:
            self._check_open()
            while self._idle:
                if (process := self._idle.pop()).poll() is None:
                    return process
                self._end(process)
            # In a group of its own, so that Ctrl-C lets the router drain.
            try:
                process = subprocess.Popen(
                    self._command, bufsize=0, stdin=PIPE, stdout=PIPE, process_group=0, env=self._environment
                )
            except OSError as error:
                self._fail_start(str(error))
                return None
            self._running.add(process)
        try:
            os.set_blocking(_pipe(process.stdin), False)
            ready = _receive(process, len(_READY), time.monotonic() + _MIN_LIMIT_S) == _READY
        except (OSError, EOFError, TimeoutError):
            ready = False
        except BaseException:
            self._end(process)
            raise
        if ready:
            self._failed = False
            return process
        self._end(process)
        self._check_open()
        self._fail_start(f"it ended with status {process.returncode} before it was ready")
        return None

    def _fail_start(self, problem: str) -> None:
        if not self._failed:
            instead = "the router does it itself, and all else waits for 30 ms for a million tokens"
            _log.warning("no process to tokenize long texts can be started (%s); %s", problem, instead)
        self._failed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the router is stopping, and the text is not tokenized")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            # Text that the process has not read can't be written any more.
            with contextlib.suppress(OSError):
                pipe.close()
        self._running.discard(process)


def _pipe(stream: IO[bytes] | None) -> int:
    """The file descriptor of a pipe to a process."""
    assert stream is not None
    return stream.fileno()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait for an event of `select.poll` on a pipe. Raises TimeoutError at the deadline, by time.monotonic."""
    polling = select.poll()
    polling.register(descriptor, event)
    if not polling.poll(1e3 * max(deadline - time.monotonic(), 0.0)):
        raise TimeoutError


def _send(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """Write to a process. Raises TimeoutError, and OSError if it has ended."""
    pipe, rest = _pipe(process.stdin), memoryview(data)
    while rest:
        _wait(pipe, select.POLLOUT, deadline)
        rest = rest[os.write(pipe, rest) :]


def _receive(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
    """The next `size` bytes that a process writes. Raises TimeoutError, and EOFError if it has ended."""
    pipe, data = _pipe(process.stdout), bytearray(size)
    rest = memoryview(data)
    while rest:
        _wait(pipe, select.POLLIN, deadline)
        if not (count := os.readv(pipe, [rest])):
            raise EOFError
        rest = rest[count:]
    return data


def _read(stream: IO[bytes], size: int) -> bytes:
    """The next `size` bytes. Raises EOFError at the end of the stream."""
    if len(data := stream.read(size)) < size:
        raise EOFError
    return data


def _tokenize(tokenizer: Tokenizer, text: bytes, add_special_tokens: bool) -> tuple[bool, bytes]:
    """Whether the text was tokenized, and the ids as uint32, or the error in UTF-8."""
    try:
        return True, array("I", tokenizer.encode(text.decode(), add_special_tokens=add_special_tokens)).tobytes()
    except Exception as error:
        # Errors of `tokenizers` have no class of their own.
        return False, str(error).encode()


def main() -> None:
    """Tokenize texts from standard input until its end."""
    # A service manager signals all processes of a draining router, which still needs this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, digest = sys.argv[1:]
    tokenizer = Tokenizer.load(folder)
    if tokenizer_digest(folder) != digest:
        sys.exit(f"the tokenizer in {folder} has changed since the router started")
    # All other output to standard output goes to standard error.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sink.write(_READY)
    sink.flush()
    with contextlib.suppress(EOFError):
        while True:
            add_special_tokens, size = _TEXT.unpack(_read(source, _TEXT.size))
            text = _read(source, size)
            answer = _tokenize(tokenizer, text, add_special_tokens)
            sink.write(_ANSWER.pack(answer[0], len(answer[1])) + answer[1])
            sink.flush()
            # Without this, a text of a million tokens would leave 400 MB in this process.
            del text, answer
            allocator.trim()


if __name__ == "__main__":
    main()
