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
import subprocess
import sys
import tempfile
from pathlib import Path

from baton.bench import tiny
from baton.errors import Unavailable
from baton.launcher import bound_to_me

_TIMEOUT_S = 300.0
_WORDS = 1000


def step_overhead(model: Path, batch: int, context: int, steps: int, dtype: str) -> dict[str, float]:
    """`dispatch_ms` and `outside_forward_ms` of the checkpoint at `model`, medians over `steps` steps of `batch`.

    Raises Unavailable with what the process said if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="baton-tiny-") as folder:
        tiny.write(model, Path(folder))
        flags = [f"--batch={batch}", f"--context={context}", f"--steps={steps}", f"--dtype={dtype}"]
        command = bound_to_me([sys.executable, "-m", "decode_svc.overhead", folder, *flags])
        # A group of its own: a terminal's Ctrl-C is for the command, which ends it.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, process_group=0)
    if done.returncode:
        raise Unavailable(f"the step overhead can't be measured: {done.stderr[-_WORDS:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
