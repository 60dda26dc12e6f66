"""What memory and time a long prompt's prefill takes; writes bench/results/long.json.

    python -m bench.long [--only strategies] [--lengths 8192 16384 32768] [--chunk 512] [--segment 1024]

`strategies`: four orders of the same computation, on a small Llama with random weights in float32.

    whole             the whole prompt through each layer
    chunked_mlp       the same, but the MLP takes a chunk at a time
    chunked_layer     all chunks through a layer, then all through the next: hidden states of the whole prompt remain
    streaming         a chunk through all layers, then the next chunk: only its KV remains

Streaming is the engine itself, with torch's operators and its KV pages in host memory. The others are plain functions
over the same decoder's layers, with attention in the same blocks, so that no strategy holds a matrix of tokens x
tokens. All end in the same log-probabilities. Of the last layer all compute only what the last token needs.

Weights, token ids and KV are there before a measurement begins; `peak_mib` is what tensors take beyond them, and
`at_peak` the largest of these. Times are of one run, with the time that counting takes (`bench.tracker`).

`homes`: the time of the engine's prefill with KV pages in host memory, compared with pages on the device, in turns.

`demonstration`: attention over a whole matrix of scores, and by chunks of queries: one head of 2,048, 8,192 tokens,
chunks of 512, float32. Its input counts, its weights do not; all tensors alive at the peak are listed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.factory import build
from baton.model.attention.segmented import merge
from baton.model.attention.torch_backend import attend_segment
from baton.model.decoder import Decoder, DecoderLayer
from baton.model.layers import Rotary
from baton.model.load import load_model
from baton.request import SamplingParams, SequenceState
from bench.common import save
from bench.pairing import ratio, turned
from bench.tracker import MIB, clocked, track

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}
"""Attention dominates at these lengths, so that the model is small."""

LENGTHS = [1 << power for power in range(13, 19)]
HOMES = ("device", "host")
_PAGES_MORE = 1 << 20
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1, seed=0, logprobs=20)


def write_checkpoint(folder: Path, layers: int = SHAPE["num_hidden_layers"]) -> Path:
    """The small model with random weights, which are large enough for clear decisions."""
    torch.manual_seed(1)
    shape = SHAPE | {"num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2)).save_pretrained(folder)
    return folder


def draw_prompt(length: int) -> list[int]:
    """Random token ids."""
    ids: list[int] = torch.randint(SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(2)).tolist()
    return ids


@dataclass(frozen=True)
class PlainModel:
    """The parts of the plain strategies: a decoder's layers, over KV in one tensor.

    Attention takes `chunk` queries and `segment` keys at once.
    """

    decoder: Decoder
    chunk: int
    segment: int

    def new_kv(self, tokens: int) -> Tensor:
        """K and V: `[layers, 2, tokens, kv_heads, head_dim]`."""
        config = self.decoder.config
        return torch.zeros(config.num_layers, 2, tokens, config.num_kv_heads, config.head_dim)

    def chunks(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Rows of `x`, a view of some at a time, with the position of the first."""
        return ((first, x[first : first + self.chunk]) for first in range(0, len(x), self.chunk))

    def append(self, index: int, x: Tensor, kv: Tensor, start: int) -> Tensor:
        """Write K and V of `x`, at positions from `start` on; returns their queries `[tokens, heads, head_dim]`."""
        config, layer = self.decoder.config, self._layer(index)
        at = slice(start, start + len(x))
        heads = layer.attention.qkv(layer.attention_norm(x)).view(len(x), -1, config.head_dim)
        qk, kv[index, 1, at] = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), 1)
        angles = self.decoder.rotary.angles(torch.arange(at.start, at.stop))
        rotated: Tensor = Rotary.rotate(qk, angles)
        kv[index, 0, at] = rotated[:, config.num_heads :]
        return rotated[:, : config.num_heads]

    def attend(self, index: int, q: Tensor, kv: Tensor, start: int) -> Tensor:
        """What attention adds to the hidden states of the queries at positions from `start` on."""
        result = torch.empty_like(q)
        for first, block in self.chunks(q):
            begin = start + first
            k, v = kv[index, :, begin : begin + len(block)]
            found = attend_segment(block, k, v, 0, None)
            for low in range(0, begin, self.segment):
                k, v = kv[index, :, low : min(low + self.segment, begin)]
                found = merge(found, attend_segment(block, k, v, begin - low, None))
            result[first : first + len(block)] = found[0]
        added: Tensor = self._layer(index).attention.o(result.flatten(1))
        return added

    def mlp(self, index: int, x: Tensor) -> Tensor:
        """What the MLP adds to `x`."""
        layer = self._layer(index)
        added: Tensor = layer.mlp(layer.mlp_norm(x))
        return added

    def finish(self, q: Tensor, x: Tensor, kv: Tensor) -> Tensor:
        """Log-probabilities after the last token `[vocab]`; `q` and `x` are its own in the last layer `[1, ...]`."""
        last = len(self.decoder.layers) - 1
        x = x + self.attend(last, q, kv, kv.shape[2] - 1)
        logprobs: Tensor = self.decoder.logits(x + self.mlp(last, x))[0].log_softmax(-1)
        return logprobs

    def _layer(self, index: int) -> DecoderLayer:
        return cast(DecoderLayer, self.decoder.layers[index])


def whole(model: PlainModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """Log-probabilities after the prompt: the whole prompt through each layer."""
    x, last = model.decoder.embed(token_ids), len(model.decoder.layers) - 1
    for index in range(last):
        x += model.attend(index, model.append(index, x, kv, 0), kv, 0)
        x += model.mlp(index, x)
    return model.finish(model.append(last, x, kv, 0)[-1:], x[-1:], kv)


def chunked_mlp(model: PlainModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The same; the MLP takes a chunk at a time."""
    x, last = model.decoder.embed(token_ids), len(model.decoder.layers) - 1
    for index in range(last):
        x += model.attend(index, model.append(index, x, kv, 0), kv, 0)
        for _, rows in model.chunks(x):
            rows += model.mlp(index, rows)
    return model.finish(model.append(last, x, kv, 0)[-1:], x[-1:], kv)


def chunked_layer(model: PlainModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The same; all chunks through a layer, then all through the next."""
    x, last = model.decoder.embed(token_ids), len(model.decoder.layers) - 1
    for index in range(last):
        for start, rows in model.chunks(x):
            rows += model.attend(index, model.append(index, rows, kv, start), kv, start)
            rows += model.mlp(index, rows)
    for start, rows in model.chunks(x):
        q = model.append(last, rows, kv, start)
    return model.finish(q[-1:], x[-1:], kv)


PLAIN: tuple[Callable[[PlainModel, Tensor, Tensor], Tensor], ...] = (whole, chunked_mlp, chunked_layer)


def build_engine(path: Path, length: int, segment: int, kernels: str, kv_home: str) -> EngineCore:
    """The engine of a prefill worker, with pages for a prompt of that length."""
    kv_bytes = SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    return build(
        EngineConfig(
            str(path),
            device="cpu",
            dtype="float32",
            kernels=kernels,
            kv_memory=length * kv_bytes + _PAGES_MORE,
            kv_home=kv_home,
            segment_tokens=segment,
        )
    )


def stream(engine: EngineCore, token_ids: Sequence[int], chunk: int) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after the prompt: a chunk through all layers, then the next chunk."""
    handle, result = engine.reserve("long", len(token_ids)), None
    for start in range(0, len(token_ids), chunk):
        end = min(start + chunk, len(token_ids))
        sample = [SequenceState(_GREEDY, token_ids)] if end == len(token_ids) else []
        result = engine.prefill_chunk(handle, token_ids, start, end, on_layer=_ignore, sample=sample)
    engine.free(handle)
    return dict(result.tokens[0].top) if result else {}


def _ignore(_layer: int) -> None:
    pass


def compare_strategies(path: Path, length: int, chunk: int, segment: int) -> dict[str, dict[str, Any]]:
    """Memory and time of each strategy; all must end in the same log-probabilities."""
    prompt, results = draw_prompt(length), {}

    def row(name: str, run: Callable[[], Any]) -> Any:
        print(f"{length} tokens, {name}", file=sys.stderr, flush=True)
        result, tracker, times = track(run)
        largest = [f"{operator} {shape}: {mib:.2f} MiB" for operator, shape, mib in tracker.at_peak[:6]]
        results[name] = {"peak_mib": round(tracker.peak / MIB, 3), **times, "at_peak": largest}
        return result

    engine = build_engine(path, length, segment, "torch", "host")
    likeliest = row("streaming", partial(stream, engine, prompt, chunk))
    engine.close()
    model = PlainModel(cast(Decoder, load_model(path, dtype=torch.float32).decoder), chunk, segment)
    ids = torch.tensor(prompt)
    for strategy in PLAIN:
        kv = model.new_kv(length)
        logprobs = row(strategy.__name__, partial(strategy, model, ids, kv))
        torch.testing.assert_close(logprobs[[*likeliest]], torch.tensor([*likeliest.values()]), rtol=1e-3, atol=1e-3)
    return results


def compare_homes(path: Path, length: int, chunk: int, segment: int, turns: int) -> dict[str, Any]:
    """Times of the engine's prefill with either home of its KV, and host memory's time divided by the device's."""
    prompt, results = draw_prompt(length), {}
    for kernels in ("torch", "native"):
        engines = {home: build_engine(path, length, segment, kernels, home) for home in HOMES}
        found: dict[str, list[dict[str, Any]]] = {home: [] for home in HOMES}
        for turn in range(turns):
            for home in turned(HOMES, turn):
                found[home].append(clocked(partial(stream, engines[home], prompt, chunk))[1])
        ratios = {name: ratio(found["host"], found["device"], name) for name in ("seconds", "cpu_seconds")}
        results[kernels] = {**found, "host / device": ratios}
        for engine in engines.values():
            engine.close()
    return results


def standard_attention(x: Tensor, weights: Tensor) -> Tensor:
    """One causal head over `x` `[tokens, width]`, all scores in one matrix; `weights` of q, k, v and out."""
    q, k, v = (x @ weight.T for weight in weights[:3])
    scores = (q @ k.T) * x.shape[1] ** -0.5
    at = torch.arange(len(x))
    scores.masked_fill_(at[:, None] < at, -torch.inf)
    result: Tensor = (scores.softmax(-1) @ v) @ weights[3].T
    return result


def chunked_attention(x: Tensor, weights: Tensor, chunk: int) -> Tensor:
    """The same, a chunk of queries at a time over the keys up to its own."""
    k, v = (x @ weight.T for weight in weights[1:3])
    result = torch.empty_like(x)
    for first in range(0, len(x), chunk):
        rows = x[first : first + chunk]
        end = first + len(rows)
        scores = (rows @ weights[0].T) @ k[:end].T * x.shape[1] ** -0.5
        scores.masked_fill_(torch.arange(first, end)[:, None] < torch.arange(end), -torch.inf)
        result[first:end] = (scores.softmax(-1) @ v[:end]) @ weights[3].T
    return result


def demonstrate(length: int = 8192, width: int = 2048, chunk: int = 512) -> dict[str, Any]:
    """The single attention, standard and chunked: peak, time, and the tensors of the peak."""
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(4, width, width, generator=random) * width**-0.5
    given = torch.randn(length, width, generator=random)

    def row(attention: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
        result, tracker, times = track(lambda: attention(given.clone()))
        alive = [f"{operator} {shape}: {mib:.2f} MiB" for operator, shape, mib in tracker.at_peak]
        return result, {"peak_mib": round(tracker.peak / MIB, 1), **times, "at_peak": alive}

    standard, standard_row = row(lambda x: standard_attention(x, weights))
    chunked, chunked_row = row(lambda x: chunked_attention(x, weights, chunk))
    torch.testing.assert_close(chunked, standard, rtol=1e-3, atol=1e-4)
    return {"length": length, "width": width, "chunk": chunk, "standard": standard_row, "chunked": chunked_row}


def main() -> None:
    """Measure and save, each part as soon as it is known."""
    parts = ("demonstration", "homes", "strategies")
    parser = argparse.ArgumentParser(prog="python -m bench.long")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunk", type=int, default=512, help="tokens")
    parser.add_argument("--segment", type=int, default=1024, help="tokens of KV that attention takes at once")
    parser.add_argument("--homes-length", type=int, default=32768, help="tokens of the prompt of `homes`")
    parser.add_argument("--turns", type=int, default=5, help="of `homes`")
    options = parser.parse_args()
    chosen, sizes = [options.only] if options.only else parts, (options.chunk, options.segment)
    about = {"shape": SHAPE, "chunk": options.chunk, "segment": options.segment}
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder))
        if "demonstration" in chosen:
            save("long", demonstrate(), "demonstration")
        if "homes" in chosen:
            found = compare_homes(path, options.homes_length, *sizes, options.turns)
            save("long", {**about, "length": options.homes_length, "times": found}, "homes")
        if "strategies" in chosen:
            for length in options.lengths:
                found = compare_strategies(path, length, *sizes)
                save("long", {**about, "length": length, "strategies": found}, f"strategies-{length}")


if __name__ == "__main__":
    main()
