"""Types of command-line values that several commands use; their errors name flag and value."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.config.options import Address, flag_of
from baton.errors import InvalidRequest
from baton.request import PARAMETERS
from baton.rpc.calls import MAX_TIMEOUT_S

DEFAULT_GRPC = "127.0.0.1:50050"

F = TypeVar("F", bound=Callable[..., Any])

_CONNECTION = ("api_key", "tls", "ca", "cert", "key", "server_name")


def connection_options(command: F) -> F:
    """Add the flags that say how to reach a router: API key and TLS."""
    file = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--api-key", envvar="BATON_API_KEY", help="API key; better in the variable BATON_API_KEY."),
            click.option("--tls", is_flag=True, help="Use TLS, with the CAs that gRPC trusts by default."),
            click.option(
                "--ca", type=file, help="PEM file with the CA that signed the router's certificate; implies TLS."
            ),
            click.option(
                "--cert", type=file, help="PEM file with the client's certificate, for routers that require one."
            ),
            click.option("--key", type=file, help="PEM file with the private key of --cert."),
            click.option("--server-name", help="Name in the router's certificate.  [default: the host of --target]"),
        )
    ):
        command = option(command)
    return command


def connection(flags: dict[str, Any]) -> dict[str, Any]:
    """Take what `connection_options` added out of a command's flags, as arguments of the client."""
    return {name: flags.pop(name) for name in _CONNECTION}


class AddressList(click.ParamType[list[str]]):
    """One or more HOST:PORT, separated by commas."""

    name = "HOST:PORT[,HOST:PORT...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The addresses, at least one."""
        one = Address()
        return [one.convert(text.strip(), param, ctx) for text in str(value).split(",")]


class Seconds(click.ParamType[float]):
    """A time in seconds."""

    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, above 0 and at most MAX_TIMEOUT_S."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            self.fail(f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}, got {value!r}", param, ctx)
        return seconds


class ReportFile(click.Path):
    """A file that a command writes at its end. If it can't be written, the command fails before it begins.

    With `dash`, "-" means standard output.
    """

    def __init__(self, *, dash: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True, allow_dash=dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, in a folder that is there."""
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.allow_dash and file == Path("-"):
            return file
        if not os.access(file.parent, os.W_OK | os.X_OK):
            self.fail(
                f"{str(file)!r} can't be written: its folder must exist, and you must be allowed to write to it",
                param,
                ctx,
            )
        return file


class TokenIds(click.ParamType[list[int]]):
    """Token ids, separated by commas."""

    name = "1,2,3"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The ids."""
        ids = []
        for text in str(value).split(","):
            if not text.strip().isdecimal():
                self.fail(str(InvalidRequest("token id", "must be a number", text.strip())), param, ctx)
            ids.append(int(text))
        return ids


_KINDS: dict[str, dict[str, Any]] = {
    "int": {"type": int},
    "float": {"type": float},
    "bool": {},
    "tuple[str, ...]": {"multiple": True},
    "tuple[int, ...]": {"type": TokenIds()},
    "tuple[tuple[int, float], ...]": {
        "type": (int, float),
        "multiple": True,
        "metavar": "ID BIAS",
        "callback": lambda *given: dict(given[2]),
    },
}


def sampling_options(command: F) -> F:
    """Add a flag for each sampling parameter; what is not given is None or empty."""
    for name, parameter in reversed(PARAMETERS.items()):
        flag = flag_of(name) if len(name) > 1 else f"-{name}"
        flags = f"{flag}/--no-{flag[2:]}" if parameter.kind == "bool" else flag
        default = "" if parameter.default in (None, ()) else f"  [default: {str(parameter.default).lower()}]"
        command = click.option(flags, default=None, help=parameter.help + default, **_KINDS[parameter.kind])(command)
    return command
