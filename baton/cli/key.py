"""`baton key`: API keys for clients. The file holds their hashes only; a key is shown once, when it is made."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from baton import keys
from baton.errors import ConfigError

_SHOWN = 16
"""Hex digits of a hash that are listed."""

_file = click.option(
    "--file",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that the router's --api-keys names.",
)


@click.group()
def key() -> None:
    """Make and list API keys; routers read the file again when it changes."""


@key.command()
@_file
@click.option("--tenant", required=True, metavar="NAME", help="Whom the key is for: letters, digits and ._-")
@click.option("--max-streams", type=click.IntRange(min=1), help="Streams the tenant may have open at a time.")
@click.option("--admin", is_flag=True, help="Let the key make admin calls, such as those of baton ledger.")
def new(path: Path, tenant: str, max_streams: int | None, admin: bool) -> None:
    """Make a key, print it, and add its hash to the file."""
    try:
        made = keys.add(path, tenant=tenant, max_streams=max_streams, admin=admin)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    click.echo(made)
    click.echo("This is the only time that the key is shown.", err=True)


@key.command(name="list")
@_file
def list_(path: Path) -> None:
    """List the keys of the file by tenant."""
    if not path.exists():
        raise click.ClickException(f"{str(path)!r} is not there")
    try:
        entries = keys.read(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tenant", "max streams", "admin", "sha256"):
        table.add_column(name)
    for entry in sorted(entries, key=lambda entry: entry.tenant):
        limit = "-" if entry.max_streams is None else str(entry.max_streams)
        table.add_row(entry.tenant, limit, "yes" if entry.admin else "-", f"{entry.sha256.hex()[:_SHOWN]}…")
    Console(highlight=False).print(table)
