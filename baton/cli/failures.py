"""Failures of client commands: one line on standard error, and an exit status that scripts can tell apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from baton.errors import BatonError, Overloaded

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
    """Status and message of an error, and when to retry if the error says so."""
    after = error.retry_after if isinstance(error, Overloaded) else None
    again = "" if after is None else f" (try again in {after:.3g} s)"
    return f"{error.grpc_status}: {error}{again}"


@contextmanager
def extra_installed(extra: str) -> Iterator[None]:
    """If a module is missing, say which extra of the package has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'baton[{extra}]'") from None


def fail(error: BatonError) -> NoReturn:
    """Print what failed and end the process."""
    click.echo(f"error: {describe(error)}", err=True)
    sys.exit(exit_status(error))
