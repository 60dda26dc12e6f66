"""The end of a measurement: writes and shows the report; the exit status says whether it was interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from baton.cli.failures import INTERRUPTED


def write_report(report: dict[str, Any] | None, file: Path | None, show: Callable[[dict[str, Any]], object]) -> None:
    """Write the report of `baton.bench.interrupts.last_report` and show it; ends the process if it was interrupted.

    Raises KeyboardInterrupt if nothing was complete.
    """
    from baton.bench.results import write

    if report is None:
        raise KeyboardInterrupt
    failure = None
    if file is not None:
        try:
            write(file, report)
        except OSError as error:
            failure = click.ClickException(f"{str(file)!r} can't be written: {error.strerror}")
    # Shown even if it can't be written; otherwise a long measurement would be lost.
    show(report)
    if failure is not None:
        raise failure
    if report["interrupted"]:
        click.echo("interrupted: the report contains what was complete by then", err=True)
        sys.exit(INTERRUPTED)
