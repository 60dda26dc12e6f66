"""Baton's engine as a runner: CHECKPOINT [--threads N] [--small]."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.metadata import version
from typing import Any

from protocol import Command, serve

PREFILL_LENGTHS, BATCHES, CONTEXTS, STEPS = (8192,), (1, 8, 32), (128, 288, 1024), 64


def load(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Command]]:
    """Build the engine; commands: prefill, decode, passes, and probe, which tells what the machine gives."""
    from baton.engine.process import pin_compute_threads, prepare

    # Before torch is loaded, as in a worker's process.
    prepare(f"0-{arguments.threads - 1}")
    import torch

    from baton.bench.engine import EnginePlan, EngineRuns, engine_for
    from baton.bench.probes import Probes
    from baton.engine.config import EngineConfig
    from baton.engine.factory import kernels_for
    from baton.model.config import ModelConfig
    from baton.planner.shape import ModelShape

    plan = (
        EnginePlan((64,), (1, 2), (16,), steps=4)
        if arguments.small
        else EnginePlan(PREFILL_LENGTHS, BATCHES, CONTEXTS, steps=STEPS)
    )
    config = EngineConfig(arguments.model, device="cpu", threads=arguments.threads)
    engine = engine_for(plan, config)
    pin_compute_threads()
    runs = EngineRuns(engine)
    dtype = getattr(torch, engine.spec.kv_format.parts[0].dtype)
    shape = ModelShape.of(ModelConfig.from_pretrained(arguments.model))
    sizes = {"buffer_bytes": 1 << 20, "square": 64} if arguments.small else {}
    cpu = torch.device("cpu")
    probes = Probes(shape, dtype, cpu, library=kernels_for(config.kernels, cpu).library, **sizes)

    def prefill(tokens: int) -> dict[str, Any]:
        return {"seconds": runs.prefill(tokens)}

    def decode(batch: int, context: int, steps: int) -> dict[str, Any]:
        return {"seconds": runs.decode(batch, context, steps)}

    def passes(steps: list[int], tokens: list[int], context: int) -> dict[str, Any]:
        """Seconds of passes over each number of steps and of prompt tokens, as [steps, tokens, seconds]."""
        found = []
        for batch in steps:
            with runs.batch(batch, context, 4 * len(tokens)):
                found += [[batch, each, runs.mixed([each] if each else [], max(tokens))] for each in tokens]
        return {"passes": found}

    def probe() -> dict[str, Any]:
        return probes.state()

    about = {"version": version("baton"), "dtype": str(dtype).removeprefix("torch.")}
    return about, {"prefill": prefill, "decode": decode, "passes": passes, "probe": probe}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="small sizes, for checkpoints of tests")
    serve(partial(load, parser.parse_args()))
