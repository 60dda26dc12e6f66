"""`baton doctor`: the versions on this machine, and the kernels that a worker runs on its CPU."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from importlib.metadata import version

import click

from baton.bench.machine import machine
from baton.config.options import click_option, usage_errors
from baton.config.worker import WorkerConfig
from baton.native.build import NoCompiler, find_compiler
from baton.native.library import select_kernels
from baton.process import cores

_KERNELS = next(field for field in dataclasses.fields(WorkerConfig) if field.name == "kernels")


@click.command(params=[click_option(_KERNELS)])
def doctor(kernels: str) -> None:
    """Show installed versions and the kernels of workers on this CPU, with the reason if they are torch's.

    Fails if --kernels demands the native ones and they can't be used.
    """
    with usage_errors():
        chosen = select_kernels(kernels)
    found = machine()
    rows = {
        "baton": version("baton"),
        "python": f"{found['python']} ({sys.executable})",
        "torch": found["torch"] or "not installed; only workers need it; in the checkout: pip install '.[worker]'",
        "processor": found["processor"],
        "cores": f"{cores.usable()} of {found['cores']}",
        "compiler": _compiler(),
        "kernels": str(chosen),
    }
    for name, value in rows.items():
        click.echo(f"{name:<10} {value}")


def _compiler() -> str:
    try:
        return shlex.join(find_compiler())
    except NoCompiler as error:
        return f"{error}; only building the native kernels needs one"
