"""`baton bench engine`: the rates of an engine, compared with those of the machine at the same time.

The GEMM probe runs between the prefills, and the bandwidth probe between the decodes. MFU is the causal operations
per second of a prefill, divided by the mean of the probes before and after it. MBU is the bytes per second of a
step, divided by the mean of the bandwidths before and after it. The report has the medians of all rounds.

Each row also has the time that the planner predicts (`baton.planner.roofline`), from two rates measured between the
same runs: operations per second of the model's matrices with as many rows as the pass has, and bytes per second with
which one row reads them. A second prediction of a step takes the operations per second of 256 rows instead. This is
what a planner has that knows only the machine's peak.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from baton.bench.engine import WARM_STEPS, EnginePlan, EngineRuns, engine_for
from baton.bench.machine import Provenance, memory_bytes, process_age_s
from baton.bench.probes import Probes
from baton.engine.config import EngineConfig
from baton.engine.factory import kernels_for
from baton.kv.format import DTYPE_BYTES, KvFormat
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.planner.roofline import (
    decode_bytes,
    decode_flops,
    kv_read_bytes,
    prefill_flops,
    prefill_seconds,
    step_time,
)
from baton.planner.shape import ModelShape

_FIRST_TOKENS = 16

Tell = Callable[[str], object]
"""Called with a description of the next measurement."""


def measure(config: EngineConfig, plan: EnginePlan, tell: Tell) -> Generator[dict[str, Any], None, None]:
    """Measure everything, and yield all results so far after each row.

    Loads the model. Call it once, early in a process, because the start-up time in the report is counted from the start
    of the process. Rows are dicts; keys that end in `_s` are seconds, those in `_ms` milliseconds.
    """
    tell("loading")
    engine = engine_for(plan, config)
    loaded = process_age_s()
    device = _device(config.device)
    kernels = kernels_for(config.kernels, device)
    runs = EngineRuns(engine, plan.chunk_size)
    runs.prefill(min(_FIRST_TOKENS, plan.longest))
    startup = {"loaded_s": loaded, "first_token_s": process_age_s()}
    provenance = Provenance()
    gc.collect()
    memory = {"steady_bytes": memory_bytes("VmRSS"), "peak_bytes": memory_bytes("VmHWM")}
    dtype = engine.spec.kv_format.parts[0].dtype
    about = {
        "model": config.model,
        "device": str(device),
        "dtype": dtype,
        "kernels": str(kernels),
        "threads": torch.get_num_threads(),
        "page_size": engine.spec.page_size,
        "chunk_size": plan.chunk_size,
        "rounds": plan.rounds,
        "steps": plan.steps,
    }
    report: dict[str, Any] = {"engine": about, "startup": startup, "memory": memory}
    report |= {"prefill": [], "decode": []}
    try:
        yield {**provenance.report(), **report}
        shape = ModelShape.of(ModelConfig.from_pretrained(resolve(config.model)))
        probes = Probes(shape, getattr(torch, dtype), device, library=kernels.library)
        for kind, row in Rates(runs, probes, shape, plan, engine.spec.kv_format, tell).rows():
            report[kind].append(row)
            yield {**provenance.report(), **report}
    finally:
        engine.close()


class Rates:
    """The rates of prefill and decode in `plan`, each with probes of the machine."""

    def __init__(
        self,
        runs: EngineRuns,
        probes: Probes,
        shape: ModelShape,
        plan: EnginePlan,
        kv_format: KvFormat,
        tell: Tell,
    ) -> None:
        self._runs = runs
        self._probes = probes
        self._shape = shape
        self._plan = plan
        self._element = DTYPE_BYTES[kv_format.parts[0].dtype]
        self._token = kv_format.token_bytes
        self._tell = tell

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All rates, each with its kind, "prefill" or "decode"."""
        for tokens in self._plan.prefill:
            yield "prefill", self._prefill(tokens)
        for context in self._plan.contexts:
            for batch in self._plan.batches:
                yield "decode", self._decode(batch, context)

    def _prefill(self, tokens: int) -> dict[str, Any]:
        self._tell(f"prefill of {tokens} tokens")
        # Work at a shape's first use does not belong to the rate.
        self._runs.prefill(min(tokens, self._plan.chunk_size))
        rows = min(tokens, self._plan.chunk_size)
        took, probed = _interleaved(
            self._plan.rounds,
            lambda: self._runs.prefill(tokens),
            lambda: (self._probes.flops(), *self._probes.step_rates(rows)),
        )
        flops, moved, seconds = prefill_flops(self._shape, tokens), self._prefill_bytes(tokens), statistics.median(took)
        predicted = [prefill_seconds(flops, moved, at_rows, bandwidth) for _, at_rows, bandwidth in probed]
        return {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "flops": flops,
            "bytes": moved,
            "peak_flops_per_s": statistics.median(peak for peak, *_ in probed),
            "mfu": statistics.median(flops / each / peak for each, (peak, *_) in zip(took, probed, strict=True)),
            "flops_at_rows_per_s": statistics.median(at_rows for _, at_rows, _ in probed),
            "predicted_s": statistics.median(predicted),
            "predicted_over_measured": _ratio(predicted, took),
        }

    def _prefill_bytes(self, tokens: int) -> int:
        """Bytes that a prompt moves at least.

        Each chunk reads the layers' weights and the KV so far, the last one also the head.
        """
        starts = range(0, tokens, self._plan.chunk_size)
        weights = len(starts) * self._shape.num_layers * self._shape.layer_weights + self._shape.lm_head_weights
        return weights * self._element + (tokens + sum(starts)) * self._token

    def _decode(self, batch: int, context: int) -> dict[str, Any]:
        self._tell(f"decode of {batch} at {context} tokens")
        count = self._plan.steps
        took, probed = _interleaved(
            self._plan.rounds,
            lambda: self._runs.decode(batch, context, count),
            lambda: (self._probes.bandwidth(), *self._probes.step_rates(batch), self._probes.flops_256()),
        )
        at = context + WARM_STEPS + (count + 1) // 2
        weights = self._shape.step_weights * self._element
        moved = decode_bytes(self._shape, batch, at, weights, self._token)
        steps = [each / count for each in took]
        kv = kv_read_bytes(self._shape, at, 8 * self._element)

        def predict(flops_per_s: float, bytes_per_s: float) -> float:
            return step_time(batch, self._shape.step_weights, weights, kv, flops_per_s, bytes_per_s).seconds

        predicted = [predict(at_rows, bandwidth) for _, at_rows, bandwidth, _ in probed]
        at_256 = [predict(flops, bandwidth) for _, _, bandwidth, flops in probed]
        return {
            "batch": batch,
            "context": context,
            "step_ms": 1e3 * statistics.median(steps),
            "tokens_per_s": batch / statistics.median(steps),
            "flops": decode_flops(self._shape, batch, at),
            "bytes": moved,
            "peak_bytes_per_s": statistics.median(peak for peak, *_ in probed),
            "mbu": statistics.median(moved / each / peak for each, (peak, *_) in zip(steps, probed, strict=True)),
            "flops_at_rows_per_s": statistics.median(at_rows for _, at_rows, *_ in probed),
            "weights_bytes_per_s": statistics.median(bandwidth for _, _, bandwidth, _ in probed),
            "flops_256_per_s": statistics.median(flops for *_, flops in probed),
            "predicted_ms": 1e3 * statistics.median(predicted),
            "predicted_over_measured": _ratio(predicted, steps),
            "predicted_256_ms": 1e3 * statistics.median(at_256),
            "predicted_256_over_measured": _ratio(at_256, steps),
        }


def _interleaved(
    rounds: int, run: Callable[[], float], probe: Callable[[], tuple[float, ...]]
) -> tuple[list[float], list[tuple[float, ...]]]:
    """The duration of each run, and the means of the probes before and after it."""
    took, probed = [], [probe()]
    for _ in range(rounds):
        took.append(run())
        probed.append(probe())
    return took, [
        tuple(map(statistics.fmean, zip(before, after, strict=True))) for before, after in itertools.pairwise(probed)
    ]


def _ratio(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The median of predicted over measured; each pair is of one round."""
    return statistics.median(one / other for one, other in zip(predicted, measured, strict=True))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
