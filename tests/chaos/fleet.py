"""A fleet of real processes behind a bad network.

    clients ─ c-r0 ─▶ r0 ─ r0-p0, r0-d0 … ─▶ p0 p1 ─ redis-p0 … ─▶ redis
                                             ▲ kv-p0
                                             └──────── d0 d1

Workers of both roles, m0 m1, stand on both sides: their links are those of p0 and of d0. Each arrow is a link of the
proxy (tests/chaos/proxy.py). The harness itself asks the processes directly, so that it sees them through every cut.
All processes end with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import keys
from baton.process.supervisor import bind_to_parent
from tests.redis_server import BINARIES

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of the chaos suite"
MARK = "CHAOS_FLEET"
"""Environment variable that tells the processes of one fleet from all others."""

RANK_MODULE = "baton.engine.rank"

PAGE_TOKENS = 16
REAL_TOKEN_BYTES = 6144
"""KV of a token of the bundled model in float32."""

EXIT_S = 60.0
"""More than any drain and stop may last."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Processes and settings of a fleet; times in seconds."""

    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    routers: int = 2
    slots: int = 8
    prefill_pages: int = 640
    decode_pages: int = 384
    mixed_pages: int = 512
    step_time: float = 0.012
    chunk_time: float = 0.02
    chunk_size: int = 32
    queue_capacity: int = 256
    drain_s: float = 20.0
    model_len: int = 4096
    tenants: Mapping[str, int | None] = field(default_factory=dict)
    """Most streams of each tenant, None for no limit; with tenants the routers ask for API keys."""
    stall_s: float = 3.0
    """An engine that hangs is replaced after about three times as long."""
    prefill_ranks: tuple[int, int] = (1, 1)
    """Tensor and pipeline parallel degrees. Workers with ranks have the real engine, and the bundled model."""
    decode_ranks: tuple[int, int] = (1, 1)

    @property
    def real(self) -> bool:
        """Whether the workers have the real engine."""
        return (self.prefill_ranks, self.decode_ranks) != ((1, 1), (1, 1))

    def ranks(self, name: str) -> int:
        """Number of ranks of a worker."""
        return math.prod({"p": self.prefill_ranks, "d": self.decode_ranks}.get(name[0], (1,)))


class Process:
    """A command that can be started, signalled and started again at the same addresses."""

    def __init__(self, name: str, command: Sequence[str], log: Path, mark: str) -> None:
        self.name, self.command, self.log, self.mark = name, command, log, mark
        self.popen: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int:
        """Of the running process; 0 when it does not run."""
        return self.popen.pid if self.popen is not None and self.popen.poll() is None else 0

    def start(self) -> None:
        """Start it; only the main thread may, because the process dies with the thread that started it."""
        environ = {**os.environ, "BATON_FLEET_SECRET": SECRET, "PYTHONPATH": str(ROOT), MARK: self.mark}
        with self.log.open("ab") as log:
            log.write(f"--- start {self.starts} of {self.name}\n".encode())
            log.flush()
            self.popen = subprocess.Popen(
                bind_to_parent(self.command), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=environ
            )
        self.starts += 1

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.send(signal.SIGKILL)
        await self.ended()

    async def ended(self, timeout: float = EXIT_S) -> int | None:
        """The exit status; None if it still runs after `timeout` seconds."""
        if self.popen is None:
            return 0
        try:
            return await asyncio.to_thread(self.popen.wait, timeout)
        except subprocess.TimeoutExpired:
            return None

    def rss(self) -> int:
        """Resident bytes; 0 when it does not run."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss) if self.pid else 0
        except psutil.Error:
            return 0

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Link:
    """One link of the proxy; `ends` are the processes at both sides, None for the clients."""

    name: str
    port: int
    ends: tuple[str | None, str]
    peers: Sequence[str] = field(default=())
    """Processes that share the link as dialling side, where each can be cut by itself."""


class Fleet:
    """Use as `async with Fleet.running(shape, directory) as fleet`."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.processes: dict[str, Process] = {}
        self.links: dict[str, Link] = {}
        self.control: dict[str, int] = {}
        """Port of each process at which it is asked directly: control of workers, clients' of routers."""
        self.ops: dict[str, int] = {}
        self.http: dict[str, int] = {}
        """Port of each router for OpenAI's API."""
        self.keys: dict[str, str] = {}
        """API keys by tenant; "" is the harness itself, as an admin."""
        self.routers = [f"r{i}" for i in range(shape.routers)]
        self.mixed = [f"m{i}" for i in range(shape.mixed)]
        self.prefill = [*(f"p{i}" for i in range(shape.prefill)), *self.mixed]
        """Workers that prefill, those of both roles last."""
        self.decode = [*(f"d{i}" for i in range(shape.decode)), *self.mixed]
        """Workers that decode, those of both roles last."""
        self.mark = uuid.uuid4().hex
        self._directory = directory
        self._taken: set[int] = set()
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def _key_file(self) -> Path:
        return self._directory / "keys.json"

    @property
    def workers(self) -> list[str]:
        return [*self.prefill, *(name for name in self.decode if name not in self.mixed)]

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, shape: Shape, directory: Path) -> AsyncIterator[Fleet]:
        fleet = cls(shape, directory)
        try:
            await fleet._start()
            yield fleet
        finally:
            for process in fleet.processes.values():
                process.send(signal.SIGCONT)
                process.send(signal.SIGKILL)
            for process in fleet.processes.values():
                await process.ended()
            for channel in fleet._channels.values():
                await channel.close()

    async def _start(self) -> None:
        control = self._port()
        self._add("proxy", [sys.executable, "-m", "tests.chaos.proxy", str(control)])
        await listens(control)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", control)
        redis = self._port()
        self.control["redis"] = redis
        flags = ["--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        flags += ["--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru"]
        self._add("redis", [BINARIES["valkey"], *flags])
        if self.shape.tenants:
            self.keys = {
                tenant: keys.add(self._key_file, tenant=tenant, max_streams=limit)
                for tenant, limit in self.shape.tenants.items()
            }
            self.keys[""] = keys.add(self._key_file, tenant="harness", admin=True)
        for name in self.workers:
            await self._start_worker(name)
        for name in self.routers:
            await self._start_router(name)
        await self.tell_pids()
        for name in [*self.workers, *self.routers]:
            await self.serving(name)

    async def _start_worker(self, name: str) -> None:
        role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
        pages = getattr(self.shape, f"{role}_pages")
        flags: list[str] = []
        if name in self.prefill:
            redis = await self._link(f"redis-{name}", (name, "redis"), self.control["redis"])
            kv = self._port()
            # A worker takes what it has itself without a connection.
            peers = [each for each in self.decode if each != name]
            shared = await self._link(f"kv-{name}", ("*", name), kv, peers=peers)
            flags += [] if self.shape.real else ["--chunk-time", str(self.shape.chunk_time)]
            flags += ["--chunk-size", str(self.shape.chunk_size), "--redis", f"redis://localhost:{redis}/0"]
            flags += ["--kv", f"127.0.0.1:{kv}", "--kv-advertise", f"127.0.0.1:{shared}"]
        if name in self.decode:
            flags += ["--slots", str(self.shape.slots)]
            flags += [] if self.shape.real else ["--step-time", str(self.shape.step_time)]
        self.control[name], self.ops[name] = self._port(), self._port()
        if self.shape.real:
            tensor, pipeline = self.shape.prefill_ranks if role == "prefill" else self.shape.decode_ranks
            command = [sys.executable, "-m", f"{role}_svc", *flags, "--dtype", "float32", "--threads", "1"]
            command += ["--tensor-parallel", str(tensor), "--pipeline-parallel", str(pipeline)]
            command += ["--kv-memory", str(pages * PAGE_TOKENS * REAL_TOKEN_BYTES)]
            command += ["--max-model-len", str(self.shape.model_len)]
        else:
            command = [sys.executable, "-m", "tests.chaos.process", role, *flags, "--pages", str(pages)]
            command += ["--model-len", str(self.shape.model_len)]
        command += ["--control", f"127.0.0.1:{self.control[name]}", "--ops", f"127.0.0.1:{self.ops[name]}"]
        command += ["--worker-id", name, "--drain-s", str(self.shape.drain_s), "--stall-s", str(self.shape.stall_s)]
        self._add(name, command)

    async def _start_router(self, name: str) -> None:
        targets = {
            worker: f"127.0.0.1:{await self._link(f'{name}-{worker}', (name, worker), self.control[worker])}"
            for worker in self.workers
        }
        self.control[name], self.ops[name], self.http[name] = self._port(), self._port(), self._port()
        await self._link(f"c-{name}", (None, name), self.control[name])
        command = [sys.executable, "-m", "router", "--grpc", f"127.0.0.1:{self.control[name]}"]
        command += ["--http", f"127.0.0.1:{self.http[name]}"]
        command += ["--ops", f"127.0.0.1:{self.ops[name]}", "--queue-capacity", str(self.shape.queue_capacity)]
        for role in ("prefill", "decode", "mixed"):
            if found := [target for worker, target in targets.items() if worker[0] == role[0]]:
                command += [f"--{role}", ",".join(found)]
        command += ["--drain-s", str(self.shape.drain_s)]
        command += ["--api-keys", str(self._key_file)] if self.keys else []
        self._add(name, command)

    def _add(self, name: str, command: Sequence[str]) -> None:
        process = self.processes[name] = Process(name, command, self._directory / f"{name}.log", self.mark)
        process.start()

    def _port(self) -> int:
        """A free port outside the range from which outgoing connections take theirs, so that it stays free."""
        while True:
            port = random.SystemRandom().randrange(15_000, 32_000)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in self._taken:
                    self._taken.add(port)
                    return port

    async def _link(self, name: str, ends: tuple[str | None, str], upstream: int, peers: Sequence[str] = ()) -> int:
        port = self._port()
        self.links[name] = Link(name, port, ends, peers)
        await self._ask(op="open", link=name, listen=port, upstream=upstream, identify=bool(peers))
        return port

    async def _ask(self, **request: object) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")
        answer = json.loads(await asyncio.wait_for(self._reader.readline(), 10))
        if "error" in answer:
            raise RuntimeError(f"proxy: {request}: {answer['error']}")

    async def tell_pids(self) -> None:
        """Tell the proxy which process is which; after every start of a worker that decodes."""
        await self._ask(op="pids", pids={name: self.processes[name].pid for name in self.decode})

    async def mode(self, mode: str, link: str, *, peer: str | None = None, rate: float = 0) -> None:
        await self._ask(op="mode", link=link, mode=mode, peer=peer, rate=rate)

    async def abort(self, link: str) -> None:
        """Reset the connections of a link; new ones pass."""
        await self._ask(op="abort", link=link)

    def links_of(self, name: str) -> list[tuple[str, str | None]]:
        """All links that touch a process, as (link, peer)."""
        found: list[tuple[str, str | None]] = []
        for link in self.links.values():
            if name in link.ends:
                found.append((link.name, None))
            elif name in link.peers:
                found.append((link.name, name))
        return found

    async def heal_links(self) -> None:
        for name in self.links:
            await self.mode("pass", name)

    def ranks_of(self, name: str) -> list[psutil.Process]:
        """Processes of the ranks of a running worker, without its leader."""
        return [each for each in self.all_ranks() if each.ppid() == self.processes[name].pid]

    def all_ranks(self) -> list[psutil.Process]:
        """Processes of ranks that workers of this fleet have started, orphans as well."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if RANK_MODULE in each.cmdline() and each.environ().get(MARK) == self.mark:
                    found.append(each)
        return found

    async def restart(self, name: str) -> None:
        """Start a process that has ended, and wait until it is healthy."""
        self.processes[name].start()
        await self.tell_pids()
        await self.serving(name)

    def address(self, router: str) -> str:
        """Address where clients reach a router, through the network."""
        return f"127.0.0.1:{self.links[f'c-{router}'].port}"

    def direct(self, router: str) -> str:
        """Address where a router listens, past the network."""
        return f"127.0.0.1:{self.control[router]}"

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        """Metadata that authorizes the harness to ask a process everything."""
        return (("authorization", f"Bearer {self.keys['']}"),) if self.keys and name in self.routers else ()

    def channel(self, name: str) -> grpc.aio.Channel:
        if name not in self._channels:
            options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]
            options += [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            self._channels[name] = grpc.aio.insecure_channel(f"127.0.0.1:{self.control[name]}", options=options)
        return self._channels[name]

    async def serving(self, name: str, timeout: float = 60.0) -> None:
        """Return when a process says that it serves; raises RuntimeError if it does not within `timeout` seconds."""
        if name in ("redis", "proxy"):
            await listens(self.control[name], timeout)
            return
        stub = health_pb2_grpc.HealthStub(self.channel(name))
        end = asyncio.get_running_loop().time() + timeout
        while asyncio.get_running_loop().time() < end:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            if not self.processes[name].pid:
                break
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{name} does not serve:\n{self.processes[name].tail()}")


async def listens(port: int, timeout: float = 30.0) -> None:
    """Return when somebody listens on a port of loopback."""
    async with asyncio.timeout(timeout):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return
