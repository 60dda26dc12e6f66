"""Several routers on one port, each a process of its own: for more streams than one core can carry.

    parent ── holds the port, serves nobody ── router 0, router 1, …      all listen on the port (SO_REUSEPORT), and the
      │                                                                   kernel spreads connections over them
      ├─ one dies: its streams break, the others go on; it is started again at once, or after RESTART_S if it died early
      └─ SIGTERM: all drain, then it ends

Routers need no state of each other, so these are full ones, as separate machines would run them. Each has an ops
listener: the first at --ops, the others at the ports that follow. A process ends when its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import AsyncIterator

from baton.config import parse_address
from baton.errors import ConfigError
from baton.launcher import bound_to_me
from baton.process import Running, main
from baton.rpc.server import check_reach
from baton.sockets import bind
from baton.telemetry.logs import configure
from router.app import run
from router.config import RouterConfig

RESTART_S = 1.0
STEADY_S = 5.0
"""Seconds that a router must have listened for its end not to be an early one."""

_STOP_S = 10.0
_LAST_PORT = 65535
_OWN = ("processes", "grpc", "ops")

_logger = logging.getLogger(__name__)


class _Child:
    """One router; `flags` are its settings but for `ops`, its address for metrics, which it keeps for good."""

    def __init__(self, number: int, flags: list[str], ops: str) -> None:
        self.number = number
        self.ops = ops
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._listens_since: float | None = None

    async def start(self) -> None:
        """Run it until it listens. Raises ConfigError when it ends before; it has said why."""
        self._listens_since = None
        command = bound_to_me([sys.executable, "-m", __name__, *self._flags, f"--ops={self.ops}"])
        # A signal of the terminal goes to the parent alone, which passes it on once.
        process = self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        line = (await process.stdout.readline()).decode() if process.stdout else ""
        if not line.startswith("listening "):
            raise ConfigError(f"processes: router {self.number} ended with status {await process.wait()}")
        self.ops = line.rpartition("ops=")[2].strip()
        self._listens_since = asyncio.get_running_loop().time()

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        while True:
            if self._process is not None:
                status = await self._process.wait()
                pid = self._process.pid
                _logger.error("router %d (pid %d) ended with status %d, and is started again", self.number, pid, status)
            now = asyncio.get_running_loop().time()
            if self._listens_since is None or now - self._listens_since < STEADY_S:
                await asyncio.sleep(RESTART_S)
            try:
                await self.start()
            except ConfigError:
                # It has said why, and is tried again.
                pass
            except OSError as error:
                _logger.error("router %d can't be started: %s", self.number, error)

    async def stop(self) -> None:
        """Ask it to drain, or to cut that short, and wait until it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class Several:
    """Routers that share a port; "host:port" as bound."""

    def __init__(self, address: str, children: list[_Child]) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address
        self._children = children
        self._keeping = [asyncio.create_task(child.keep(), name=f"router {child.number}") for child in children]

    @property
    def listening(self) -> str:
        """The one address for clients, and the ops address of each."""
        return f"grpc={self._address} ops={','.join(child.ops for child in self._children)}"

    async def drain(self) -> None:
        """Have all drain, each for its own `drain_s`, and wait until they have ended."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))


@contextlib.asynccontextmanager
async def several(config: RouterConfig) -> AsyncIterator[Several]:
    """Start `config.processes` routers on one port; the end of the block ends them.

    Raises ConfigError for an address that is refused or taken, for one of --ops that leaves too few ports, and when a
    router does not start.
    """
    keys = {"api_keys": config.api_keys}
    check_reach(config.grpc, insecure=config.insecure, tls=bool(config.tls_cert), keys=keys, field="grpc")
    ops = [_ops(config, number) for number in range(config.processes)]
    try:
        # Whoever has the port without sharing it is found by a bind that does not share it either.
        bind(config.grpc).close()
        held = bind(config.grpc, shared=True)
    except ConfigError as error:
        raise ConfigError(f"grpc: {error}") from None
    host, port = _host(config.grpc), held.getsockname()[1]
    address = f"{host}:{port}"
    flags = [f"--grpc={address}", *_flags(config)]
    children = [_Child(number, flags, each) for number, each in enumerate(ops)]
    with contextlib.closing(held):
        try:
            for child in children:
                await child.start()
            app = Several(address, children)
            try:
                yield app
            finally:
                app.failed.cancel()
                try:
                    async with asyncio.timeout(_STOP_S):
                        await app.drain()
                except TimeoutError:
                    _logger.error("not all routers have ended within %g s; they are killed", _STOP_S)
        finally:
            for child in children:
                child.kill()


def _flags(config: RouterConfig) -> list[str]:
    """The settings that all routers have; secrets stay in the environment."""
    flags = []
    for field in dataclasses.fields(config):
        if field.name not in _OWN and not field.metadata.get("secret"):
            value = getattr(config, field.name)
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            flags.append(f"--{field.name.replace('_', '-')}={text}")
    return flags


def _ops(config: RouterConfig, number: int) -> str:
    """Where a router is to tell its metrics; port 0: anywhere, when it starts for the first time."""
    port = parse_address(config.ops)[1]
    if port + number > _LAST_PORT:
        raise ConfigError(f"ops: {config.ops} leaves no port for router {number}")
    return f"{_host(config.ops)}:{port + number if port else 0}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def start(config: RouterConfig) -> Running:
    """One of several routers, ready to be entered."""
    configure(config.log_level, "router", str(os.getpid()))
    return run(config, shared=True)


if __name__ == "__main__":
    sys.exit(main("router", "router", RouterConfig, start))
