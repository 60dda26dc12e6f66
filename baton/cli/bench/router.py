"""`baton bench router`: the delay that the router adds to a token, and its tokens per second on one core."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from baton.cli.bench.ending import write_report
from baton.cli.options import ReportFile


@click.command()
@click.option(
    "--streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Streams in runs with light load."
)
@click.option(
    "--burst-streams",
    type=click.IntRange(1, 1024),
    default=256,
    show_default=True,
    help="Streams in the run with full load.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=1.0),
    default=30.0,
    show_default=True,
    help="Duration of a decode step in ms.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.5), default=3.0, show_default=True, help="Measured seconds of each run."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of rounds; medians are reported."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Number of router processes on one port.",
)
@click.option("--json", "file", type=ReportFile(), help="File for the results.")
def router(
    streams: int, burst_streams: int, step_ms: float, seconds: float, rounds: int, processes: int, file: Path | None
) -> None:
    """Measure a router between simulated workers and clients, which are real processes on this machine.

    With two cores or more, the router has one of its own. After Ctrl-C the report contains the complete
    rounds. Linux only.
    """
    if sys.platform != "linux":
        raise click.ClickException("it needs Linux: /proc, and one monotonic clock for all processes")
    from baton.bench.interrupts import last_report
    from baton.bench.router import RouterBench, measure
    from baton.errors import BatonError

    bench = RouterBench(streams, burst_streams, step_ms, seconds, rounds, processes)
    try:
        found = last_report(measure(bench, lambda what: click.echo(f"measuring: {what}", err=True)))
    except BatonError as error:
        raise click.ClickException(str(error)) from None
    write_report(found, file, _print)


def _print(found: dict[str, Any]) -> None:
    from baton.cli.tables import output, table

    few, slow, burst = found["few"], found["slow_client"], found["burst"]
    shown = table(["", "p50", "p99", "max"], ["p50", "p99", "max"])
    rows = (
        (f"emission to client, {few['streams']} streams, ms", few["through_ms"]),
        ("the same without a router, ms", few["direct_ms"]),
        ("added by the router, ms", few["added_ms"]),
        (f"one step's burst, {burst['streams']} streams, first to last, ms", burst["first_to_last_ms"]),
        ("one step's burst, emission to last, ms", burst["emission_to_last_ms"]),
        ("time between tokens, ms", slow["itl_alone_ms"]),
        ("the same beside a client that does not read, ms", slow["itl_beside_ms"]),
    )
    for name, shares in rows:
        shown.add_row(name, *(f"{shares[key]:.2f}" if key in shares else "" for key in ("p50", "p99", "p100")))
    out = output()
    out.print(shown)
    out.print(
        f"tokens a CPU second: {burst['tokens_per_cpu_s']:,.0f} at {burst['streams']} streams "
        f"({burst['messages_per_token']:.2f} messages a token), {few['tokens_per_cpu_s']:,.0f} at {few['streams']}; "
        f"router on cores {found['pinned']['router']}, the rest on {found['pinned']['workers_and_clients']}"
    )
