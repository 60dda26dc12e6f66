"""The parts of a transformer block, for the forward pass only.

Every linear knows which rows or columns of a checkpoint tensor are its own (`Parallel`), and fills its fused
weight piece by piece while loading (`load_shard`). How a weight lies in memory and is multiplied is the
affair of the linear's `storage`: `DenseStorage` here is the plain one; a quantized or pre-packed one replaces
`linear.storage` and nothing else changes.

Modules are built with uninitialised weights; `parts()` says what must be loaded, by name and full shape.
Numerics follow transformers' modelling code, norms in float32, but for one thing: rotary embeddings are applied
in float32 too, where transformers rounds cosines and sines to the compute dtype first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError
from baton.model.config import RopeConfig


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Parallel:
    """This worker's place among the tensor-parallel ranks of one model; alone by default.

    `all_reduce` sums a tensor over the ranks; `all_gather` joins along the last dimension in rank order.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _unchanged
    all_gather: Callable[[Tensor], Tensor] = _unchanged

    def share(self, what: str, total: int) -> int:
        """One rank's part of `total`. Raises ModelError when it does not divide."""
        if total % self.size:
            raise ModelError(f"{what} {total} is not divisible by {self.size} tensor-parallel ranks")
        return total // self.size

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice of a full checkpoint tensor."""
        width = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * width, width)


@dataclass(frozen=True)
class Placement:
    """Where and in which dtype weights are kept and computed with."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class DenseStorage(nn.Module):
    """A weight `[rows, columns]` as the checkpoint has it, with an optional bias `[rows]`."""

    def __init__(self, rows: int, columns: int, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(rows, columns)
        self.bias = placement.empty(rows) if bias else None

    def load(self, row: int, weight: Tensor) -> None:
        """Fill rows from `row` on, casting to the storage's dtype."""
        self.weight[row : row + weight.shape[0]].copy_(weight)

    def load_bias(self, row: int, bias: Tensor) -> None:
        """Fill the bias from `row` on."""
        if self.bias is None:
            raise ModelError("this linear has no bias to load")
        self.bias[row : row + bias.shape[0]].copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, rows]`."""
        return F.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(nn.Module):
    """Several linears over the same input, computed as one; the output rows of each are split over the ranks.

    `outputs` gives the full number of rows of each, in order; the result is this rank's shares side by side.
    """

    def __init__(
        self, columns: int, outputs: Mapping[str, int], bias: bool, placement: Placement, parallel: Parallel
    ) -> None:
        super().__init__()
        self._columns = columns
        self._outputs = dict(outputs)
        self._parallel = parallel
        widths = [parallel.share(name, rows) for name, rows in outputs.items()]
        self._starts = dict(zip(outputs, accumulate(widths, initial=0), strict=False))
        self._bias = bias
        self.storage = DenseStorage(sum(widths), columns, bias, placement)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What must be loaded: part name to full checkpoint shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in self._outputs.items():
            shapes[f"{name}.weight"] = (rows, self._columns)
            if self._bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of one full checkpoint tensor."""
        name, kind = part.rsplit(".", 1)
        load = self.storage.load if kind == "weight" else self.storage.load_bias
        load(self._starts[name], self._parallel.narrow(tensor, 0))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, sum of this rank's rows]`."""
        output: Tensor = self.storage(x)
        return output


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one; heads are split over the ranks, whole heads to each."""

    def __init__(
        self,
        columns: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        placement: Placement,
        parallel: Parallel,
    ) -> None:
        parallel.share("num_attention_heads", heads)
        parallel.share("num_key_value_heads", kv_heads)
        outputs = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        super().__init__(columns, outputs, bias, placement, parallel)


class RowParallelLinear(nn.Module):
    """A linear whose input columns are split over the ranks; the ranks' partial results are summed."""

    def __init__(self, columns: int, rows: int, bias: bool, placement: Placement, parallel: Parallel) -> None:
        super().__init__()
        self._shape = (rows, columns)
        self._parallel = parallel
        self._bias = bias
        # One rank alone adds the bias, or the sum would hold it once a rank.
        self._adds_bias = bias and parallel.rank == 0
        self.storage = DenseStorage(rows, parallel.share("columns", columns), self._adds_bias, placement)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What must be loaded: part name to full checkpoint shape."""
        return {"weight": self._shape, **({"bias": self._shape[:1]} if self._bias else {})}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's columns of one full checkpoint tensor."""
        if part == "weight":
            self.storage.load(0, self._parallel.narrow(tensor, 1))
        elif self._adds_bias:
            self.storage.load_bias(0, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, this rank's columns]` to `[tokens, rows]`, summed over the ranks."""
        return self._parallel.all_reduce(self.storage(x))


class VocabParallelEmbedding(nn.Module):
    """Token embeddings whose vocabulary rows are split over the ranks; the last share may have rows to spare."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement, parallel: Parallel) -> None:
        super().__init__()
        self._shape = (vocab_size, hidden_size)
        self._parallel = parallel
        share = math.ceil(vocab_size / parallel.size)
        self._first = parallel.rank * share
        self.weight = placement.empty(share, hidden_size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What must be loaded: part name to full checkpoint shape."""
        return {"weight": self._shape}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of the full table."""
        own = tensor[self._first : self._first + self.weight.shape[0]]
        self.weight[: own.shape[0]].copy_(own)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[tokens]` int64 to `[tokens, hidden]`."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        embedded = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._parallel.all_reduce(embedded.masked_fill(foreign[:, None], 0))


class ParallelLMHead(nn.Module):
    """The output projection, split over the vocabulary like the embedding, and gathered.

    Its memory is taken by `load_shard`, since a tied one needs none.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement, parallel: Parallel) -> None:
        super().__init__()
        self._shape = (vocab_size, hidden_size)
        self._parallel = parallel
        share = math.ceil(vocab_size / parallel.size)
        self._first = parallel.rank * share
        self._device = placement.device
        self.storage = DenseStorage(share, hidden_size, False, Placement(placement.dtype, torch.device("meta")))

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What must be loaded unless tied: part name to full checkpoint shape."""
        return {"weight": self._shape}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of the full projection."""
        self.storage.to_empty(device=self._device)
        self.storage.load(0, tensor[self._first : self._first + self.storage.weight.shape[0]])

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the embedding's weight instead of holding one."""
        self.storage.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to float32 `[n, vocab_size]` on every rank."""
        return self._parallel.all_gather(self.storage(hidden))[:, : self._shape[0]].float()


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    As in transformers, mean square and scaling are float32, and the weight is applied in the input's dtype.
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self._eps = eps
        self.weight = placement.empty(size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """What must be loaded: part name to shape."""
        return {"weight": tuple(self.weight.shape)}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Every rank keeps the whole."""
        self.weight.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same shape and dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * (wide * scale).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """RoPE's angle per position, float32 `[head_dim / 2]` (Su et al. 2021, arXiv:2104.09864).

    "linear" divides positions by the factor (Chen et al. 2023, arXiv:2306.15595). "llama3" leaves wavelengths
    shorter than original length / high_freq_factor alone, divides those longer than original length /
    low_freq_factor by the factor, and blends in between (Llama 3.1's reference code).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.kind == "linear":
        return slowed
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * slowed + blend * frequencies


class Rotary(nn.Module):
    """Rotary embeddings in the half-split layout of Hugging Face checkpoints."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 `[tokens, 1, head_dim / 2]` each; one forward's layers share them."""
        angles = (positions.float()[:, None] * self._frequencies)[:, None]
        return angles.cos(), angles.sin()

    @staticmethod
    def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `[tokens, heads, head_dim]`; computed in float32, returned in the dtype of `x`."""
        cos, sin = angles
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
