"""Several router processes on one port, for more streams than one core can serve.

    parent ── holds the port, serves nobody ── router 0, router 1, …      all listen on the port (SO_REUSEPORT), and the
      │                                                                   kernel spreads connections over them
      ├─ one dies: its streams break, the others go on; it is started again (see baton.process.supervisor)
      └─ SIGTERM: all drain, then it ends

The processes share no state: each is a complete router, as on a machine of its own. Each has an ops listener, the first
at --ops, the others at the next ports.
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
from baton.process import allocator
from baton.process.service import STOP_S, Running, main
from baton.process.sockets import bind
from baton.process.supervisor import Supervisor, parse_listeners
from baton.telemetry.logs import configure
from router.app import check_addresses, run

_LAST_PORT = 65535

_KEPT_BYTES = 64 << 20
"""Bytes of freed memory that a router keeps: several times the size of the longest request."""

_SHARED = ("grpc", "http")
_OWN = ("processes", "ops", *_SHARED)


@dataclass(frozen=True, slots=True)
class RouterProcesses:
    """Routers that share a port, "host:port" as bound."""

    listening: str
    """The shared address for clients, and the ops address of each router."""
    failed: asyncio.Future[None]
    """A future that never gets a result, because a router that dies is started again."""
    _routers: Supervisor
    _drain_s: float

    async def drain(self) -> None:
        """Drain all routers, each for `drain_delay_s` + `drain_s` seconds at most, and wait until they have ended."""
        await self._routers.stop(self._drain_s + STOP_S)


@contextlib.asynccontextmanager
async def run_router_processes(config: RouterConfig) -> AsyncIterator[RouterProcesses]:
    """Run `config.processes` routers on one port until the block ends.

    Raises ConfigError if an address is not allowed or in use, or if too few ports follow that of --ops. Raises
    Unavailable if a router does not start.
    """
    check_addresses(config)
    ops = [_ops(config, number) for number in range(config.processes)]
    with contextlib.ExitStack() as held:
        shared = {field: _hold(field, address, held) for field in _SHARED if (address := getattr(config, field))}
        command = [sys.executable, "-m", __name__]
        command += [*(f"--{field}={address}" for field, address in shared.items()), *_flags(config)]
        named = " ".join(f"{field}={address}" for field, address in shared.items())
        async with Supervisor(_relay) as routers:
            children = [
                await routers.start(f"router {number}", [*command, f"--ops={each}"]) for number, each in enumerate(ops)
            ]
            ops = [parse_listeners(await routers.ready(child))["ops"] for child in children]
            for child, each in zip(children, ops, strict=True):
                # The address of the metrics must not change at a restart.
                child.restart_on_death([*command, f"--ops={each}"])
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            yield RouterProcesses(
                f"{named} ops={','.join(ops)}", failed, routers, config.drain_delay_s + config.drain_s
            )


def _hold(field: str, address: str, held: contextlib.ExitStack) -> str:
    """The address, with a port that stays this process's until `held` is closed. Raises ConfigError."""
    try:
        # Only a bind without sharing finds a process that has the port and shares it with nobody.
        bind(address).close()
        bound = held.enter_context(bind(address, shared=True))
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    return f"{_host(address)}:{bound.getsockname()[1]}"


def _relay(_name: str, line: str) -> None:
    # The lines of a router's log have its process id already.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _flags(config: RouterConfig) -> list[str]:
    """The flags that all routers have in common; secrets are passed in the environment."""
    flags = []
    for field in dataclasses.fields(config):
        if field.name not in _OWN and not field.metadata.get("secret"):
            value = getattr(config, field.name)
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            flags.append(f"--{field.name.replace('_', '-')}={text}")
    return flags


def _ops(config: RouterConfig, number: int) -> str:
    """The ops address of a router; port 0 stands for any free port at its first start."""
    port = parse_address(config.ops)[1]
    if port + number > _LAST_PORT:
        raise ConfigError(f"ops: {config.ops} leaves no port for router {number}")
    return f"{_host(config.ops)}:{port + number if port else 0}"


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def prepare() -> None:
    """Keep freed memory in the process, in one heap for all its threads."""
    allocator.keep_freed(_KEPT_BYTES)
    allocator.use_one_arena()


def start(config: RouterConfig) -> Running:
    """One of several routers on a port, as an async context manager."""
    configure(config.log_level, "router", str(os.getpid()), log_format=config.log_format)
    prepare()
    return run(config, shared=True)


if __name__ == "__main__":
    sys.exit(main("router", "router", RouterConfig, start))
