"""An engine of two ranks compared with one process of two threads, in turns; writes bench/results/ranks.json.

    python -m bench.ranks CHECKPOINT [--rounds 5]

Three engines over the same checkpoint: one process with two threads, two tensor-parallel ranks and two pipeline stages
with a thread each. Each round measures prefill of 512 and of 2,048 tokens and steps of 8 and of 32 sequences on one
engine after the other. A ratio is the time of one process divided by that of the ranks, in the same round. `waited` is
the part of the time in which the leader waited for the other rank. A round during which the host took more than 2% of
the CPU time is measured again, at most as often as there are rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.bench.engine import EngineRuns
from baton.bench.machine import stolen_s
from baton.engine.config import EngineConfig
from baton.engine.factory import build
from baton.process import cores
from baton.telemetry.metrics import RANK_WAIT_SECONDS
from bench.common import save

DEGREES = {"one process": (1, 1, 2), "tensor parallel 2": (2, 1, 1), "pipeline parallel 2": (1, 2, 1)}
"""Ranks that share each layer, stages, and threads of each."""

CONTEXT, STEPS, STOLEN = 128, 12, 0.02


class MeasuredEngine:
    """An engine on a thread of its own, as a worker has it."""

    def __init__(self, checkpoint: str, tensor: int, pipeline: int, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._runs = self._thread.submit(self._build, checkpoint, tensor, pipeline, threads).result()

    @staticmethod
    def _build(checkpoint: str, tensor: int, pipeline: int, threads: int) -> EngineRuns:
        config = EngineConfig(
            checkpoint,
            threads=threads,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            slots=32,
            kv_memory=700 << 20,
            max_model_len=4096,
        )
        if config.ranks > 1:
            os.sched_setaffinity(0, cores.share(0, config.ranks, threads, tuple(os.sched_getaffinity(0))))
        return EngineRuns(build(config), 2048)

    def measure(self) -> dict[str, tuple[float, float]]:
        """Seconds of each run, and the seconds of them in which the leader waited."""
        runs: dict[str, Callable[[], float]] = {
            "prefill 512": lambda: self._runs.prefill(512),
            "prefill 2048": lambda: self._runs.prefill(2048),
            "step of 8": lambda: self._runs.decode(8, CONTEXT, STEPS) / STEPS,
            "step of 32": lambda: self._runs.decode(32, CONTEXT, STEPS) / STEPS,
        }
        found = {}
        for name, run in runs.items():
            before, began = _waited_s(), time.perf_counter()
            seconds = self._thread.submit(run).result()
            share = (_waited_s() - before) / (time.perf_counter() - began)
            found[name] = seconds, share * seconds
        return found


def _waited_s() -> float:
    return sum(
        sample.value for metric in RANK_WAIT_SECONDS.collect() for sample in metric.samples if "_total" in sample.name
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    engines = {name: MeasuredEngine(given.checkpoint, *degrees) for name, degrees in DEGREES.items()}
    rounds: list[dict[str, dict[str, tuple[float, float]]]] = []
    disturbed = 0
    while len(rounds) < given.rounds:
        stolen, began = stolen_s(), time.monotonic()
        found = {name: engine.measure() for name, engine in engines.items()}
        share = (stolen_s() - stolen) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if share > STOLEN and disturbed < given.rounds:
            disturbed += 1
            continue
        rounds.append(found)
        print(found, flush=True)
    result: dict[str, Any] = {"rounds": len(rounds), "disturbed": disturbed}
    for run in rounds[0]["one process"]:
        result[run] = {name: _summary(name, run, rounds) for name in engines}
    save("ranks", result)
    # Ranks end with this process.
    os._exit(0)


def _summary(name: str, run: str, rounds: list[dict[str, dict[str, tuple[float, float]]]]) -> dict[str, Any]:
    ratios = [each["one process"][run][0] / each[name][run][0] for each in rounds]
    return {
        "ms": round(1e3 * statistics.median(each[name][run][0] for each in rounds), 2),
        "waited_ms": round(1e3 * statistics.median(each[name][run][1] for each in rounds), 2),
        "speed_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }


if __name__ == "__main__":
    main()
