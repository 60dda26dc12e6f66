"""`python -m router`: one router, or several on one port, from flags and environment."""

from __future__ import annotations

import sys

from baton import freed_memory
from baton.config.router import RouterConfig
from baton.process import Running, main
from baton.telemetry.logs import configure
from router.app import run
from router.processes import run_several

_KEPT_BYTES = 64 << 20
"""Freed memory that the process keeps: several times what the longest request takes."""

_SWITCH_S = 0.001
"""How long the event loop waits for the interpreter's lock while a thread converts or hashes; by default it is 5 ms."""


def start(config: RouterConfig) -> Running:
    """The router, or those that `--processes` asks for, ready to be entered."""
    configure(config.log_level, "router")
    sys.setswitchinterval(_SWITCH_S)
    freed_memory.keep(_KEPT_BYTES)
    return run_several(config) if config.processes > 1 else run(config)


if __name__ == "__main__":
    main("router", "router", RouterConfig, start)
