"""Settings, each declared once as a field of a frozen dataclass; flags, variables, help and checks follow from it.

options          read it first: `option` and `Settings`, and how click turns them into flags
worker, router   the settings of each kind of process
roles            the classes by role; `command` and `load` fill them from flags and BATON_* variables
watched          files of settings that may be replaced while a process runs
values           how addresses, sizes and lists of cores are written

The package itself imports only `values`, so that clients do not import click.
"""

from baton.config.values import is_loopback, parse_address, parse_bytes

__all__ = ["is_loopback", "parse_address", "parse_bytes"]
