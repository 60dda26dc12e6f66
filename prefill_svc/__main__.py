"""`python -m prefill_svc`: one prefill worker, from flags and environment."""

from __future__ import annotations

import asyncio
import sys

from baton.config import load
from baton.errors import BatonError
from baton.telemetry.logs import configure
from baton.worker.process import serve
from prefill_svc.app import run
from prefill_svc.config import PrefillConfig


def main() -> int:
    """Run until a signal; the exit status: 0 after a drain, 1 when the worker failed, 2 for bad settings."""
    try:
        config = load(PrefillConfig, "python -m prefill_svc")
        configure(config.log_level, "prefill", config.worker_id)
        return asyncio.run(serve(run(config), "prefill"))
    except BatonError as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
