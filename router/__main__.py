"""`python -m router`: one router, from flags and environment."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from baton.config import load
from baton.errors import BatonError
from baton.telemetry.logs import configure
from router.app import run
from router.config import RouterConfig

_logger = logging.getLogger(__name__)


async def serve(config: RouterConfig) -> int:
    """Run until SIGTERM or SIGINT, then drain; a second signal cuts the drain short."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number.name)
    async with run(config) as app:
        line = f"listening grpc={app.address} ops={app.ops_address}"
        _logger.info("%s", line)
        print(line, flush=True)
        _logger.info("draining after %s", await signals.get())
        draining, again = asyncio.ensure_future(app.drain()), asyncio.ensure_future(signals.get())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        again.cancel()
        await asyncio.gather(draining, again, return_exceptions=True)
    return 0


def main() -> int:
    """The exit status: 0 after a drain, 2 for bad settings."""
    try:
        config = load(RouterConfig, "python -m router")
        configure(config.log_level, "router")
        return asyncio.run(serve(config))
    except BatonError as error:
        print(f"router: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
