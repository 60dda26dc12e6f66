"""`baton ledger`: who holds what in the processes named, and whether their sums are right."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from baton.cli.options import DEFAULT_GRPC, Addresses, connection, connection_options
from baton.client import Client
from baton.errors import BatonError
from baton.ledger import Ledger, LedgerEntry

_COLUMNS = ("owner", "kind", "state", "pages", "bytes", "age", "deadline", "tenant", "detail")
_NUMBERS = ("pages", "bytes", "age", "deadline")


@click.command()
@click.option(
    "--target",
    "targets",
    type=Addresses(),
    default=DEFAULT_GRPC,
    show_default=True,
    help="Routers, and control listeners of workers.",
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=5.0, help="Seconds for each process.")
@click.option("--json", "as_list", is_flag=True, help="Print a JSON list with an object for each process.")
@connection_options
def ledger(targets: list[str], timeout: float, as_list: bool, **flags: Any) -> None:
    """List every owner of KV memory or of a request; ends with 1 if some sum is wrong or a process is silent."""
    reach = connection(flags)
    found: list[Ledger] = []
    faults: list[str] = []
    for target in targets:
        try:
            with Client(target, **reach) as client:
                found.append(client.ledger(timeout=timeout))
        except BatonError as error:
            faults.append(f"{target}: {error.grpc_status}: {error}")
    faults += (f"{each.role} {each.process}: {each.violation}" for each in found if each.violation)
    if as_list:
        click.echo(json.dumps([asdict(each) for each in found], ensure_ascii=False))
    else:
        console = Console(highlight=False, markup=False)
        for each in found:
            _print(each, console)
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    sys.exit(1 if faults else 0)


def _print(each: Ledger, console: Console) -> None:
    console.print(" ".join(filter(None, (each.role, each.process, each.incarnation))), style="bold")
    if each.entries:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
        for entry in each.entries:
            table.add_row(*_row(entry))
        console.print(table)
    size = sum(entry.bytes for entry in each.entries)
    pages = f", {each.pages_free} of {each.pages_total} pages free, {each.pages_cached} cached"
    console.print(
        f"{len(each.entries)} entries, {_size(size)}{pages if each.pages_total else ''}", style="dim", soft_wrap=True
    )


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
