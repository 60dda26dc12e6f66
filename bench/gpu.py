"""The engine on a CUDA device, beside the device's own peaks and transformers; writes bench/results/gpu.json.

The model has Llama-3.1-8B's shape and random weights made on the device, so nothing is read from disk; speed depends on
shapes, not values. Peaks are measured in the same run, before and after: a large bf16 matrix product, and the better of
reading and copying memory. MFU and MBU count as `baton.bench.roofline` says. Before anything is measured the tests of
tests/gpu must pass.

    python -m bench.gpu [--device cuda] [--shape llama-8b] [--skip-tests]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.bench.roofline import ModelShape, decode_bytes, decode_flops, prefill_flops
from baton.engine.contract import EngineSpec, KvHandle
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.model_runner import ModelRunner
from baton.kv.format import KvFormat, KvPart
from baton.model.config import ModelConfig
from baton.model.decoder import Decoder
from baton.model.dtypes import dtype_name
from baton.model.layers import Parallel
from baton.model.linear import Placement
from baton.model.load import LoadedModel
from baton.request import SamplingParams, SequenceState
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

VARIANTS = {"eager": (1, False), "no step ahead": (0, True), "eager, no step ahead": (0, False)}
"""What decode is measured without: steps ahead, and whether there are graphs."""

NO_CUDA = "bench.gpu: torch sees no CUDA device; nothing was measured"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: lengths of prompts, batches and their context, steps and repetitions, side of the matrix
    product, bytes of the memory probe."""

    prompts: Sequence[int] = (2048, 8192)
    batches: Sequence[int] = (1, 64)
    context: int = 1024
    steps: int = 64
    repeats: int = 5
    gemm: int = 8192
    probe_bytes: int = 4 << 30
    max_model_len: int = 8192 + 256
    page_size: int = 256
    peer_batch: int = 64


class Bench:
    """A model of random weights on a device, and what is measured with it."""

    def __init__(self, raw: dict[str, Any], device: torch.device, plan: Plan) -> None:
        self._raw = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
        self.config = ModelConfig.from_dict(raw)
        self.shape = ModelShape.of(self.config)
        self.device = device
        self.plan = plan
        self.model = random_model(self.config, device)
        self.weight_bytes = self.shape.step_weights * self.model.dtype.itemsize

    def engine(self, steps_ahead: int = 1, graphs: bool = True) -> EngineCore:
        """An engine with pages for the largest batch, or the longest prompt."""
        plan = self.plan
        room = plan.context + plan.steps * (3 + plan.repeats)
        pages = max(max(plan.batches) * -(-room // plan.page_size), -(-max(plan.prompts) // plan.page_size)) + 16
        heads = (self.config.num_kv_heads, self.config.head_dim)
        parts = tuple(KvPart(name, dtype_name(self.model.dtype), heads) for name in ("k", "v"))
        spec = EngineSpec(
            fingerprint="random",
            kv_format=KvFormat(parts, self.config.num_layers, 16),
            vocab_size=self.config.vocab_size,
            max_model_len=plan.max_model_len,
            eos_token_ids=frozenset(self.config.eos_token_ids),
            page_size=plan.page_size,
            pages=pages,
            slots=max(plan.batches),
            steps_ahead=steps_ahead,
        )
        runner = ModelRunner(self.model, self.model.new_kv_cache(pages + 1, plan.page_size), spec)
        if not graphs:
            runner._graphs = None
        return EngineCore(spec, InProcessExecutor(runner), 0)

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of `run`, after two that do not count."""
        times = []
        for _ in range(2 + self.plan.repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    def peaks(self) -> dict[str, float]:
        """FLOP/s of a matrix product in bf16, bytes/s of memory."""
        side, count = self.plan.gemm, self.plan.probe_bytes // 4
        a, b = (torch.randn(side, side, device=self.device).bfloat16() for _ in range(2))
        product = self.seconds(lambda: [a @ b for _ in range(4)]) / 4
        source, target = (torch.ones(count, dtype=torch.float32, device=self.device) for _ in range(2))
        read = 4 * count / self.seconds(source.sum)
        copy = 8 * count / self.seconds(lambda: target.copy_(source))
        return {
            "flops": 2 * side**3 / product,
            "read_bytes_per_s": read,
            "copy_bytes_per_s": copy,
            "bytes_per_s": max(read, copy),
        }

    def prefill(self, engine: EngineCore, tokens: int, peaks: dict[str, float]) -> dict[str, float]:
        """One prompt in one chunk, first token included."""
        ids = [index % self.config.vocab_size for index in range(tokens)]
        handle = engine.reserve("prefill", tokens)
        state = SequenceState(SamplingParams(temperature=0.0), ids, [])
        took = self.seconds(
            lambda: engine.prefill_chunk(handle, ids, 0, tokens, on_layer=lambda layer: None, sample=[state])
        )
        engine.free(handle)
        flops = prefill_flops(self.shape, tokens)
        return {"ms": took * 1e3, "tokens_per_s": tokens / took, "mfu": flops / took / peaks["flops"]}

    def decode(self, engine: EngineCore, batch: int, peaks: dict[str, float]) -> dict[str, float]:
        """Steps of a batch at the plan's context, read one behind as the decode loop does."""
        with running(engine, batch, self.plan) as turn:
            took = self.seconds(lambda: turn(self.plan.steps)) / self.plan.steps
            context = int(self.plan.context + self.plan.steps * (2 + self.plan.repeats / 2))
        moved = decode_bytes(
            self.shape, batch, context, self.weight_bytes, self.shape.kv_token_bytes(self.model.dtype.itemsize)
        )
        return {
            "step_ms": took * 1e3,
            "tokens_per_s": batch / took,
            "mbu": moved / took / peaks["bytes_per_s"],
            "mfu": decode_flops(self.shape, batch, context) / took / peaks["flops"],
        }

    def overlap(self, engine: EngineCore, batch: int) -> dict[str, float]:
        """The step's time while another thread copies KV out of pages and into others, over its time alone."""
        stop = threading.Event()
        with running(engine, batch, self.plan) as turn:
            alone = self.seconds(lambda: turn(self.plan.steps)) / self.plan.steps
        with running(engine, batch, self.plan) as turn, ThreadPoolExecutor(1) as threads:
            copied = threads.submit(self._copy, engine, stop)
            try:
                beside = self.seconds(lambda: turn(self.plan.steps)) / self.plan.steps
            finally:
                stop.set()
            rate = copied.result() / 1e9
        return {"step_ms": alone * 1e3, "beside_ms": beside * 1e3, "ratio": beside / alone, "gb_per_s_each_way": rate}

    def _copy(self, engine: EngineCore, stop: threading.Event) -> float:
        """Copy KV out of pages and into others until told to stop: bytes a second."""
        tokens, heads, copied = min(self.plan.context, 1024), range(self.config.num_kv_heads), 0
        source, target = (engine.reserve(name, tokens) for name in ("source", "target"))
        began = time.perf_counter()
        try:
            while not stop.is_set():
                for layer in range(self.config.num_layers):
                    parts = engine.read_kv(source, layer, range(tokens), heads)
                    engine.write_kv(target, layer, 0, 0, parts)
                    copied += sum(memoryview(part.data).nbytes for part in parts)
            return copied / (time.perf_counter() - began)
        finally:
            engine.free(source)
            engine.free(target)

    def transformers(self) -> dict[str, float]:
        """`generate` of transformers at the plan's batch and context: tokens/s of its steps after the first."""
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device(self.device):
            model = LlamaForCausalLM(LlamaConfig(**self._raw)).to(self.model.dtype).eval()
        batch, steps = self.plan.peer_batch, self.plan.steps
        ids = torch.randint(3, self.config.vocab_size, (batch, self.plan.context), device=self.device)

        def generate(count: int) -> object:
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )

        with torch.inference_mode():
            took = self.seconds(lambda: generate(steps + 1)) - self.seconds(lambda: generate(1))
        return {"step_ms": took / steps * 1e3, "tokens_per_s": batch * steps / took}


def random_model(config: ModelConfig, device: torch.device) -> LoadedModel:
    """Random weights in bf16, made where they stay."""
    parallel = Parallel()
    decoder = Decoder(config, Placement(torch.bfloat16, device), parallel)
    made = torch.Generator(device).manual_seed(0)
    for slot in (*decoder.checkpoint_tensors(), decoder.head_tensor()):
        weight = torch.empty(slot.shape, dtype=torch.bfloat16, device=device)
        if "norm" in slot.name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=made)
        slot.load(weight)
    decoder.process_weights_after_loading()
    return LoadedModel(Path("random"), config, decoder.eval(), "random", torch.bfloat16, device, parallel)


@contextlib.contextmanager
def running(engine: EngineCore, batch: int, plan: Plan) -> Iterator[Callable[[int], None]]:
    """`batch` sequences of the plan's context, whose KV is what the pages hold; yields what makes steps of them."""
    params = SamplingParams(temperature=0.0)
    prompt = [3 + index % 64 for index in range(plan.context)]
    handles: list[KvHandle] = []
    for index in range(batch):
        handle = engine.reserve(f"{index}", plan.context + plan.steps * (3 + plan.repeats))
        engine.insert(handle, SequenceState(params, prompt, [index % 64]))
        handles.append(handle)
    unread: list[Any] = []

    def turn(steps: int) -> None:
        for _ in range(steps):
            unread.append(engine.step())
            if len(unread) > engine.spec.steps_ahead:
                unread.pop(0).result()
        while unread:
            unread.pop().result()

    try:
        yield turn
    finally:
        for handle in handles:
            engine.free(handle)
        engine.step().result()


def measure(bench: Bench, peer: bool = True) -> dict[str, Any]:
    """All figures. Ratios to the peaks are to those measured before; the ones after tell how far these moved."""
    plan, before = bench.plan, bench.peaks()
    results: dict[str, Any] = {"peaks": before}
    engine = bench.engine()
    results["prefill"] = {str(tokens): bench.prefill(engine, tokens, before) for tokens in plan.prompts}
    results["decode"] = decode = {str(batch): bench.decode(engine, batch, before) for batch in plan.batches}
    results["overlap"] = bench.overlap(engine, max(plan.batches))
    engine.close()
    for name, (ahead, graphs) in VARIANTS.items():
        # One at a time: each has pages of its own, and cycles that hold them.
        del engine
        gc.collect()
        engine = bench.engine(ahead, graphs)
        decode[name] = {str(batch): bench.decode(engine, batch, before) for batch in plan.batches}
        engine.close()
    del engine
    gc.collect()
    results["peaks_after"] = bench.peaks()
    if peer:
        results["transformers"] = bench.transformers()
        ours = decode.get(str(bench.plan.peer_batch))
        if ours is not None:
            results["over_transformers"] = ours["tokens_per_s"] / results["transformers"]["tokens_per_s"]
    return results


def gpu(device: torch.device) -> dict[str, Any]:
    """Name and driver of the device, and what flash-attn it is used with."""
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
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(NO_CUDA)
    if not arguments.skip_tests:
        tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], check=False)
        if tested.returncode:
            raise SystemExit(f"bench.gpu: tests/gpu failed with {tested.returncode}; nothing was measured")
    device = torch.device(arguments.device)
    with torch.cuda.device(device):
        bench = Bench(SHAPES[arguments.shape], device, Plan())
        results = {"gpu": gpu(device), "shape": arguments.shape, **measure(bench)}
    save("gpu", results)


if __name__ == "__main__":
    main()
