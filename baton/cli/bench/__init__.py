"""`baton bench`: measurements. The code is in `baton.bench`, and is imported when a command runs."""

from __future__ import annotations

import sys
from typing import Any

import click

from baton.cli.bench.engine import engine
from baton.cli.bench.serve import serve
from baton.cli.options import INTERRUPTED


class _BenchGroup(click.Group):
    """Commands that exit with the status of an interrupt if Ctrl-C comes before the first result."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure servers and engines."""


for _command in (engine, serve):
    bench.add_command(_command)
