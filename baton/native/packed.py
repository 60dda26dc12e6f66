"""Weights in the layout that the native kernels read (src/kernels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton.errors import ModelError
from baton.model.decoder import Decoder, DecoderLayer, GatedMlp, GroupedAttention
from baton.native import abi
from baton.process.load_progress import PIECE, LoadProgress
from baton.process.madvise import populate_file

TYPES = {torch.float32: abi.FLOAT32, torch.bfloat16: abi.BFLOAT16, torch.float16: abi.FLOAT16}
PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Element types of packed weights."""

_PANEL = 32
"""Rows of a panel, kPanel."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight `[rows, columns]` in the kernels' panels; `memory` is 1-D, in the dtype of the weight."""

    library: ctypes.CDLL
    rows: int
    memory: Tensor

    @classmethod
    def pack(cls, library: ctypes.CDLL, weight: Tensor) -> PackedWeight:
        """Pack a contiguous weight `[rows, columns]` on a CPU; the dtype stays the same."""
        rows, columns = weight.shape
        memory = torch.empty(library.baton_native_packed_size(rows, columns), dtype=weight.dtype)
        _pack(library, [(0, weight)], weight.shape, memory, LoadProgress())
        return cls(library, rows, memory)

    def multiply(self, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
        """Multiply `x`, float32 `[count, columns]`, and add `bias`, float32 `[rows]`: float32 `[count, rows]`."""
        out = torch.empty(len(x), self.rows)
        kind, added = TYPES[self.memory.dtype], bias.data_ptr() if bias is not None else None
        self.library.baton_native_linear(
            x.data_ptr(), *x.shape, self.memory.data_ptr(), kind, self.rows, added, out.data_ptr(), threads
        )
        return out


@dataclass(frozen=True, eq=False)
class LoadedWeight:
    """A loaded weight that is to be packed.

    `write` fills a 1-D tensor of `elements` elements of `dtype`, and frees the loaded weight. Several threads may write
    different weights.
    """

    name: str
    elements: int
    dtype: torch.dtype
    write: Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """The packed weights of a model: the address of each weight by name, and the object that owns their memory.

    `nbytes` counts the weights alone, without the gaps between them.
    """

    addresses: Mapping[str, int]
    memory: object
    nbytes: int

    @classmethod
    def private(cls, weights: Sequence[LoadedWeight], threads: int = 1) -> PackedWeights:
        """Pack weights into memory of this process, on `threads` threads."""
        memory = {weight.name: torch.empty(weight.elements, dtype=weight.dtype) for weight in weights}
        write_all(weights, memory.__getitem__, threads)
        addresses = {name: tensor.data_ptr() for name, tensor in memory.items()}
        return cls(addresses, memory, sum(tensor.nbytes for tensor in memory.values()))


def write_all(weights: Sequence[LoadedWeight], memory_of: Callable[[str], Tensor], threads: int) -> None:
    """Write each weight into its memory; each thread writes one at a time, in their order."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda weight: weight.write(memory_of(weight.name)), weights))


def weights_of(decoder: Decoder, library: ctypes.CDLL, progress: LoadProgress) -> list[LoadedWeight]:
    """List the weights of a loaded decoder by names such as "layers.3.qkv_bias"; no "embedding" if tied.

    The first layer of a pipeline stage is "layers.0". A stage lists "embedding", "head" and "norm" only if it computes
    with them. `progress` counts the bytes of the loaded weights when they are packed.
    """
    # The largest come first, so that no thread still has one to do when the others have ended.
    embedding, head, weights = decoder.embedding, decoder.head, []
    tied = embedding is not None and head is not None and head.storage.weight is embedding.weight
    if head is not None:
        weights.append(_linear("head", embedding if tied else head.storage, library, progress))
    # The last stage has one for a projection that is tied.
    if embedding is not None and not tied and decoder.stage.start == 0:
        weights.append(_linear("embedding", embedding, library, progress))
    for index, layer in enumerate(decoder.layers):
        weights += _layer(f"layers.{index}.", cast(DecoderLayer, layer), library, progress)
    if decoder.norm is not None:
        weights.append(_plain("norm", decoder.norm.weight))
    return [*weights, _plain("frequencies", decoder.rotary.frequencies)]


def _layer(prefix: str, layer: DecoderLayer, library: ctypes.CDLL, progress: LoadProgress) -> Iterator[LoadedWeight]:
    attention, mlp = layer.attention, layer.mlp
    if not (isinstance(attention, GroupedAttention) and isinstance(mlp, GatedMlp)):
        raise ModelError(f"there are no native kernels for {type(attention).__name__} with {type(mlp).__name__}")
    linears = {
        "qkv": attention.qkv,
        "o": attention.o,
        "gate": mlp.gate,
        "up": mlp.up,
        "down": mlp.down,
    }
    for name, linear in linears.items():
        yield _linear(prefix + name, linear.storage, library, progress)
        if (bias := linear.storage.bias) is not None:
            yield _plain(f"{prefix}{name}_bias", bias.detach().float())
    norms = {
        "attention_norm": layer.attention_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
        "mlp_norm": layer.mlp_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield _plain(prefix + name, norm.weight)


def _plain(name: str, tensor: Tensor) -> LoadedWeight:
    """A weight that is copied without packing."""

    def write(memory: Tensor) -> None:
        memory.copy_(tensor.detach())

    return LoadedWeight(name, len(tensor), tensor.dtype, write)


def _linear(name: str, owner: Any, library: ctypes.CDLL, progress: LoadProgress) -> LoadedWeight:
    """The weight of `owner`, `[rows, columns]`, which is packed into panels: its views of files, or `owner.weight`."""

    def write(memory: Tensor) -> None:
        _pack(library, owner.views or [(0, owner.weight.detach())], (rows, columns), memory, progress)
        # This frees the loaded weight, so that weights are in memory only once.
        owner.views.clear()
        owner.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    (rows, columns), dtype = owner.weight.shape, owner.weight.dtype
    return LoadedWeight(name, library.baton_native_packed_size(rows, columns), dtype, write)


def _pack(
    library: ctypes.CDLL,
    views: Sequence[tuple[int, Tensor]],
    shape: Sequence[int],
    memory: Tensor,
    progress: LoadProgress,
) -> None:
    """Pack a weight `[rows, columns]` of this shape into `memory`, 1-D, whose dtype the result has.

    `views` are the parts of the weight, each with its first row, in any dtype that checkpoints have.
    """
    rows, columns = shape
    if rows % _PANEL or columns % _PANEL or sum(len(view) for _, view in views) < rows:
        # Panels are padded with zeros, and so are the missing rows of the last rank's vocabulary.
        memory.zero_()
    for row, view in views:
        # A rank's inputs of a weight are some columns of each row of the file.
        place, row_bytes, count = view.untyped_storage().data_ptr(), view.stride(0) * view.itemsize, len(view)
        stripe = max(PIECE // max(row_bytes, 1) // _PANEL, 1) * _PANEL
        for begin in range(0, count, stripe):
            own = view[begin : begin + stripe]
            size = len(own) * row_bytes
            populate_file(own.data_ptr(), size, min(size, (count - begin - len(own)) * row_bytes))
            # Kernels read no float64, which checkpoints rarely have.
            part = (own if own.dtype in TYPES else own.to(memory.dtype)).contiguous()
            library.baton_native_pack(
                part.data_ptr(),
                TYPES[part.dtype],
                len(part),
                columns,
                row + begin,
                memory.data_ptr(),
                TYPES[memory.dtype],
            )
            progress.add(own.nbytes, address=place)
