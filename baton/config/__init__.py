"""Settings: declared once, as fields of a frozen dataclass; flags, variables, help and checks follow from that.

options   read it first: `option` and `Settings`, of which classes are made, and what click makes of them
worker, prefill, decode, router    the settings of each kind of process
roles     the classes by role; `command` and `load` fill them from flags and BATON_* variables
values    how addresses and sizes are written; this alone is loaded with the package, so that clients load no click
"""

from baton.config.values import is_loopback, parse_address, parse_bytes

__all__ = ["is_loopback", "parse_address", "parse_bytes"]
