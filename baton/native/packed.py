"""Weights in the layout that the native kernels read (src/kernels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton.model.decoder import Decoder, DecoderLayer
from baton.native import abi

TYPES = {torch.float32: abi.FLOAT32, torch.bfloat16: abi.BFLOAT16, torch.float16: abi.FLOAT16}
PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Element types of packed weights."""

_PANEL = 32
"""Rows of a panel, kPanel; threads that pack must not share one."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight `[rows, columns]` in panels; `memory` is 1-D, of its dtype."""

    library: ctypes.CDLL
    rows: int
    memory: Tensor

    @classmethod
    def pack(cls, library: ctypes.CDLL, weight: Tensor, threads: int = 1) -> PackedWeight:
        """Lay out a contiguous weight `[rows, columns]` on a CPU, in its own dtype."""
        rows, columns = weight.shape
        memory = torch.empty(library.baton_native_packed_size(rows, columns), dtype=weight.dtype)
        _pack(library, weight, threads, memory)
        return cls(library, rows, memory)

    def multiply(self, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
        """Float32 `[count, columns]` to float32 `[count, rows]`; `bias` float32 `[rows]`."""
        out = torch.empty(len(x), self.rows)
        kind, added = TYPES[self.memory.dtype], bias.data_ptr() if bias is not None else None
        self.library.baton_native_linear(
            x.data_ptr(), *x.shape, self.memory.data_ptr(), kind, self.rows, added, out.data_ptr(), threads
        )
        return out


@dataclass(frozen=True, eq=False)
class LoadedWeight:
    """A loaded weight, and the function that writes it into the memory that kernels read.

    `write` fills 1-D memory of `elements` of `dtype`, and lets go of what was loaded.
    """

    name: str
    elements: int
    dtype: torch.dtype
    write: Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """The packed weights of a model: addresses by name, and the owner of their memory."""

    addresses: Mapping[str, int]
    memory: object

    @classmethod
    def private(cls, weights: Iterable[LoadedWeight]) -> PackedWeights:
        """Weights in memory of this process."""
        memory = {}
        for weight in weights:
            memory[weight.name] = torch.empty(weight.elements, dtype=weight.dtype)
            weight.write(memory[weight.name])
        return cls({name: tensor.data_ptr() for name, tensor in memory.items()}, memory)


def weights_of(decoder: Decoder, library: ctypes.CDLL, threads: int) -> list[LoadedWeight]:
    """Tensors that kernels read, of a decoder that is loaded but not processed: "head", "layers.3.qkv",
    "layers.3.qkv_bias".

    Without "embedding" it is the head.
    """
    tied = decoder.head.storage.weight is decoder.embedding.weight
    weights = [_plain("norm", decoder.norm.weight), _plain("frequencies", decoder.rotary.frequencies)]
    for index, layer in enumerate(decoder.layers):
        weights += _layer(f"layers.{index}.", cast(DecoderLayer, layer), library, threads)
    weights.append(_linear("head", decoder.head.storage, library, threads))
    if tied:
        decoder.embedding.weight = decoder.options.empty(0)
    else:
        weights.append(_linear("embedding", decoder.embedding, library, threads))
    return weights


def _layer(prefix: str, layer: DecoderLayer, library: ctypes.CDLL, threads: int) -> Iterator[LoadedWeight]:
    attention, mlp = layer.attention, layer.mlp
    linears = {
        "qkv": attention.qkv,
        "o": attention.o,
        "gate": mlp.gate,
        "up": mlp.up,
        "down": mlp.down,
    }
    for name, linear in linears.items():
        yield _linear(prefix + name, linear.storage, library, threads)
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


def _linear(name: str, owner: Any, library: ctypes.CDLL, threads: int) -> LoadedWeight:
    """`owner.weight` `[rows, columns]` in panels."""

    def write(memory: Tensor) -> None:
        _pack(library, owner.weight.detach().contiguous(), threads, memory)
        # Nothing else holds the loaded one, so that weights are in memory once.
        owner.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    (rows, columns), dtype = owner.weight.shape, owner.weight.dtype
    return LoadedWeight(name, library.baton_native_packed_size(rows, columns), dtype, write)


def _pack(library: ctypes.CDLL, weight: Tensor, threads: int, memory: Tensor) -> None:
    """Lay out a contiguous weight `[rows, columns]` in 1-D memory of its dtype."""
    rows, columns = weight.shape
    if rows % _PANEL or columns % _PANEL:
        # Panels are padded with zeros.
        memory.zero_()
    kind = TYPES[weight.dtype]

    def pack(begin: int) -> None:
        count = min(stripe, rows - begin)
        source = weight.data_ptr() + begin * columns * weight.itemsize
        library.baton_native_pack(source, kind, count, columns, begin, memory.data_ptr(), kind)

    stripe = -(-rows // (_PANEL * threads)) * _PANEL
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(pack, range(0, rows, stripe)))
