"""`baton bench plot`: reports of `baton bench serve` as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

_KINDS = ("latency", "itl")


@click.command()
@click.argument("reports", nargs=-1, required=True, metavar="[NAME=]REPORT...")
@click.option("--to", "file", required=True, type=click.Path(path_type=Path), help="Picture: .png, .svg or .pdf.")
@click.option(
    "--kind",
    type=click.Choice(_KINDS),
    default="latency",
    help="Latency against load, or ITL over time.  [default: latency]",
)
def plot(reports: tuple[str, ...], file: Path, kind: str) -> None:
    """Draw REPORTs, JSON files of baton bench serve, into one picture; NAME stands for the target in it."""
    from baton.bench.load.plots import PlotError, itl_over_time, latency_against_load

    draw = latency_against_load if kind == "latency" else itl_over_time
    try:
        draw([each for text in reports for each in _read(text)], file)
    except PlotError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'baton[bench]'") from None
    except (KeyError, TypeError, ValueError) as error:
        raise click.ClickException(f"the reports are not those of baton bench serve: {error!r}") from None


def _read(text: str) -> list[dict[str, Any]]:
    """The reports of a file, which has one or a list of them."""
    name, _, path = text.rpartition("=")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path!r} can't be read: {error}", param_hint="'REPORT'") from None
    reports = found if isinstance(found, list) else [found]
    if not reports or not all(isinstance(each, dict) and "workload" in each for each in reports):
        raise click.BadParameter(f"{path!r} is no report of baton bench serve", param_hint="'REPORT'")
    return [{**each, "target": name} for each in reports] if name else reports
