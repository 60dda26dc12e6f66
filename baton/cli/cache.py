"""`baton cache`: shows the contents of the prefix caches of a fleet, drops them, and fills the caches beforehand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.cli.generate import describe_cached, read_prompts
from baton.cli.options import (
    DEFAULT_GRPC,
    EXIT_HELP,
    FAILED,
    INTERRUPTED,
    Seconds,
    connection,
    connection_options,
    describe,
    exit_status,
    size,
    table,
)
from baton.cli.reach import Survey, addresses, survey_options
from baton.client import AsyncClient, Client
from baton.completion import Prompt
from baton.config.options import Address, usage_errors
from baton.errors import BatonError
from baton.ledger import CacheReport, CacheTier
from baton.request import Usage

_COLUMNS = ("tier", "blocks", "held", "capacity", "hits", "misses", "fetching", "state")
_NUMBERS = ("blocks", "held", "capacity", "hits", "misses", "fetching")
_DROPPED = ("tier", "blocks", "dropped", "state")
_PROGRESS_S = 1.0


@click.group()
def cache() -> None:
    """Show, drop and fill the prefix caches of a fleet."""


@cache.command(epilog=f"{EXIT_HELP} If processes fail in different ways, it is 1.")
@survey_options("Control listeners of workers, and routers", DEFAULT_GRPC)
def stats(targets: Sequence[list[str]], timeout: float, as_list: bool, **flags: Any) -> None:
    """Show the tiers of the prefix cache of each process.

    The tiers of a worker are its pool of pages, its host memory, and Redis, if used. A router has one: the index by
    which it places requests. With TLS, workers require an admin certificate (--cert, --key), and routers an admin API
    key.
    """
    found = Survey(addresses(targets), connection(flags), lambda client: client.cache(timeout=timeout))
    found.show(_print, as_list=as_list)
    found.end()


@cache.command(epilog=f"{EXIT_HELP} If processes fail in different ways, it is 1.")
@survey_options("Control listeners of workers", timeout="Seconds without an answer after which the command fails.")
@click.option("--redis", is_flag=True, help="Also drop all blocks of the fleet's KV format in Redis.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(targets: Sequence[list[str]], redis: bool, yes: bool, timeout: float, as_list: bool, **flags: Any) -> None:
    """Drop the cached KV of workers. Prompts are then slower for a while; nothing else changes.

    A full Redis takes a while to clear, so the progress is printed on stderr. Fails if a tier could not be dropped.
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


@dataclass(frozen=True, slots=True)
class WarmResult:
    """The result of one prompt: its usage or its error."""

    line: int
    usage: Usage | None = None
    error: BatonError | None = None

    def as_json(self) -> dict[str, Any]:
        usage = asdict(self.usage) if self.usage else None
        return {"line": self.line, "usage": usage, "error": describe(self.error) if self.error else None}

    def describe(self) -> str:
        if self.error is not None:
            return f"error: {describe(self.error)}"
        usage = self.usage or Usage(0, 0, 0)
        computed = usage.prompt_tokens - usage.cached_tokens
        return f"{usage.prompt_tokens} tokens, {computed} computed, {describe_cached(usage)}"


@cache.command(epilog=f"{EXIT_HELP} If prompts fail in different ways, it is 1.")
@click.option("--target", type=Address(), default=DEFAULT_GRPC, show_default=True, help="The router.")
@click.option("--model", default="", help="Name of the served model.  [default: the only one]")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    required=True,
    help='File with the prompt; .jsonl: one in each line, {"text": ...}, {"token_ids": [...]} or {"messages": [...]}.',
)
@click.option("--cache-salt", default="", help="Salt of the requests that will use the cached prompts.")
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="Number of prompts sent at a time."
)
@click.option("--timeout", type=Seconds(), help="Deadline of each prompt in seconds.")
@click.option("--json", "as_list", is_flag=True, help="Print a JSON list with an object for each prompt.")
@connection_options
def warm(
    target: str,
    model: str,
    prompt_file: Path,
    cache_salt: str,
    concurrency: int,
    timeout: float | None,
    as_list: bool,
    **flags: Any,
) -> None:
    """Compute and cache the KV of prompts, by a request for one output token each; fails if one of them fails.

    Only requests of the same tenant and with the same --cache-salt can use them.
    """
    prompts = read_prompts(prompt_file)
    settings = {"model": model, **connection(flags)}
    arguments = {"cache_salt": cache_salt, "timeout": timeout}
    try:
        done = asyncio.run(_warm(target, settings, prompts, arguments, concurrency, live=not as_list))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if as_list:
        click.echo(json.dumps([each.as_json() for each in done], ensure_ascii=False))
    statuses = {exit_status(each.error) for each in done if each.error}
    sys.exit(statuses.pop() if len(statuses) == 1 else FAILED if statuses else 0)


async def _warm(
    target: str,
    settings: Mapping[str, Any],
    prompts: Mapping[int, Prompt],
    arguments: Mapping[str, Any],
    concurrency: int,
    *,
    live: bool,
) -> list[WarmResult]:
    """Send all prompts; returns the results in the order of their lines. If `live`, prints each when it ends."""
    done: list[WarmResult] = []
    waiting = iter(prompts.items())

    async def work() -> None:
        for line, prompt in waiting:
            done.append(await _send(client, line, prompt, arguments))
            if live:
                click.echo(f"prompt {line}: {done[-1].describe()}", err=done[-1].error is not None)

    with usage_errors():
        client = AsyncClient(target, **settings)
    async with client:
        await asyncio.gather(*(work() for _ in range(min(concurrency, len(prompts)))))
    if live:
        click.echo(_total(done))
    return sorted(done, key=lambda each: each.line)


async def _send(client: AsyncClient, line: int, prompt: Prompt, arguments: Mapping[str, Any]) -> WarmResult:
    try:
        completion = await client.complete(prompt, max_tokens=1, temperature=0, **arguments)
    except BatonError as error:
        return WarmResult(line, error=error)
    return WarmResult(line, completion.usage)


def _total(done: list[WarmResult]) -> str:
    usages = [each.usage for each in done if each.usage]
    tokens, cached = sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
    failed = sum(1 for each in done if each.error)
    count = f"{len(done)} prompt{'' if len(done) == 1 else 's'}{f', {failed} failed' if failed else ''}"
    return f"{count}: {tokens} tokens, {tokens - cached} computed, {cached} cached"
