"""`baton plan`: what a model needs and what a machine can reach, by arithmetic. The formulas are in `baton.planner`."""

from __future__ import annotations

import click

from baton.cli.plan.memory import memory
from baton.cli.plan.parallel import parallel
from baton.cli.plan.roofline import roofline


@click.group()
def plan() -> None:
    """Compute what a model needs, and what a machine can reach."""


for _command in (memory, roofline, parallel):
    plan.add_command(_command)
