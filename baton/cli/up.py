"""`baton up`: a whole fleet on this machine.

    embedded Valkey ── prefill × N, decode × N ── router ── "ready grpc=…" ── a signal ── drain ── stop      status 0
                                                                     │                      └ again: stop now
                                                                     └ the router's death: stop              status 1

The services are started as processes with their usual flags. `up` learns their addresses from the line that each prints
when it listens. If any process dies before the ready line, or the router dies later, everything stops. If a worker or
the Valkey dies later, it is started again at the same address, where the others find it. The services stop in reverse
order: the router first, which lets running requests finish.

With --secure they speak mutual TLS, and clients need a key (see baton.cli.secure).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import grpc
from click.core import ParameterSource
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.options import DEFAULT_GRPC, Seconds
from baton.cli.secure import SecureFleet, worker_names
from baton.cli.up_options import ANYWHERE, LISTENERS, UpOptions, checked
from baton.config import parse_address
from baton.config.options import SettingsCommand, Size, click_option
from baton.config.roles import ROLES
from baton.errors import BatonError, ConfigError, ModelError, Unavailable
from baton.model.checkpoint import weight_files
from baton.model.fingerprint import cache_folder
from baton.native.mapping import unnamed_file
from baton.process import STOP_S, Signals, signals, stop_signals
from baton.rpc.channel import control_channel
from baton.rpc.tls import Tls
from baton.supervisor import Supervisor, parse_listeners

_OFFERED = (
    "model",
    "served_model_name",
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
    "cache_writes",
    "processes",
    "drain_s",
    "log_level",
)
"""Settings of the services that are also flags of `up`: a given flag goes to all roles that have the setting."""

_NEEDED = ("drain_s", "log_level")
"""The settings that `up` uses itself."""

_NAME_WIDTH = len("prefill-0")

_DEATH_S = 0.5
"""Time in which the end of a process is known whose connection broke."""

_SERVICES = {"prefill": "prefill_svc", "decode": "decode_svc", "router": "router"}
COMMANDS = {role: [sys.executable, "-m", module] for role, module in _SERVICES.items()}
"""Command of each role; tests put others in its place."""


_FIELDS = {field.name: field for role in reversed(ROLES.values()) for field in fields(role)}


@click.command(
    cls=SettingsCommand,
    secrets=[name for name, field in _FIELDS.items() if field.metadata["secret"]],
    params=[
        *(click_option(_FIELDS[name]) for name in _OFFERED if name not in ("drain_s", "packed_weights")),
        click_option(_FIELDS["drain_s"], help="Seconds that running requests get to finish after Ctrl-C."),
        click_option(_FIELDS["threads"], help="Compute threads of each worker; 0: the cores, divided by the workers."),
        click_option(
            _FIELDS["packed_weights"],
            help="File, in memory, through which workers share the weights of native kernels; empty: a nameless one.",
        ),
        click_option(_FIELDS["grpc"], default=DEFAULT_GRPC),
        click_option(
            _FIELDS["redis"],
            default="embedded",
            help="Where workers share cached prefixes: embedded (a server of this fleet), none, or the URL of a Redis: "
            "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
        ),
        click_option(_FIELDS["insecure"], help="Let other machines reach --grpc without --secure."),
    ],
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
    "--start-timeout",
    type=Seconds(),
    default=600.0,
    show_default=True,
    help="Seconds within which all processes must be ready.",
)
@click.pass_context
def up(ctx: click.Context, /, **flags: Any) -> None:
    """Run router, prefill and decode on this machine until Ctrl-C.

    At Ctrl-C, SIGTERM or SIGHUP (a terminal that closes) the router refuses new requests and lets running ones finish;
    then everything ends with status 0. A second Ctrl-C or signal stops everything at once.

    If a worker or the embedded Valkey dies or hangs, it is started again at the same address; standard error says which
    one and why. If the router dies, or a worker before all is ready, everything ends with status 1. Bad flags and
    variables end with status 2.

    Settings that have no flag here, such as BATON_CPUS and BATON_CONVERT_KV, are read from variables by all
    processes that know them: python -m prefill_svc, decode_svc or router --help lists them.
    """
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
    try:
        size = sum(file.stat().st_size for file in weight_files(model))
        file = unnamed_file(cache_folder(), size)
    except (OSError, ModelError, RuntimeError):
        # The workers say what is wrong with the checkpoint; without such a file each holds its own weights. A user
        # without a home folder is a RuntimeError.
        return options
    return replace(options, services=options.services | {"packed_weights": f"/proc/{os.getpid()}/fd/{file}"})


def _secure(options: UpOptions) -> SecureFleet | None:
    if options.secure is None:
        return None
    host, _ = parse_address(options.grpc)
    return SecureFleet.prepare(options.secure, [host], {role: getattr(options, role) for role in ("prefill", "decode")})


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
                if starting.done() and not stop.first.done():
                    click.echo(starting.result())
                    await _first(stop.first, *deaths)
                if not stop.first.done():
                    raise Unavailable(next(death.result() for death in deaths if death.done()))
                if starting.done():
                    await _drain(routers, options.services["drain_s"], stop)
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
    return 0


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

    names = {role: worker_names(role, getattr(options, role)) for role in ("prefill", "decode")}
    try:
        async with asyncio.timeout(options.start_timeout):
            children = {
                name: await workers.start(name, [*command(role, name), *ANYWHERE], environ)
                for role in names
                for name in names[role]
            }
            listeners = {name: parse_listeners(await workers.ready(child)) for name, child in children.items()}
            found = [f"--{role}={','.join(listeners[name]['control'] for name in names[role])}" for role in names]
            router = await routers.start("router", [*command("router", "router"), *found], environ)
            where = parse_listeners(await routers.ready(router))
            try:
                await _wait_until_serving(where["grpc"], secure.admin() if secure else None)
            except Unavailable as error:
                # If the router died, its connection broke first. How it ended says more.
                await asyncio.wait([routers.death], timeout=_DEATH_S)
                raise Unavailable(routers.death.result() if routers.death.done() else str(error)) from None
    except TimeoutError:
        raise Unavailable(f"not ready after {options.start_timeout:g} s (--start-timeout)") from None
    for role in names:
        for name in names[role]:
            listen = [f"--{listener}={listeners[name][listener]}" for listener in LISTENERS]
            children[name].restart_on_death([*command(role, name), *listen])
    return (
        f"ready grpc={where['grpc']} ops={where['ops']} model={options.served_model_name} "
        f"prefill={options.prefill} decode={options.decode}{secure.describe() if secure else ''}"
    )


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
