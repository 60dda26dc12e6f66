"""`baton ledger`: who holds what in the processes named, and whether their sums are right.

With --ca and no --server-name a target may be a router, whose certificate names its hosts, or a worker, whose
certificate names its role: each name is asked for in turn until one is that of the certificate. An API key is for
routers, so no process that has shown another role gets it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from baton.cli.failures import EXIT_HELP, FAILED, INTERRUPTED, exit_status, in_words, usage_of_connection
from baton.cli.options import DEFAULT_GRPC, Addresses, Seconds, connection, connection_options
from baton.client import Client
from baton.errors import BatonError, Unavailable
from baton.ledger import Ledger, LedgerEntry
from baton.rpc.tls import role_name

_COLUMNS = ("owner", "kind", "state", "pages", "bytes", "age", "deadline", "tenant", "detail")
_NUMBERS = ("pages", "bytes", "age", "deadline")
_ANY_WIDTH = 1 << 20
_WORKERS = (role_name("prefill"), role_name("decode"))
_OTHER_NAME = "Hostname Verification Check failed"
"""In gRPC's message when the certificate is not that of the name asked for."""


@click.command(epilog=f"{EXIT_HELP} Where a sum is wrong, or processes fail in different ways, it is 1.")
@click.option(
    "--target",
    "targets",
    type=Addresses(),
    default=DEFAULT_GRPC,
    show_default=True,
    help="Routers, and control listeners of workers.",
)
@click.option("--timeout", type=Seconds(), default=5.0, help="Seconds for each process.")
@click.option("--json", "as_list", is_flag=True, help="Print a JSON list with an object for each process.")
@connection_options
def ledger(targets: list[str], timeout: float, as_list: bool, **flags: Any) -> None:
    """List every owner of KV memory or of a request; fails if some sum is wrong or a process is silent.

    With TLS, workers want the certificate of an admin (--cert, --key), routers the API key of one.
    """
    reach = connection(flags)
    found: list[Ledger] = []
    faults: list[str] = []
    statuses: set[int] = set()
    for target in targets:
        try:
            found.append(_ask(target, reach, timeout))
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BatonError as error:
            faults.append(f"{target}: {in_words(error)}")
            statuses.add(exit_status(error))
    if wrong := [f"{each.role} {each.process}: {each.violation}" for each in found if each.violation]:
        faults += wrong
        statuses.add(FAILED)
    if as_list:
        click.echo(json.dumps([asdict(each) for each in found], ensure_ascii=False))
    else:
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            # An owner has one line, however long, for grep to find.
            console.width = _ANY_WIDTH
        for each in found:
            _print(each, console)
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    sys.exit(statuses.pop() if len(statuses) == 1 else FAILED if statuses else 0)


def _ask(target: str, reach: dict[str, Any], timeout: float) -> Ledger:
    """The ledger of the process at `target`, under whichever of its names the certificate has."""
    host = reach["server_name"]
    names = [host] if host or reach["ca"] is None else [None, role_name("router"), *_WORKERS]
    for name in names:
        # Held back from workers, lest one that stands where a router did learns the key.
        key = None if name in _WORKERS else reach["api_key"]
        with usage_of_connection():
            client = Client(target, **reach | {"server_name": name, "api_key": key})
        with client:
            try:
                return client.ledger(timeout=timeout)
            except Unavailable as error:
                if name == names[-1] or _OTHER_NAME not in str(error):
                    raise _told(error, names) from None
    raise Unavailable(f"{target} was not asked")


def _told(error: Unavailable, names: Sequence[str | None]) -> Unavailable:
    if len(names) == 1 or _OTHER_NAME not in str(error):
        return error
    asked = ", ".join(name for name in names if name)
    return Unavailable(f"the certificate names neither the host nor any of {asked}; --server-name says what it names")


def _print(each: Ledger, console: Console) -> None:
    title = " ".join(filter(None, (each.role, each.process, each.incarnation)))
    console.print(title, style="bold", soft_wrap=True)
    if each.entries:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
        for entry in each.entries:
            table.add_row(*_row(entry))
        console.print(table)
    size = sum(entry.bytes for entry in each.entries)
    count = f"{len(each.entries)} {'entry' if len(each.entries) == 1 else 'entries'}"
    pages = f", {each.pages_free} of {each.pages_total} pages free, {each.pages_cached} cached"
    console.print(f"{count}, {_size(size)}{pages if each.pages_total else ''}", style="dim", soft_wrap=True)


def _row(entry: LedgerEntry) -> tuple[str, ...]:
    return (
        entry.owner,
        entry.kind,
        entry.state,
        str(entry.pages),
        _size(entry.bytes),
        f"{entry.age_s:.1f} s",
        "" if entry.deadline_s is None else f"{entry.deadline_s:.1f} s",
        entry.tenant,
        entry.detail,
    )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
