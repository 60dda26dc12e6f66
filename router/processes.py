"""Several routers on one port, each a process of its own: for more streams than one core can carry.

    parent ── holds the port, serves nobody ── router 0, router 1, …      all listen on the port (SO_REUSEPORT), and the
      │                                                                   kernel spreads connections over them
      ├─ one dies: its streams break, the others go on; it is started again (see baton.process.supervisor)
      └─ SIGTERM: all drain, then it ends

Routers need no state of each other, so these are full ones, as separate machines would run them. Each has an ops
listener: the first at --ops, the others at the ports that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.config import parse_address
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.process import freed_memory
from baton.process.service import STOP_S, Running, main
from baton.process.sockets import bind
from baton.process.supervisor import Supervisor, parse_listeners
from baton.rpc.server import check_reach
from baton.telemetry.logs import configure
from router.app import run

_LAST_PORT = 65535

_KEPT_BYTES = 64 << 20
"""Freed memory that a router keeps: several times what the longest request takes."""

_OWN = ("processes", "grpc", "ops")


@dataclass(frozen=True, slots=True)
class RouterProcesses:
    """Routers that share a port, "host:port" as bound."""

    listening: str
    """The shared address for clients, and the ops address of each router."""
    failed: asyncio.Future[None]
    """Stays open: a router that dies is started again."""
    _routers: Supervisor
    _drain_s: float

    async def drain(self) -> None:
        """Have all drain, each for its own `drain_s`, and wait until they have ended."""
        await self._routers.stop(self._drain_s + STOP_S)


@contextlib.asynccontextmanager
async def run_router_processes(config: RouterConfig) -> AsyncIterator[RouterProcesses]:
    """Start `config.processes` routers on one port; the end of the block ends them.

    Raises ConfigError for an address that is refused or taken and for one of --ops that leaves too few ports,
    Unavailable when a router does not start.
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
    grpc = f"{_host(config.grpc)}:{held.getsockname()[1]}"
    command = [sys.executable, "-m", __name__, f"--grpc={grpc}", *_flags(config)]
    with contextlib.closing(held):
        async with Supervisor(_relay) as routers:
            children = [
                await routers.start(f"router {number}", [*command, f"--ops={each}"]) for number, each in enumerate(ops)
            ]
            ops = [parse_listeners(await routers.ready(child))["ops"] for child in children]
            for child, each in zip(children, ops, strict=True):
                # Where metrics are told stays the same for good.
                child.restart_on_death([*command, f"--ops={each}"])
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            yield RouterProcesses(f"grpc={grpc} ops={','.join(ops)}", failed, routers, config.drain_s)


def _relay(_name: str, line: str) -> None:
    # A line of a router's log names its process.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


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
    """The address of a router's metrics; port 0: any free one, when it starts for the first time."""
    port = parse_address(config.ops)[1]
    if port + number > _LAST_PORT:
        raise ConfigError(f"ops: {config.ops} leaves no port for router {number}")
    return f"{_host(config.ops)}:{port + number if port else 0}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def prepare() -> None:
    """Keep freed memory in the process, in one heap for all its threads."""
    freed_memory.keep(_KEPT_BYTES)
    freed_memory.share()


def start(config: RouterConfig) -> Running:
    """One of several routers, ready to be entered."""
    configure(config.log_level, "router", str(os.getpid()))
    prepare()
    return run(config, shared=True)


if __name__ == "__main__":
    sys.exit(main("router", "router", RouterConfig, start))
