"""`baton bench transfer`: how fast KV moves between two processes, compared with raw TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from baton.cli.bench.ending import write_report
from baton.cli.failures import extra_installed
from baton.cli.options import ReportFile


@click.command()
@click.option("--tokens", type=click.IntRange(64, 65536), default=4096, show_default=True, help="Tokens in a sequence.")
@click.option(
    "--streams",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    help="Number of sequences fetched at a time; may be given several times.",
)
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=7, show_default=True, help="Number of measurements of each kind."
)
@click.option("--json", "file", type=ReportFile(), help="File for the results.")
def transfer(tokens: int, streams: tuple[int, ...], repeats: int, file: Path | None) -> None:
    """Measure FetchKv, with checksums and into paged KV, against raw TCP over loopback.

    No model is needed: the KV has the shapes of known models, and random content. After Ctrl-C the report contains what
    is complete.
    """
    from baton.bench.interrupts import last_report
    from baton.bench.results import Provenance
    from baton.errors import BatonError

    try:
        with extra_installed("worker"):
            from baton.bench.transfer import measure

            about = Provenance()
            found = last_report(measure(streams=streams, tokens=tokens, repeats=repeats))
    except BatonError as error:
        raise click.ClickException(str(error)) from None
    write_report(None if found is None else {**about.report(), **found}, file, _print)


def _print(found: dict[str, Any]) -> None:
    from baton.cli.tables import output, table

    columns = ("streams", "FetchKv GB/s", "raw TCP GB/s", "ratio", "FetchKv CPU s/GB", "raw TCP CPU s/GB")
    out = output()
    for shape, measured in found["shapes"].items():
        shown = table(columns, columns)
        for streams, run in measured["streams"].items():
            fetch, raw = run["fetch_kv"], run["raw_tcp"]
            shown.add_row(
                streams,
                f"{fetch['gb_per_s']:.2f}",
                f"{raw['gb_per_s']:.2f}",
                f"{run['ratio']:.2f}",
                f"{_cpu(fetch):.2f}",
                f"{_cpu(raw):.2f}",
            )
        out.print(f"{shape}, {measured['bytes_a_stream'] / 1e6:.0f} MB a stream")
        out.print(shown)


def _cpu(run: dict[str, float]) -> float:
    """Of both ends."""
    return run["sender_cpu_s_per_gb"] + run["receiver_cpu_s_per_gb"]
