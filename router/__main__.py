"""`python -m router`: one router, or several on one port, from flags and environment."""

from __future__ import annotations

from baton.config.router import RouterConfig
from baton.process.service import Running, main
from baton.telemetry.logs import configure
from router.app import run
from router.processes import prepare, run_router_processes


def start(config: RouterConfig) -> Running:
    """One router, or several for `--processes`, as an async context manager."""
    configure(config.log_level, "router", log_format=config.log_format)
    prepare()
    return run_router_processes(config) if config.processes > 1 else run(config)


if __name__ == "__main__":
    main("router", "router", RouterConfig, start)
