"""`baton key`: API keys for clients. The file holds their hashes only; a key is shown once, when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    help="File of API keys, the same as the router's --api-keys.",
)


@click.group()
def key() -> None:
    """Make, list, change and remove API keys; routers read the file again when it changes."""


@key.command()
@_file
@click.option("--tenant", required=True, metavar="NAME", help="Tenant that the key is for: letters, digits and ._-")
@click.option(
    "--max-streams",
    type=click.IntRange(min=1),
    help="Largest number of Generate, Tokenize and Detokenize calls at a time.",
)
@click.option("--admin", is_flag=True, help="Let the key make admin calls, such as those of baton ledger.")
def new(path: Path, tenant: str, max_streams: int | None, admin: bool) -> None:
    """Make a key, print it, and add its hash to the file."""
    with _refusals():
        before = {entry.max_streams for entry in keys.read(path) if entry.tenant == tenant}
        if max_streams is not None and before - {max_streams}:
            raise ConfigError(
                f"--max-streams: other keys of {tenant} have another limit; baton key set --file {path} "
                f"--tenant {tenant} --max-streams {max_streams} changes it for all"
            )
        made = keys.add(path, tenant=tenant, max_streams=max_streams, admin=admin)
    click.echo(made)
    click.echo("This is the only time that the key is shown.", err=True)


@key.command()
@_file
@click.option("--tenant", default="", metavar="NAME", help="Remove all keys of this tenant.")
@click.option("--id", "sha256", default="", metavar="HEX", help="Remove the key whose listed sha256 begins with this.")
def remove(path: Path, tenant: str, sha256: str) -> None:
    """Remove keys. New calls with them are refused; open streams go on."""
    if bool(tenant) == bool(sha256):
        raise click.UsageError("give one of --tenant and --id")
    with _refusals():
        count = keys.remove(path, tenant=tenant, sha256=sha256.lower().rstrip("…"))
    click.echo(f"removed {_count(count)}", err=True)


@key.command(name="set")
@_file
@click.option("--tenant", required=True, metavar="NAME", help="Tenant whose limit to change.")
@click.option(
    "--max-streams",
    type=click.IntRange(min=1),
    help="Largest number of Generate, Tokenize and Detokenize calls at a time.",
)
@click.option("--no-limit", is_flag=True, help="Remove the limit.")
def set_(path: Path, tenant: str, max_streams: int | None, no_limit: bool) -> None:
    """Change the limit of a tenant, which all its keys share."""
    if (max_streams is None) != no_limit:
        raise click.UsageError("give one of --max-streams and --no-limit")
    with _refusals():
        count = keys.limit(path, tenant=tenant, max_streams=max_streams)
    click.echo(f"changed {_count(count)}", err=True)


@key.command(name="list")
@_file
def list_(path: Path) -> None:
    """List the keys of the file by tenant."""
    if not path.exists():
        raise click.ClickException(f"{str(path)!r} does not exist")
    with _refusals():
        entries = keys.read(path)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("tenant", "max streams", "admin", "sha256"):
        table.add_column(name)
    for entry in sorted(entries, key=lambda entry: entry.tenant):
        limit = "-" if entry.max_streams is None else str(entry.max_streams)
        table.add_row(entry.tenant, limit, "yes" if entry.admin else "-", f"{entry.sha256.hex()[:_SHOWN]}…")
    Console(highlight=False).print(table)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


def _count(count: int) -> str:
    return f"{count} {'key' if count == 1 else 'keys'}"
