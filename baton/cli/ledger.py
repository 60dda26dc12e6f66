"""`baton ledger`: the owners of memory in some processes, and a check of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console

from baton.cli.options import DEFAULT_GRPC, EXIT_HELP, connection, size, table
from baton.cli.reach import Survey, addresses, survey_options
from baton.ledger import Ledger, LedgerEntry

_COLUMNS = ("owner", "kind", "state", "pages", "bytes", "age", "deadline", "tenant", "detail")
_NUMBERS = ("pages", "bytes", "age", "deadline")


@click.command(epilog=f"{EXIT_HELP} If a sum is wrong, or processes fail in different ways, it is 1.")
@survey_options("Routers, and control listeners of workers", DEFAULT_GRPC)
def ledger(targets: Sequence[list[str]], timeout: float, as_list: bool, **flags: Any) -> None:
    """List every owner of KV memory or of a request; fails if a sum is wrong or a process does not answer.

    With TLS, workers need an admin certificate (--cert, --key), and routers need an admin API key.
    """
    found = Survey(addresses(targets), connection(flags), lambda client: client.ledger(timeout=timeout))
    for each in found.answers:
        if each.violation:
            found.add_failure(f"{each.role} {each.process}: {each.violation}")
    found.show(_print, as_list=as_list)
    found.end()


def _print(each: Ledger, console: Console) -> None:
    title = " ".join(filter(None, (each.role, each.process, each.incarnation)))
    console.print(title, style="bold", soft_wrap=True)
    if (ranks := each.tensor_parallel * each.pipeline_parallel) > 1:
        degrees = f"tensor parallel {each.tensor_parallel}, pipeline parallel {each.pipeline_parallel}"
        console.print(f"{ranks} ranks: {degrees}", soft_wrap=True)
    if each.entries:
        rows = table(_COLUMNS, _NUMBERS)
        for entry in each.entries:
            rows.add_row(*_row(entry))
        console.print(rows)
    total = sum(entry.bytes for entry in each.entries)
    count = f"{len(each.entries)} {'entry' if len(each.entries) == 1 else 'entries'}"
    pages = f", {each.pages_free} of {each.pages_total} pages free, {each.pages_cached} cached"
    console.print(f"{count}, {size(total)}{pages if each.pages_total else ''}", style="dim", soft_wrap=True)


def _row(entry: LedgerEntry) -> tuple[str, ...]:
    return (
        entry.owner,
        entry.kind,
        entry.state,
        str(entry.pages),
        size(entry.bytes),
        f"{entry.age_s:.1f} s",
        "" if entry.deadline_s is None else f"{entry.deadline_s:.1f} s",
        entry.tenant,
        entry.detail,
    )
