"""`baton cache`: what the prefix caches of a fleet hold, dropping it, and filling them beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import click
from rich.console import Console

from baton.cli.options import DEFAULT_GRPC, EXIT_HELP, connection, size, table
from baton.cli.reach import Survey, addresses, survey_options
from baton.cli.warm import warm
from baton.client import Client
from baton.ledger import CacheReport, CacheTier

_COLUMNS = ("tier", "blocks", "held", "capacity", "hits", "misses", "fetching", "state")
_NUMBERS = ("blocks", "held", "capacity", "hits", "misses", "fetching")
_DROPPED = ("tier", "blocks", "dropped", "state")
_PROGRESS_S = 1.0


@click.group()
def cache() -> None:
    """Look at, drop and fill the prefix caches of a fleet."""


@cache.command(epilog=f"{EXIT_HELP} If processes fail in different ways, it is 1.")
@survey_options("Control listeners of workers, and routers", DEFAULT_GRPC)
def stats(targets: Sequence[list[str]], timeout: float, as_list: bool, **flags: Any) -> None:
    """Show the tiers of the prefix cache of each process.

    A worker has its pool of pages, its host memory, and Redis, if it uses it; a router the index by which it places
    requests. With TLS, workers want the certificate of an admin (--cert, --key), routers the API key of one.
    """
    found = Survey(addresses(targets), connection(flags), lambda client: client.cache(timeout=timeout))
    found.show(_print, as_list=as_list)
    found.end()


@cache.command(epilog=f"{EXIT_HELP} If processes fail in different ways, it is 1.")
@survey_options("Control listeners of workers", timeout="Seconds without an answer after which the command fails.")
@click.option("--redis", is_flag=True, help="Also drop what is in Redis: all blocks of the fleet's KV format.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(targets: Sequence[list[str]], redis: bool, yes: bool, timeout: float, as_list: bool, **flags: Any) -> None:
    """Drop the cached KV of workers; prompts are then slower for a while, but nothing else changes.

    A full Redis takes a while to clear, so the progress is printed on stderr. Fails if something could not be dropped.
    """
    told = addresses(targets)
    if not yes:
        what = f"{', '.join(told)}{' and all of its kind in Redis' if redis else ''}"
        click.confirm(f"Drop the cached KV of {what}?", abort=True, err=True)
    found = Survey(told, connection(flags), partial(_clear, redis=redis, timeout=timeout))
    found.show(_print_dropped, as_list=as_list)
    for each in found.answers:
        for tier in each.tiers:
            if tier.state:
                found.add_failure(f"{each.role} {each.process}: {tier.name}: {tier.state}")
    found.end()


cache.add_command(warm)


def _clear(client: Client, *, redis: bool, timeout: float) -> CacheReport:
    """Clear one process and report what was dropped; waits as long as the process reports progress."""
    who = client.cache(timeout=timeout)
    with ThreadPoolExecutor(1) as beside:
        clearing = beside.submit(client.clear_cache, redis=redis)
        try:
            while not wait((clearing,), _PROGRESS_S).done:
                for tier in client.cache(timeout=timeout).tiers:
                    if tier.state:
                        click.echo(f"{who.role} {who.process}: {tier.name}: {tier.state}", err=True)
        except BaseException:
            client.close()  # this ends the call in the other thread
            raise
        return CacheReport(who.process, who.role, clearing.result())


def _print(each: CacheReport, console: Console) -> None:
    console.print(f"{each.role} {each.process}", style="bold", soft_wrap=True)
    rows = table(_COLUMNS, _NUMBERS)
    for tier in each.tiers:
        rows.add_row(*_row(tier))
    console.print(rows)


def _row(tier: CacheTier) -> tuple[str, ...]:
    return (
        tier.name,
        str(tier.blocks),
        size(tier.bytes),
        size(tier.capacity_bytes) if tier.capacity_bytes else "",
        str(tier.hits),
        str(tier.misses),
        f"{size(tier.bytes_per_second)}/s" if tier.bytes_per_second else "",
        tier.state,
    )


def _print_dropped(each: CacheReport, console: Console) -> None:
    console.print(f"{each.role} {each.process}", style="bold", soft_wrap=True)
    rows = table(_DROPPED, (*_NUMBERS, "dropped"))
    for tier in each.tiers:
        rows.add_row(tier.name, str(tier.blocks), size(tier.bytes), tier.state)
    console.print(rows)
