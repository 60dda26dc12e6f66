"""`python -m router`: one router, from flags and environment."""

from __future__ import annotations

import sys

from baton.process import Running, main
from baton.telemetry.logs import configure
from router.app import run
from router.config import RouterConfig


def start(config: RouterConfig) -> Running:
    """The router, ready to be entered."""
    configure(config.log_level, "router")
    return run(config)


if __name__ == "__main__":
    sys.exit(main("router", "router", RouterConfig, start))
