"""`python -m prefill_svc`: one prefill worker, from flags and environment."""

from __future__ import annotations

import asyncio
import sys

from baton.config import load
from baton.errors import BatonError
from baton.telemetry.logs import configure
from baton.worker.process import serve
from prefill_svc.config import PrefillConfig


def main() -> int:
    """Run until a signal; the exit status: 0 after a drain, 1 when the worker failed, 2 for bad settings."""
    try:
        config = load(PrefillConfig, "python -m prefill_svc")
        configure(config.log_level, "prefill", config.worker_id)
        # Only now, so that --help and bad settings are answered before torch is loaded.
        from prefill_svc.app import run

        return asyncio.run(serve(run(config), "prefill"))
    except ModuleNotFoundError as error:
        print(f"prefill: {error.name} is not installed; a worker needs baton[worker]", file=sys.stderr)
        return 2
    except BatonError as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
