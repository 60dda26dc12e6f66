"""Parts that several commands share: types of values, tables, and failures.

Errors of values name flag and value. Tables fit the width of a terminal; without a terminal, each row is one line. A
failure is one line on standard error, and an exit status that scripts can tell apart.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from baton.config.options import Address, flag_of
from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.request import PARAMETERS
from baton.rpc.calls import MAX_TIMEOUT_S, can_be_key

DEFAULT_GRPC = "127.0.0.1:50050"

F = TypeVar("F", bound=Callable[..., Any])

_CONNECTION = ("api_key", "tls", "ca", "cert", "key", "server_name")


def connection_options(command: F) -> F:
    """Add the flags for a connection to a router: API key and TLS."""
    file = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--api-key", envvar="BATON_API_KEY", help="API key; better in the variable BATON_API_KEY."),
            click.option("--api-key-file", type=file, help="File with the API key, such as api.key of --secure."),
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
    """Remove the flags of `connection_options` from `flags`, and return them as arguments of the client.

    A file with the key overrides the variable. Raises click.UsageError for a file that can't be read, or two keys.
    """
    found = {name: flags.pop(name) for name in _CONNECTION}
    if (file := flags.pop("api_key_file")) is not None:
        if click.get_current_context().get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
            raise click.UsageError("give one of --api-key and --api-key-file")
        try:
            found["api_key"] = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not text"
            raise click.BadParameter(f"{str(file)!r} can't be read: {why}", param_hint="'--api-key-file'") from None
        if not can_be_key(found["api_key"]) or found["api_key"].startswith("{"):
            problem = f"{str(file)!r} has no API key, which is one word; api_keys.json is a router's file"
            raise click.BadParameter(problem, param_hint="'--api-key-file'")
    return found


class AddressList(click.ParamType[list[str]]):
    """One or more HOST:PORT, separated by commas."""

    name = "HOST:PORT[,HOST:PORT...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The addresses, at least one; raises click.BadParameter."""
        one = Address()
        return [one.convert(text.strip(), param, ctx) for text in str(value).split(",")]


class Counts(click.ParamType[tuple[int, ...]]):
    """Positive integers, separated by commas; none for an empty value."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers."""
        texts = [text.strip() for text in str(value).split(",") if text.strip()]
        for text in texts:
            if not text.isdecimal() or int(text) < 1:
                self.fail(f"must be integers of at least 1, got {text!r}", param, ctx)
        return tuple(int(text) for text in texts)


class Seconds(click.ParamType[float]):
    """A time in seconds."""

    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, above 0 and at most MAX_TIMEOUT_S; raises click.BadParameter."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            self.fail(f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}, got {value!r}", param, ctx)
        return seconds


class ReportFile(click.Path):
    """A file that a command writes at its end. If it can't be written, the command fails before it begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, in a folder that is there."""
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
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
        for index, text in enumerate(str(value).split(",")):
            if not text.strip().isdecimal():
                # As a router names it.
                name = f"{param.name if param else 'token_ids'}[{index}]"
                self.fail(str(InvalidRequest(name, "must be a number of at least 0", text.strip())), param, ctx)
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
    """Add a flag for each sampling parameter; a flag that is not given is None or empty."""
    for name, parameter in reversed(PARAMETERS.items()):
        flag = flag_of(name)
        flags = [f"{flag}/--no-{flag[2:]}"] if parameter.kind == "bool" else [flag]
        if len(name) == 1:
            flags.insert(0, f"-{name}")
        default = "" if parameter.default in (None, ()) else f"  [default: {str(parameter.default).lower()}]"
        command = click.option(*flags, default=None, help=parameter.help + default, **_KINDS[parameter.kind])(command)
    return command


FAILED, USAGE, TRY_AGAIN, TIMED_OUT, INTERRUPTED = 1, 2, 75, 124, 130
_STATUS = {
    "INVALID_ARGUMENT": USAGE,
    "RESOURCE_EXHAUSTED": TRY_AGAIN,
    "UNAVAILABLE": TRY_AGAIN,
    "DEADLINE_EXCEEDED": TIMED_OUT,
}

EXIT_HELP = (
    "Exit status: 0 done, 1 failed, 2 bad usage or INVALID_ARGUMENT, 75 try again later (RESOURCE_EXHAUSTED, "
    "UNAVAILABLE), 124 the deadline passed, 130 Ctrl-C."
)


def exit_status(error: BatonError) -> int:
    """The exit status for an error."""
    return _STATUS.get(error.grpc_status, FAILED)


def describe(error: BatonError) -> str:
    """Status and message of an error, and the time until a retry if the error has it."""
    after = error.retry_after if isinstance(error, Overloaded) else None
    again = "" if after is None else f" (try again in {after:.3g} s)"
    return f"{error.grpc_status}: {error}{again}"


@contextmanager
def extra_installed(extra: str) -> Iterator[None]:
    """If a module is missing, name the extra of the package that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing; in the checkout: pip install '.[{extra}]'") from None


def fail(error: BatonError) -> NoReturn:
    """Print the error and end the process."""
    click.echo(f"error: {describe(error)}", err=True)
    sys.exit(exit_status(error))


_ANY_WIDTH = 1 << 20


def output() -> Console:
    """Standard output."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # Each row is one line, however long, so that grep finds it.
        console.width = _ANY_WIDTH
    return console


def table(columns: Sequence[str], numbers: Collection[str]) -> Table:
    """An empty table; the columns in `numbers` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def size(count: float) -> str:
    """A number of bytes with its unit, for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
