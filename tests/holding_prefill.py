"""A prefill worker that a test can kill at a known point.

    python -m tests.holding_prefill MARKER TOKENS FLAGS...

is `python -m prefill_svc FLAGS...`, but before the first chunk that begins at token TOKENS or later it makes the file
MARKER, prints "holding TOKEN", and computes no more. If MARKER exists already, it goes on.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.config.worker import PrefillConfig
from baton.engine.contract import ForwardPass, PromptChunk
from baton.engine.core import EngineCore
from baton.process.service import main
from prefill_svc.__main__ import start


def hold(marker: Path, tokens: int) -> None:
    """Make the engine of this process hold there."""
    compute = EngineCore.launch

    def launch(self: EngineCore, chunks: Sequence[PromptChunk] = (), **rest: Any) -> ForwardPass:
        if chunks[0].start >= tokens:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                print("holding", chunks[0].start, flush=True)
                threading.Event().wait()
        return compute(self, chunks, **rest)

    EngineCore.launch = launch  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(Path(sys.argv[1]), int(sys.argv[2]))
    del sys.argv[1:3]
    main("prefill", "prefill_svc", PrefillConfig, start)
