"""The parts of a transformer block, for the forward pass only.

A linear takes its rank's rows or columns of each checkpoint tensor (`TensorParallel`, `load_shard`). Its `storage`
(`baton.model.linear`) has the tensors of a weight, their layout in memory, and the product.

Modules are made with uninitialised weights. `parts()` lists the tensors to load, with their full shapes: "weight", or
"q.weight" if several linears are merged. The numerics are those of transformers, with norms in float32, except that
rotary embeddings are in float32 too: transformers first rounds cosines and sines to the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError
from baton.model.config import ModelConfig
from baton.model.linear import DenseStorage, TensorOptions
from baton.model.rope import RopeConfig


def _unchanged(x: Tensor) -> Tensor:
    return x


def _pass() -> None:
    return None


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place among the tensor-parallel ranks of a model; a single rank by default.

    `all_reduce` sums a tensor over the ranks; `all_gather` joins along the last dimension in rank order; `barrier`
    waits for all ranks.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _unchanged
    all_gather: Callable[[Tensor], Tensor] = _unchanged
    barrier: Callable[[], None] = _pass

    def divide(self, what: str, total: int) -> int:
        """`total` divided by the ranks. Raises ModelError, which names `what`, if there is a remainder."""
        if total % self.size:
            raise ModelError(f"{what} {total} is not divisible by {self.size} tensor-parallel ranks")
        return total // self.size

    def of_kv_heads(self, kv_heads: int) -> TensorParallel:
        """This rank's place among those with different KV heads. If ranks are more than heads, neighbours share one.

        Raises ModelError if they can't share them evenly.
        """
        if self.size <= kv_heads:
            return self
        if self.size % kv_heads:
            raise ModelError(f"{self.size} tensor-parallel ranks can't share num_key_value_heads {kv_heads} evenly")
        return replace(self, rank=self.rank * kv_heads // self.size, size=kv_heads)

    def kv_heads(self, total: int) -> range:
        """The KV heads of this rank, of `total`. Raises ModelError if ranks can't share them evenly."""
        place = self.of_kv_heads(total)
        count = place.divide("num_key_value_heads", total)
        return range(place.rank * count, (place.rank + 1) * count)

    def narrow(self, tensor: Tensor, dim: int | None) -> Tensor:
        """This rank's slice of a full checkpoint tensor; the whole tensor if `dim` is None."""
        if dim is None:
            return tensor
        width = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * width, width)


def unsplittable(config: ModelConfig, size: int) -> str:
    """Reason why tensor-parallel ranks of this number can't share the model's layers, or "" if they can."""
    for name, total in (("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size)):
        if total % size:
            return f"{name} {total} is not divisible by {size} ranks"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"num_key_value_heads {config.num_kv_heads} can't be shared evenly by {size} ranks"
    return ""


class Linear(nn.Module):
    """A linear over one storage."""

    def __init__(self, storage: DenseStorage) -> None:
        super().__init__()
        self.storage = storage


class MergedColumnParallelLinear(Linear):
    """Several linears over the same input, computed as one; the output rows of each are split over the ranks.

    `outputs` gives the full number of rows of each, in order; the result has this rank's part of each, side by side.
    `places` has the place of this rank for outputs that are split in another way than over all ranks.
    """

    def __init__(
        self,
        columns: int,
        outputs: Mapping[str, int],
        bias: bool,
        options: TensorOptions,
        parallel: TensorParallel,
        places: Mapping[str, TensorParallel] | None = None,
    ) -> None:
        self._places = dict.fromkeys(outputs, parallel) | dict(places or {})
        widths = [self._places[name].divide(name, rows) for name, rows in outputs.items()]
        super().__init__(DenseStorage(sum(widths), columns, bias, options))
        self._parts = {
            f"{name}.{tensor.name}": (tensor, start)
            for (name, rows), start in zip(outputs.items(), accumulate(widths, initial=0), strict=False)
            for tensor in self.storage.tensors(rows, columns, bias)
        }

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Full checkpoint shape of each part to load."""
        return {part: tensor.shape for part, (tensor, _) in self._parts.items()}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of one full checkpoint tensor."""
        its, row = self._parts[part]
        place = self._places[part.partition(".")[0]]
        self.storage.load(its.name, row, place.narrow(tensor, its.row_dim))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, columns]` to `[tokens, sum of this rank's rows]`."""
        output: Tensor = self.storage(x)
        return output


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one; heads are split over the ranks, whole heads to each.

    If there are more ranks than KV heads, each KV head is on several ranks.
    """

    def __init__(
        self,
        columns: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        options: TensorOptions,
        parallel: TensorParallel,
    ) -> None:
        parallel.divide("num_attention_heads", heads)
        of_kv = parallel.of_kv_heads(kv_heads)
        parallel.kv_heads(kv_heads)
        outputs = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        super().__init__(columns, outputs, bias, options, parallel, {"k": of_kv, "v": of_kv})


class RowParallelLinear(Linear):
    """A linear whose input columns are split over the ranks; the ranks' partial results are summed."""

    def __init__(self, columns: int, rows: int, bias: bool, options: TensorOptions, parallel: TensorParallel) -> None:
        # Only one rank adds the bias; otherwise the sum would have it once for each rank.
        self._adds = parallel.rank == 0
        super().__init__(DenseStorage(rows, parallel.divide("columns", columns), bias and self._adds, options))
        self._parts = {tensor.name: tensor for tensor in self.storage.tensors(rows, columns, bias)}
        self._parallel = parallel

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Full checkpoint shape of each part to load."""
        return {part: tensor.shape for part, tensor in self._parts.items()}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's columns of one full checkpoint tensor."""
        if part != "bias" or self._adds:
            self.storage.load(part, 0, self._parallel.narrow(tensor, self._parts[part].column_dim))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, this rank's columns]` to `[tokens, rows]`, summed over the ranks."""
        return self._parallel.all_reduce(self.storage(x))


class VocabParallelEmbedding(nn.Module):
    """Token embeddings whose vocabulary rows are split over the ranks; the last rank may have unused rows."""

    def __init__(self, vocab_size: int, hidden_size: int, options: TensorOptions, parallel: TensorParallel) -> None:
        super().__init__()
        self._shape = (vocab_size, hidden_size)
        self._parallel = parallel
        rows = math.ceil(vocab_size / parallel.size)
        self._first = parallel.rank * rows
        self.weight = options.empty_linear(rows, hidden_size)
        self.views: list[tuple[int, Tensor]] = []
        """As in `DenseStorage`."""
        self._repacked = options.repacked

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Full checkpoint shape of each part to load."""
        return {"weight": self._shape}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of the full table, as a view of the file if they will be packed."""
        own = tensor[self._first : self._first + self.weight.shape[0]]
        if self._repacked:
            self.views.append((0, own))
        else:
            self.weight[: own.shape[0]].copy_(own)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[tokens]` int64 to `[tokens, hidden]`."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        embedded = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._parallel.all_reduce(embedded.masked_fill(foreign[:, None], 0))


class ParallelLMHead(Linear):
    """The output projection. Ranks split the vocabulary like that of the embedding; the result is gathered.

    Its memory is allocated by `load_shard`, because a tied projection uses the embedding's weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, options: TensorOptions, parallel: TensorParallel) -> None:
        rows = math.ceil(vocab_size / parallel.size)
        super().__init__(DenseStorage(rows, hidden_size, False, replace(options, device=torch.device("meta"))))
        self._shape = (vocab_size, hidden_size)
        self._parallel = parallel
        self._first = parallel.rank * rows
        self._options = options

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Full checkpoint shape of the part to load, unless tied."""
        return {"weight": self._shape}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's rows of the full projection, `[vocab, hidden]`. Not called if it is tied."""
        storage = self.storage
        storage.weight = self._options.empty_linear(*storage.weight.shape)
        storage.load(part, 0, tensor[self._first : self._first + storage.weight.shape[0]])

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Take the embedding's weight instead of a loaded one."""
        self.storage.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` to logits, float32 `[n, vocab_size]`, on every rank."""
        return self._parallel.all_gather(self.storage(hidden))[:, : self._shape[0]].float()


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    The computation and the weight are float32; the result is rounded once.
    """

    def __init__(self, size: int, eps: float, options: TensorOptions) -> None:
        super().__init__()
        self.weight = TensorOptions(torch.float32, options.device).empty(size)
        self._eps = eps

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shape of the part to load."""
        return {"weight": tuple(self.weight.shape)}

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep the whole weight, on every rank."""
        self.weight.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps).to(x.dtype)


class Rotary(nn.Module):
    """Rotary embeddings in the half-split layout of Hugging Face checkpoints."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        frequencies = rope.inverse_frequencies(head_dim)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64, device=device)
        self.attention_factor = rope.attention_factor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the first half's negated: float32 `[tokens, 1, head_dim]`, for all layers.

        Computed in float64: the error is below 1e-6 up to position 100 million.
        """
        angles = (positions.double()[:, None] * self.frequencies)[:, None]
        cos, sin = ((wave * self.attention_factor).float() for wave in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @staticmethod
    def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `[tokens, heads, head_dim]`; computed in float32, returned in the dtype of `x`."""
        cos, sin = angles
        wide = x.float()
        return torch.addcmul(wide * cos, wide.roll(wide.shape[-1] // 2, -1), sin).to(x.dtype)
