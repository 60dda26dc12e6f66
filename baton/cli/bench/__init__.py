"""`baton bench`: measurements. What they compute lives in `baton.bench`, and is loaded when a command runs."""

from __future__ import annotations

import sys
from typing import Any

import click

from baton.cli.bench.engine import engine
from baton.cli.bench.plot import plot
from baton.cli.bench.router import router
from baton.cli.bench.serve import serve
from baton.cli.bench.transfer import transfer
from baton.cli.failures import INTERRUPTED


class _BenchGroup(click.Group):
    """Commands for which a Ctrl-C before there is anything to report has its status too."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure servers, engines and links."""


for _command in (engine, router, serve, transfer, plot):
    bench.add_command(_command)
