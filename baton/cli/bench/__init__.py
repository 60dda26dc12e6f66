"""`baton bench`: measurements. What they compute lives in `baton.bench`, and is loaded when a command runs."""

from __future__ import annotations

import click

from baton.cli.bench.engine import engine
from baton.cli.bench.plot import plot
from baton.cli.bench.router import router
from baton.cli.bench.serve import serve
from baton.cli.bench.transfer import transfer


@click.group()
def bench() -> None:
    """Measure servers, engines and links."""


for _command in (engine, router, serve, transfer, plot):
    bench.add_command(_command)
