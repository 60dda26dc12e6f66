"""Asks several processes of a fleet, each under the name in its certificate.

With --ca and no --server-name a target may be a router, whose certificate names its hosts, or a worker, whose
certificate names its role. Each name is tried in turn until one matches the certificate. An API key is for routers
only, so it is not sent to a process with the name of a worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import click
from rich.console import Console

from baton.cli.options import (
    FAILED,
    INTERRUPTED,
    AddressList,
    F,
    Seconds,
    connection_options,
    describe,
    exit_status,
    output,
)
from baton.client import Client
from baton.config.options import usage_errors
from baton.errors import BatonError, Unavailable
from baton.rpc.calls import OTHER_NAMES
from baton.rpc.tls import role_name

T = TypeVar("T")

_WORKERS = (role_name("prefill"), role_name("decode"))


def survey_options(
    who: str, default: str | None = None, timeout: str = "Seconds for each process."
) -> Callable[[F], F]:
    """Add the flags of a command that asks several processes; `who` names these in the help.

    Without a `default`, --target is required.
    """
    targets = {"required": True} if default is None else {"default": [default], "show_default": True}

    def add(command: F) -> F:
        for option in (
            connection_options,
            click.option("--json", "as_list", is_flag=True, help="Print a JSON list with an object for each process."),
            click.option("--timeout", type=Seconds(), default=5.0, help=timeout),
            click.option(
                "--target", "targets", type=AddressList(), multiple=True, help=f"{who}; may be given again.", **targets
            ),
        ):
            command = option(command)
        return command

    return add


def addresses(targets: Sequence[Sequence[str]]) -> list[str]:
    """All addresses in the values of --target."""
    return [address for each in targets for address in each]


class Survey(Generic[T]):
    """The answers of all processes that gave one, and the failures of the others."""

    def __init__(self, targets: Sequence[str], reach: dict[str, Any], question: Callable[[Client], T]) -> None:
        """Ask each of `targets`; `reach` are the client's settings. Ends the process at Ctrl-C."""
        self.answers: list[T] = []
        self._failures: list[str] = []
        self._statuses: set[int] = set()
        for target in targets:
            try:
                self.answers.append(ask(target, reach, question))
            except KeyboardInterrupt:
                sys.exit(INTERRUPTED)
            except BatonError as error:
                self.add_failure(f"{target}: {describe(error)}", exit_status(error))

    def add_failure(self, words: str, status: int = FAILED) -> None:
        """Add another failure."""
        self._failures.append(words)
        self._statuses.add(status)

    def show(self, one: Callable[[T, Console], None], *, as_list: bool) -> None:
        """Print all answers: as one JSON list, or each with `one`."""
        if as_list:
            answers: Sequence[Any] = self.answers
            click.echo(json.dumps([asdict(each) for each in answers], ensure_ascii=False))
            return
        console = output()
        for each in self.answers:
            one(each, console)

    def end(self) -> None:
        """Print the failures and end the process: with their exit status, or FAILED if they have different ones."""
        for fault in self._failures:
            click.echo(f"error: {fault}", err=True)
        sys.exit(self._statuses.pop() if len(self._statuses) == 1 else FAILED if self._statuses else 0)


def ask(target: str, reach: dict[str, Any], question: Callable[[Client], T]) -> T:
    """The answer of the process at `target`; tries each name that its certificate may have."""
    host = reach["server_name"]
    names = [host] if host or reach["ca"] is None else [None, role_name("router"), *_WORKERS]
    for name in names:
        # Workers must not get the key. A worker may run at an address where a router ran before.
        key = None if name in _WORKERS else reach["api_key"]
        with usage_errors():
            client = Client(target, **reach | {"server_name": name, "api_key": key})
        with client:
            try:
                return question(client)
            except Unavailable as error:
                if name == names[-1] or OTHER_NAMES not in str(error):
                    raise
    raise Unavailable(f"{target} was not called")
