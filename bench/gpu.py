"""The engine on a CUDA device, beside the device's own peaks and transformers; writes bench/results/gpu.json.

The model has Llama-3.1-8B's shape and random weights made on the device, so nothing is read from disk; speed depends on
shapes, not values. Prefill and decode are measured as by `baton bench engine`, with probes of the device between the
runs. Before anything is measured the tests of tests/gpu must pass.

    python -m bench.gpu [--device cuda] [--shape llama-8b] [--rounds 5] [--skip-tests]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from baton.bench.engine import WARM_STEPS, EnginePlan, EngineRuns, random_model
from baton.bench.engine_report import Rates
from baton.bench.probes import Probes
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.factory import assemble
from baton.engine.load import LoadedModel
from baton.model.config import ModelConfig
from baton.planner.shape import ModelShape
from bench.common import save

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {"llama-8b": LLAMA_8B, "tiny": TINY}

PLAN = EnginePlan(prefill=(2048, 8192), batches=(1, 64), contexts=(1024,), steps=64, rounds=5, chunk_size=8192)
PAGE_SIZE = 256
COPY_TOKENS = 1024

VARIANTS = {"eager": (1, False), "no step ahead": (0, True), "eager, no step ahead": (0, False)}
"""Variants of decode: how many steps ahead, and whether there are graphs."""

NO_CUDA = "bench.gpu: torch sees no CUDA device; nothing was measured"


@contextlib.contextmanager
def engine_of(
    model: LoadedModel, tokens: int, page_size: int, steps_ahead: int | None = None, **settings: Any
) -> Iterator[EngineCore]:
    """An engine with pages for so many tokens; closed at the end."""
    # Cycles may still hold the pages of the engine before.
    gc.collect()
    token_bytes = ModelShape.of(model.config).kv_token_bytes(model.dtype.itemsize)
    kv_memory = -(-tokens // page_size) * page_size * token_bytes
    engine = assemble(model, EngineConfig("random", page_size=page_size, kv_memory=kv_memory, **settings), steps_ahead)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def engine_for(model: LoadedModel, plan: EnginePlan, steps_ahead: int = 1, graphs: bool = True) -> Iterator[EngineCore]:
    """An engine for the measurements of `plan`, and for copies beside them."""
    tokens = plan.tokens(PAGE_SIZE) + PAGE_SIZE + 2 * COPY_TOKENS
    limits = {"max_model_len": plan.longest, "slots": max(plan.batches)}
    with engine_of(model, tokens, PAGE_SIZE, steps_ahead, **limits) as engine:
        if not graphs:
            engine.executor.runner._graphs = None  # type: ignore[attr-defined]
        yield engine


def overlap(engine: EngineCore, runs: EngineRuns, plan: EnginePlan) -> dict[str, float]:
    """A step's time while another thread copies KV out of pages and into others, over its time alone."""
    batch, context, stop = max(plan.batches), max(plan.contexts), threading.Event()

    def step_ms() -> float:
        return 1e3 * statistics.median(runs.decode(batch, context, plan.steps) for _ in range(plan.rounds)) / plan.steps

    alone = step_ms()
    with ThreadPoolExecutor(1) as threads:
        copied = threads.submit(copy_kv, engine, stop)
        try:
            beside = step_ms()
        finally:
            stop.set()
        rate = copied.result() / 1e9
    return {"step_ms": alone, "beside_ms": beside, "ratio": beside / alone, "gb_per_s_each_way": rate}


def copy_kv(engine: EngineCore, stop: threading.Event) -> float:
    """Copy KV out of pages and into others until told to stop: bytes a second."""
    kv_format, copied, began = engine.spec.kv_format, 0, time.perf_counter()
    tokens = min(COPY_TOKENS, engine.spec.max_model_len)
    source, target = (engine.reserve(name, tokens) for name in ("source", "target"))
    try:
        for layer in itertools.cycle(range(kv_format.layers)):
            parts = engine.read_kv(source, layer, range(tokens), range(kv_format.heads))
            engine.write_kv(target, layer, 0, 0, parts)
            copied += sum(memoryview(part.data).nbytes for part in parts)
            if stop.is_set():
                break
        return copied / (time.perf_counter() - began)
    finally:
        engine.free(source)
        engine.free(target)


def transformers(raw: dict[str, Any], device: torch.device, plan: EnginePlan) -> dict[str, float]:
    """Rates of transformers' `generate` at the plan's largest batch, without its first step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).eval()  # type: ignore[arg-type]
    batch, steps = max(plan.batches), plan.steps
    ids = torch.randint(3, raw["vocab_size"], (batch, max(plan.contexts)), device=device)
    mask = torch.ones_like(ids)

    def seconds(count: int) -> float:
        limits = {"max_new_tokens": count, "min_new_tokens": count}
        began = time.perf_counter()
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits).tolist()
        return time.perf_counter() - began

    with torch.inference_mode():
        seconds(WARM_STEPS)
        took = statistics.median(seconds(steps + 1) - seconds(1) for _ in range(plan.rounds))
    return {"batch": batch, "step_ms": took / steps * 1e3, "tokens_per_s": batch * steps / took}


class Bench:
    """Measurements with a model of random weights."""

    def __init__(self, raw: dict[str, Any], device: torch.device, plan: EnginePlan, probes: Probes) -> None:
        self._raw, self._device, self._plan, self._probes = raw, device, plan, probes
        self._model = random_model(ModelConfig.from_dict(raw), device)

    def measure(self, saved: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
        """Measure all figures; calls `saved` with the figures so far after each."""
        results = self._whole()
        for name, (steps_ahead, graphs) in VARIANTS.items():
            saved(results)
            results[name] = self._decode_only(steps_ahead, graphs)
        saved(results)
        results["transformers"] = peer = transformers(self._raw, self._device, self._plan)
        results["over_transformers"] = results["decode"][-1]["tokens_per_s"] / peer["tokens_per_s"]
        return results

    def _whole(self) -> dict[str, Any]:
        results: dict[str, Any] = {"prefill": [], "decode": []}
        with engine_for(self._model, self._plan) as engine:
            runs = EngineRuns(engine, self._plan.chunk_size)
            for kind, row in self._rates(engine, runs, self._plan):
                results[kind].append(row)
            results["overlap"] = overlap(engine, runs, self._plan)
        return results

    def _decode_only(self, steps_ahead: int, graphs: bool) -> list[dict[str, Any]]:
        plan = replace(self._plan, prefill=())
        with engine_for(self._model, plan, steps_ahead, graphs) as engine:
            return [row for _, row in self._rates(engine, EngineRuns(engine, plan.chunk_size), plan)]

    def _rates(self, engine: EngineCore, runs: EngineRuns, plan: EnginePlan) -> Iterator[tuple[str, dict[str, Any]]]:
        shape = ModelShape.of(self._model.config)
        return Rates(runs, self._probes, shape, plan, engine.spec.kv_format, lambda _: None).rows()


def gpu(device: torch.device) -> dict[str, Any]:
    """Name and driver of the device, and version of flash-attn."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        flash = version("flash-attn")
    except PackageNotFoundError:
        flash = "none: torch's own kernels, no graphs"
    found = {"flash_attn": flash, "cuda": torch.version.cuda, "torch": torch.__version__}
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            found["driver"] = subprocess.check_output(query, text=True).split()[0]
        found["name"] = torch.cuda.get_device_name(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rounds", type=int, default=PLAN.rounds, help="runs of each measurement")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(NO_CUDA)
    if not arguments.skip_tests:
        tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], check=False)
        if tested.returncode:
            raise SystemExit(f"bench.gpu: tests/gpu failed with {tested.returncode}; nothing was measured")
    device = torch.device(arguments.device)
    raw = SHAPES[arguments.shape]
    with torch.cuda.device(device):
        probes = Probes(ModelShape.of(ModelConfig.from_dict(raw)), torch.bfloat16, device)
        about = {"gpu": gpu(device), "shape": arguments.shape}
        plan = replace(PLAN, rounds=arguments.rounds)
        # Each part at once: whoever stops this keeps what is known.
        results = Bench(raw, device, plan, probes).measure(lambda found: save("gpu", {**about, **found}))
    save("gpu", {**about, **results})


if __name__ == "__main__":
    main()
