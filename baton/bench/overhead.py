"""What a decode step costs beside its arithmetic, in a process of its own, without a profiler.

The worker's own loop (`decode_svc.overhead`) decodes a batch of a checkpoint with the layers and operators of the one
that is measured, and tensors of next to nothing (`baton.bench.tiny`), on one thread:

    dispatch_ms          CPU time of its forward pass: Python, torch's dispatcher, and what kernels take whatever their
                         size. An upper bound of what dispatch adds to a step.
    outside_forward_ms   from the end of a forward pass to the begin of the next: logits and sampling at that width,
                         tokens read back, the loop's turn, messages to a router made and serialised.

The two follow each other, so a step's overhead is their sum.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from baton.bench import tiny
from baton.bench.children import child

_TIMEOUT_S = 300.0


def step_overhead(model: Path, batch: int, context: int, steps: int, dtype: str) -> dict[str, float]:
    """`dispatch_ms` and `outside_forward_ms` of the checkpoint at `model`, medians over `steps` steps of `batch`.

    Raises ChildFailed with what the process said if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="baton-tiny-") as folder:
        tiny.write(model, Path(folder))
        flags = [f"--batch={batch}", f"--context={context}", f"--steps={steps}", f"--dtype={dtype}"]
        with child([sys.executable, "-m", "decode_svc.overhead", folder, *flags], name="the step overhead") as process:
            found: dict[str, float] = json.loads(process.finish(_TIMEOUT_S).splitlines()[-1])
    return found
