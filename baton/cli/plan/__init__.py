"""`baton plan`: what a model needs and what a machine can reach, by arithmetic. The formulas are in `baton.planner`."""

from __future__ import annotations

import click

from baton.cli.plan.memory import memory


@click.group()
def plan() -> None:
    """Compute what a model needs, and what a machine can reach."""


for _command in (memory,):
    plan.add_command(_command)
