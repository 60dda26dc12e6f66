"""`python -m decode_svc`: one decode worker, from flags and environment."""

from __future__ import annotations

import asyncio
import sys

from baton.config import load
from baton.errors import BatonError
from baton.telemetry.logs import configure
from baton.worker.process import serve
from decode_svc.config import DecodeConfig


def main() -> int:
    """Run until a signal; the exit status: 0 after a drain, 1 when the worker failed, 2 for bad settings."""
    try:
        config = load(DecodeConfig, "python -m decode_svc")
        configure(config.log_level, "decode", config.worker_id)
        # Only now, so that --help and bad settings are answered before torch is loaded.
        from decode_svc.app import run

        return asyncio.run(serve(run(config), "decode"))
    except ModuleNotFoundError as error:
        print(f"decode: {error.name} is not installed; a worker needs baton[worker]", file=sys.stderr)
        return 2
    except BatonError as error:
        print(f"decode: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
