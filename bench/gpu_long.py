"""Long prompts on a CUDA device with KV in host memory; writes bench/results/gpu-long.json, each part when it is known.

    python -m bench.gpu_long [--only rates|homes|lengths] [--layers 8] [--lengths 131072 262144 524288 1048576]
                             [--chunk 0] [--segment 0] [--turns 3] [--minutes 9]

The model has some layers of Llama-3.1-8B's shape and random weights, as in `bench.gpu`. Prompts are random token ids.
They are computed by the engine that workers have, in chunks as prefill workers choose them.

    rates      rates of products, the link, attention of a chunk over a segment, the merge of two results
    homes      a prompt of 131,072 tokens with KV in host memory, compared with device memory, in turns
    lengths    prompts with KV in host memory: time and operations, time of each chunk, how much of the copies was
               hidden behind computation, and peaks of device memory

A prompt of `n` tokens needs about `8192 n^2` operations of attention a layer, where each token has 32 heads of 128:
7.9e15 for a layer of 2^20 tokens, none in the last layer, which computes K and V alone. `predicted_s` is that at the
measured rate of attention, and all products at theirs. When the minutes are over, a prompt ends after a chunk, and its
row says `"complete": false`; a prompt that is predicted to take longer than what is left is not begun.
`--device cpu --shape tiny` shows on any machine that all of it runs, and writes no file.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.bench.engine import random_model
from baton.engine.config import default_page_size, default_segment_tokens
from baton.engine.contract import PromptChunk, compute_chunk
from baton.engine.core import EngineCore
from baton.engine.factory import measure_rates
from baton.engine.load import LoadedModel
from baton.model.attention import select
from baton.model.attention.segmented import merge
from baton.model.config import ModelConfig
from baton.planner.roofline import prefill_flops
from baton.planner.shape import ModelShape
from baton.request import SamplingParams, SequenceState
from bench.common import save
from bench.gpu import NO_CUDA, SHAPES, engine_of, gpu
from bench.pairing import ratio, turned
from prefill_svc.scheduler import chunk_size

MIB, GIB = 1 << 20, 1 << 30
MAX_PROMPT = 1 << 20
LENGTHS = [1 << power for power in range(17, 21)]
HOMES = ("device", "host")
PARTS = ("rates", "homes", "lengths")
WARM_TOKENS = 32_768
_REPEATS = 5
_ATTENTION = (8192, 16384)
"""Queries and keys with which the rate of attention is measured."""
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1, seed=0)

Save = Callable[[dict[str, Any], str], None]


@dataclass(frozen=True)
class DeviceRates:
    """Operations a second of a large product and of attention, bytes a second of the link, seconds of a merge."""

    product: float
    link: float
    attention: float
    merge_s: float

    @classmethod
    def of(cls, model: LoadedModel) -> DeviceRates:
        """Rates of the model's device; on a CPU, which copies nothing, product and link are not measured."""
        device, config = model.device, model.config
        product, link = measure_rates(device, model.dtype) if device.type == "cuda" else (1e11, 1e10)
        queries, keys = _ATTENTION if device.type == "cuda" else (16, 32)

        def made(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, config.head_dim, dtype=model.dtype, device=device)

        q, k, v = made(queries, config.num_heads), made(keys, config.num_kv_heads), made(keys, config.num_kv_heads)
        backend = select(device, model.dtype, model.dtype, default_page_size(device.type, MAX_PROMPT), config.head_dim)
        attend = partial(backend.attend_segment, q, k, v, keys, None)
        one, other = attend(), attend()
        operations = 4 * queries * keys * config.num_heads * config.head_dim
        return cls(product, link, operations / seconds(attend, device), seconds(lambda: merge(one, other), device))

    def predict(self, shape: ModelShape, tokens: int) -> float:
        """Seconds of a prompt."""
        # With a window of one token all that remains are products.
        products = prefill_flops(replace(shape, windows=(1,) * shape.num_layers), tokens)
        return products / self.product + (prefill_flops(shape, tokens) - products) / self.attention


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least time of several runs, after one that is not timed."""

    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(_REPEATS))


class Copies:
    """Copies from host memory for attention: bytes, and on CUDA the time for which kernels waited for them."""

    def __init__(self, engine: EngineCore, device: torch.device) -> None:
        kv_format, self._cuda = engine.spec.kv_format, device.type == "cuda"
        self._token_bytes = kv_format.token_bytes // kv_format.layers
        self._bytes, self._waits = 0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        source: Any = engine.executor.runner._source  # type: ignore[attr-defined]
        if source is not None:
            self._open, source.open = source.open, self._timed_open

    def _timed_open(self, segment: Any) -> Any:
        self._bytes += len(segment.tokens) * self._token_bytes
        if not self._cuda:
            return self._open(segment)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        found = self._open(segment)
        after.record()
        self._waits.append((before, after))
        return found

    def take(self) -> tuple[int, float]:
        """Bytes, and seconds of waiting, since the last call; the device has done all of it."""
        found = self._bytes, sum(before.elapsed_time(after) for before, after in self._waits) / 1e3
        self._bytes, self._waits = 0, []
        return found


@dataclass
class PrefillRun:
    """A prompt's chunks: `[first token, tokens, seconds, seconds of waiting for copies]` each."""

    tokens: int
    chunks: list[tuple[int, int, float, float]]
    copied: int = 0

    @property
    def done(self) -> int:
        """Tokens computed."""
        return sum(tokens for _, tokens, _, _ in self.chunks)

    @property
    def seconds(self) -> float:
        """Time of all chunks."""
        return sum(took for _, _, took, _ in self.chunks)

    @property
    def waited(self) -> float:
        """Time for which kernels waited for copies."""
        return sum(waited for _, _, _, waited in self.chunks)


class LongBench:
    """Measurements with a model of random weights."""

    def __init__(self, raw: dict[str, Any], device: torch.device, options: argparse.Namespace) -> None:
        self._raw, self._device, self._options = raw, device, options
        self._until = time.monotonic() + 60 * options.minutes

    def run(self, parts: Sequence[str], saved: Save) -> None:
        """Measure the parts, and save each row."""
        for layers in self._options.layers:
            model = random_model(self._config(layers), self._device)
            rates = DeviceRates.of(model)
            about = {"layers": layers, "chunk": self._options.chunk, "rates": asdict(rates)}
            if "rates" in parts:
                saved({**about, "gpu": gpu(self._device)}, "rates")
            if "homes" in parts:
                saved({**about, **self.compare_homes(model)}, f"homes-{layers}")
            if "lengths" in parts:
                for row in self.lengths(model, rates):
                    saved({**about, **row}, f"lengths-{layers}-{row['tokens']}")
            del model

    def _config(self, layers: int) -> ModelConfig:
        longest = max(MAX_PROMPT, *self._options.lengths)
        return ModelConfig.from_dict({**self._raw, "num_hidden_layers": layers, "max_position_embeddings": longest})

    def _engine(self, model: LoadedModel, home: str, tokens: int) -> AbstractContextManager[EngineCore]:
        """A prefill worker's engine with pages for a prompt of `tokens`."""
        page = default_page_size(self._device.type, tokens)
        segment = self._options.segment
        return engine_of(model, tokens, page, max_model_len=tokens, kv_home=home, segment_tokens=segment)

    def prefill(self, engine: EngineCore, tokens: int, chunk: int, copies: Copies | None = None) -> PrefillRun:
        """Compute a prompt until the minutes are over, in chunks of `chunk` tokens (0: as workers choose)."""
        drawn = random.Random(tokens)
        ids = drawn.choices(range(engine.spec.vocab_size), k=tokens)
        prompt, handle, start, rate = PrefillRun(tokens, []), engine.reserve("long", tokens), 0, 0.0
        min_overlap = engine.spec.min_overlap_chunk if handle.in_host else 0
        while start < tokens and (start == 0 or time.monotonic() < self._until):
            end = min(tokens, start + (chunk or chunk_size(tokens, 0, rate, min_overlap)))
            sample = [SequenceState(_GREEDY, ids)] if end == tokens else []
            began = time.perf_counter()
            compute_chunk(engine, PromptChunk(handle, ids, start, end, _ignore, sample))
            took = time.perf_counter() - began
            copied, waited = copies.take() if copies else (0, 0.0)
            prompt.chunks.append((start, end - start, took, waited))
            prompt.copied += copied
            start, rate = end, (end - start) / took
        engine.free(handle)
        return prompt

    def compare_homes(self, model: LoadedModel) -> dict[str, Any]:
        """Times of a prompt with either home, and host memory's divided by the device's, in turns."""
        tokens, chunk = self._options.homes_length, self._options.chunk
        found: dict[str, list[dict[str, Any]]] = {home: [] for home in HOMES}
        with self._engine(model, "device", tokens) as device, self._engine(model, "host", tokens) as host:
            engines = {"device": device, "host": host}
            for engine in engines.values():
                self.prefill(engine, min(tokens, WARM_TOKENS), chunk)
            for turn in range(self._options.turns):
                for home in turned(HOMES, turn):
                    prompt = self.prefill(engines[home], tokens, chunk)
                    if prompt.done == tokens:
                        found[home].append({"seconds": prompt.seconds, "chunks": len(prompt.chunks)})
                    print(f"{home}: {prompt.done} tokens in {prompt.seconds:.2f} s", file=sys.stderr, flush=True)
        turns = min(map(len, found.values()))
        kept = {home: rows[:turns] for home, rows in found.items()}
        return {"tokens": tokens, **kept, "host / device": ratio(kept["host"], kept["device"], "seconds")}

    def lengths(self, model: LoadedModel, rates: DeviceRates) -> Iterator[dict[str, Any]]:
        """A row for each length that there is time for."""
        shape, began = ModelShape.of(model.config), time.perf_counter()
        with self._engine(model, "host", max(self._options.lengths)) as engine:
            pool = {"pool_gib": engine.spec.pages * engine.spec.page_size * engine.spec.kv_format.token_bytes / GIB}
            pool["pool_s"] = time.perf_counter() - began
            copies = Copies(engine, self._device)
            self.prefill(engine, min(*self._options.lengths, WARM_TOKENS), self._options.chunk)
            for tokens in sorted(self._options.lengths):
                predicted, left = rates.predict(shape, tokens), self._until - time.monotonic()
                print(f"{tokens} tokens: {predicted:.1f} s predicted, {left:.0f} s left", file=sys.stderr, flush=True)
                if predicted > left:
                    break
                copies.take()
                self._reset_peaks()
                prompt = self.prefill(engine, tokens, self._options.chunk, copies)
                yield {**self._row(prompt, shape, rates), "predicted_s": predicted, **pool, **self._memory(model)}

    def _row(self, prompt: PrefillRun, shape: ModelShape, rates: DeviceRates) -> dict[str, Any]:
        took, copy_s = prompt.seconds, prompt.copied / rates.link
        flops = prefill_flops(shape, prompt.done, logits=int(prompt.done == prompt.tokens))
        return {
            "tokens": prompt.tokens,
            "complete": prompt.done == prompt.tokens,
            "done": prompt.done,
            "seconds": took,
            "tokens_per_s": prompt.done / took,
            "mfu": flops / took / rates.product,
            "copied_gib": prompt.copied / GIB,
            "copy_s": copy_s,
            "waited_s": prompt.waited,
            "hidden": 1 - prompt.waited / copy_s if copy_s else 1.0,
            "chunks": [[start, tokens, round(s, 4), round(waited, 4)] for start, tokens, s, waited in prompt.chunks],
        }

    def _reset_peaks(self) -> None:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _memory(self, model: LoadedModel) -> dict[str, float]:
        """Peaks in MiB since `_reset_peaks`: of tensors, of memory that torch keeps, of memory in use by the driver.

        `full_model_mib`: the peak of tensors with the weights of the layers that this model lacks.
        """
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        layer = sum(each.nbytes for each in model.decoder.layers[0].parameters())  # type: ignore[misc, union-attr]
        allocated = torch.cuda.max_memory_allocated(self._device)
        lacking = self._raw["num_hidden_layers"] - model.config.num_layers
        return {
            "weights_mib": sum(each.nbytes for each in model.decoder.parameters()) / MIB,  # type: ignore[misc, union-attr]
            "allocated_mib": allocated / MIB,
            "reserved_mib": torch.cuda.max_memory_reserved(self._device) / MIB,
            "driver_mib": (total - free) / MIB,
            "full_model_mib": (allocated + lacking * layer) / MIB,
        }


def _ignore(_layer: int) -> None:
    pass


def options() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_long")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens")
    parser.add_argument("--homes-length", type=int, default=LENGTHS[0], help="tokens of the prompt of `homes`")
    parser.add_argument("--chunk", type=int, default=0, help="tokens; 0: as prefill workers choose")
    parser.add_argument("--segment", type=int, default=0, help=f"tokens; 0: {default_segment_tokens('cuda')} on CUDA")
    parser.add_argument("--turns", type=int, default=3, help="turns of `homes`")
    parser.add_argument(
        "--minutes", type=float, default=9, help="minutes for all parts; a prompt that would take longer is not begun"
    )
    return parser


def main() -> None:
    """Measure and save, each part as soon as it is known."""
    chosen = options().parse_args()
    device = torch.device(chosen.device)
    on_cuda = device.type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise SystemExit(NO_CUDA.replace("bench.gpu", "bench.gpu_long"))
    saved: Save = (lambda row, part: save("gpu-long", row, part)) if on_cuda else lambda row, part: print(part, row)
    # As workers have it: the pool is there sooner in huge pages.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with torch.cuda.device(device) if on_cuda else nullcontext():
        LongBench(SHAPES[chosen.shape], device, chosen).run([chosen.only] if chosen.only else PARTS, saved)


if __name__ == "__main__":
    main()
