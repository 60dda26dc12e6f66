"""What memory and time a long prompt's prefill takes, by four strategies; writes bench/results/long.json.

    python -m bench.long [--lengths 8192 16384 32768] [--chunk 2048] [--segment 2048] [--skip-demonstration]

The strategies are plain functions over one small model with random weights, and compute the same:

    whole             the whole prompt through each layer
    chunked_mlp       the same, but the MLP takes a chunk at a time
    chunked_layer     all chunks through a layer, then all through the next: hidden states of the whole prompt remain
    streaming         a chunk through all layers, then the next chunk: only its KV remains

Weights, token ids and KV are there before a measurement begins; `peak_mib` is what tensors take beyond them. No
strategy holds a matrix of tokens x tokens: attention takes keys in segments and merges them by online softmax.
`Tracker` counts the tensors of torch's operators. Memory that an operator takes and frees inside itself is not seen.

The demonstration compares attention over a whole matrix of scores with attention by chunks of queries: one head of
2,048, 8,192 tokens, chunks of 512, float32. Its input counts, its weights do not; the tensors alive at the peak are
listed.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.model.layers import Rotary
from baton.model.rope import RopeConfig
from bench.common import save

MIB = 1 << 20


class Tracker(TorchDispatchMode):
    """Bytes of the storages that operators make while this is entered: now, and at most.

    `at_peak` lists operator, shape and MiB of what lived at the peak, largest first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.at_peak: list[tuple[str, list[int], float]] = []
        self._alive: dict[int, tuple[str, list[int], int]] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count each storage of its results that none of its arguments has."""
        given = {_storage(x)._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and _storage(tensor)._cdata not in given:
                self._add(str(func), tensor)
        if self.now > self.peak:
            self.peak = self.now
            alive = sorted(self._alive.values(), key=lambda each: -each[2])
            self.at_peak = [(name, shape, size / MIB) for name, shape, size in alive]
        return results

    def _add(self, name: str, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self.now -= self._alive.pop(key)[2]
            del self._refs[key]

        self._alive[key] = (name, list(tensor.shape), size)
        self._refs[key] = weakref.ref(storage, freed)
        self.now += size


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@dataclass(frozen=True)
class LlamaShape:
    """The small model's numbers. Attention dominates at these lengths, so that its width is small."""

    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 256
    vocab: int = 512

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: `[rows, columns]` each."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class LongModel:
    """A decoder with random weights, and the sizes by which it computes."""

    shape: LlamaShape
    chunk: int
    segment: int
    dtype: torch.dtype = torch.float32
    embedding: Tensor = field(init=False)
    layers: list[Layer] = field(init=False)
    rotary: Rotary = field(init=False)

    def __post_init__(self) -> None:
        shape, random = self.shape, torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> Tensor:
            result: Tensor = (torch.randn(rows, columns, generator=random) * columns**-0.5).to(self.dtype)
            return result

        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        layers = [
            Layer(
                weight(width, shape.hidden),
                weight(shape.hidden, shape.hidden),
                weight(2 * shape.intermediate, shape.hidden),
                weight(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        object.__setattr__(self, "embedding", weight(shape.vocab, shape.hidden))
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "rotary", Rotary(RopeConfig(10_000.0), shape.head_dim, torch.device("cpu")))

    def new_kv(self, tokens: int) -> Tensor:
        """The home of K and V: `[layers, 2, tokens, kv_heads, head_dim]`."""
        shape = self.shape
        return torch.zeros(shape.layers, 2, tokens, shape.kv_heads, shape.head_dim, dtype=self.dtype)

    def chunks(self, tokens: int) -> Iterator[range]:
        """The prompt's positions, a chunk at a time."""
        return (range(first, min(first + self.chunk, tokens)) for first in range(0, tokens, self.chunk))

    def attention(self, index: int, x: Tensor, kv: Tensor, at: range) -> Tensor:
        """What layer `index` adds to `x`, rows of the positions `at`; their K and V go into `kv`."""
        shape, layer = self.shape, self.layers[index]
        heads = (norm(x) @ layer.qkv.T).view(len(at), -1, shape.head_dim)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        angles = self.rotary.angles(torch.arange(at.start, at.stop))
        kv[index, 0, at.start : at.stop] = self.rotary.rotate(k, angles)
        kv[index, 1, at.start : at.stop] = v
        q = self.rotary.rotate(q, angles)
        del heads, k, v, angles
        return attend(q, kv[index], at.start, self.chunk, self.segment).flatten(1) @ layer.out.T

    def mlp(self, index: int, x: Tensor) -> Tensor:
        """What layer `index`'s MLP adds to `x`."""
        gate, up = (norm(x) @ self.layers[index].gate_up.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.layers[index].down.T


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return F.rms_norm(x, x.shape[-1:])


def attend(q: Tensor, kv: Tensor, start: int, queries: int, segment: int) -> Tensor:
    """Causal attention of `q` `[tokens, heads, head_dim]`, at positions from `start` on, over `kv` `[2, keys, ...]`.

    So many queries and keys are multiplied at once; partial results are merged by online softmax (Milakov & Gimelshein
    2018, arXiv:1805.02867).
    """
    result = torch.empty_like(q)
    for first in range(0, len(q), queries):
        block = q[first : first + queries]
        result[first : first + queries] = _attend_block(block, kv, start + first, segment)
    return result


def _attend_block(q: Tensor, kv: Tensor, start: int, segment: int) -> Tensor:
    """The same for few queries: keys in segments, each seen once."""
    (tokens, heads, dim), (_, _, kv_heads, _) = q.shape, kv.shape
    # The query heads of a KV head become rows: [kv_heads, group, tokens, dim].
    rows = (q * dim**-0.5).view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
    highest = q.new_full((*rows.shape[:3], 1), -torch.inf)
    total, merged = torch.zeros_like(highest), torch.zeros_like(rows)
    positions = torch.arange(start, start + tokens)
    for first in range(0, start + tokens, segment):
        end = min(first + segment, start + tokens)
        k, v = kv[:, first:end].transpose(1, 2).unsqueeze(2)
        scores = rows @ k.transpose(-1, -2)
        if end > start + 1:
            scores.masked_fill_(positions[:, None] < torch.arange(first, end), -torch.inf)
        # The first segment holds position 0, which all see, so no maximum is -inf.
        now = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(now).exp_()
        scale = (highest - now).exp_()
        total.mul_(scale).add_(weights.sum(-1, keepdim=True))
        merged.mul_(scale).add_(weights @ v)
        highest = now
    return merged.div_(total).permute(2, 0, 1, 3).reshape(tokens, heads, dim)


def whole(model: LongModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The last position's hidden state `[hidden]`: the whole prompt through each layer."""
    x, at = F.embedding(token_ids, model.embedding), range(len(token_ids))
    for index in range(model.shape.layers):
        x += model.attention(index, x, kv, at)
        x += model.mlp(index, x)
    return norm(x[-1])


def chunked_mlp(model: LongModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The same; the MLP takes a chunk at a time."""
    x, at = F.embedding(token_ids, model.embedding), range(len(token_ids))
    for index in range(model.shape.layers):
        x += model.attention(index, x, kv, at)
        for rows in x.split(model.chunk):
            rows += model.mlp(index, rows)
    return norm(x[-1])


def chunked_layer(model: LongModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The same; all chunks through a layer, then all through the next."""
    x = F.embedding(token_ids, model.embedding)
    for index in range(model.shape.layers):
        for at in model.chunks(len(token_ids)):
            rows = x[at.start : at.stop]
            rows += model.attention(index, rows, kv, at)
            rows += model.mlp(index, rows)
    return norm(x[-1])


def streaming(model: LongModel, token_ids: Tensor, kv: Tensor) -> Tensor:
    """The same; a chunk through all layers, then the next chunk."""
    for at in model.chunks(len(token_ids)):
        x = F.embedding(token_ids[at.start : at.stop], model.embedding)
        for index in range(model.shape.layers):
            x += model.attention(index, x, kv, at)
            x += model.mlp(index, x)
    return norm(x[-1])


STRATEGIES: tuple[Callable[[LongModel, Tensor, Tensor], Tensor], ...] = (whole, chunked_mlp, chunked_layer, streaming)


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


def measure(run: Callable[[], Tensor]) -> tuple[Tensor, Tracker, float]:
    """Its result, the tensors it made, and its seconds."""
    with torch.no_grad(), Tracker() as tracker:
        began = time.perf_counter()
        result = run()
        return result, tracker, time.perf_counter() - began


def compare(model: LongModel, length: int) -> dict[str, dict[str, float]]:
    """Memory and time of each strategy; all must end in the same hidden state."""
    token_ids = torch.randint(model.shape.vocab, (length,), generator=torch.Generator().manual_seed(2))
    results, first = {}, None
    for strategy in STRATEGIES:
        kv = model.new_kv(length)
        hidden, tracker, seconds = measure(lambda run=strategy, home=kv: run(model, token_ids, home))  # type: ignore[misc]
        first = hidden if first is None else first
        torch.testing.assert_close(hidden, first, rtol=1e-3, atol=1e-4)
        results[strategy.__name__] = {
            "peak_mib": round(tracker.peak / MIB, 3),
            "kv_mib": round(kv.nbytes / MIB, 3),
            "seconds": round(seconds, 2),
        }
    return results


def demonstrate(length: int = 8192, width: int = 2048, chunk: int = 512) -> dict[str, Any]:
    """The single attention, standard and chunked: peak, time, and the tensors of the peak."""
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(4, width, width, generator=random) * width**-0.5
    given = torch.randn(length, width, generator=random)

    def row(attention: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
        result, tracker, seconds = measure(lambda: attention(given.clone()))
        alive = [{"operator": name, "shape": size, "mib": round(mib, 2)} for name, size, mib in tracker.at_peak]
        return result, {"peak_mib": round(tracker.peak / MIB, 1), "seconds": round(seconds, 2), "at_peak": alive}

    standard, standard_row = row(lambda x: standard_attention(x, weights))
    chunked, chunked_row = row(lambda x: chunked_attention(x, weights, chunk))
    torch.testing.assert_close(chunked, standard, rtol=1e-3, atol=1e-4)
    return {"length": length, "width": width, "chunk": chunk, "standard": standard_row, "chunked": chunked_row}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.long")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << power for power in range(13, 19)])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens")
    parser.add_argument("--segment", type=int, default=2048, help="tokens of KV that attention takes at once")
    parser.add_argument("--skip-demonstration", action="store_true")
    options = parser.parse_args()
    model = LongModel(LlamaShape(), options.chunk, options.segment)
    results: dict[str, Any] = {"shape": vars(model.shape), "chunk": model.chunk, "segment": model.segment}
    results["strategies"] = {str(length): compare(model, length) for length in options.lengths}
    if not options.skip_demonstration:
        results["demonstration"] = demonstrate()
    save("long", results)


if __name__ == "__main__":
    main()
