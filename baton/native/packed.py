"""Weights in the layout that the native kernels read (src/kernels.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from baton.errors import ModelError
from baton.model.decoder import Decoder, DecoderLayer, GatedMlp, GroupedAttention
from baton.native import abi

TYPES = {torch.float32: abi.FLOAT32, torch.bfloat16: abi.BFLOAT16, torch.float16: abi.FLOAT16}
PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""Element types of packed weights."""

_PANEL = 32
"""Rows of a panel, kPanel; threads that pack must not share one."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight `[rows, columns]` in the kernels' panels; `memory` is 1-D, in the dtype of the weight."""

    library: ctypes.CDLL
    rows: int
    memory: Tensor

    @classmethod
    def pack(cls, library: ctypes.CDLL, weight: Tensor, threads: int = 1) -> PackedWeight:
        """Pack a contiguous weight `[rows, columns]` on a CPU; the dtype stays the same."""
        rows, columns = weight.shape
        memory = torch.empty(library.baton_native_packed_size(rows, columns), dtype=weight.dtype)
        _pack(library, weight, threads, memory)
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

    `write` fills a 1-D tensor of `elements` elements of `dtype`, and frees the loaded weight.
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
    def private(cls, weights: Iterable[LoadedWeight]) -> PackedWeights:
        """Pack weights into memory of this process."""
        memory = {}
        for weight in weights:
            memory[weight.name] = torch.empty(weight.elements, dtype=weight.dtype)
            weight.write(memory[weight.name])
        addresses = {name: tensor.data_ptr() for name, tensor in memory.items()}
        return cls(addresses, memory, sum(tensor.nbytes for tensor in memory.values()))


def weights_of(decoder: Decoder, library: ctypes.CDLL, threads: int) -> list[LoadedWeight]:
    """List the weights of a loaded decoder by names such as "layers.3.qkv_bias"; no "embedding" if tied."""
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
    """The weight `owner.weight` `[rows, columns]`, which is packed into panels."""

    def write(memory: Tensor) -> None:
        _pack(library, owner.weight.detach().contiguous(), threads, memory)
        # This frees the loaded weight, so that weights are in memory only once.
        owner.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    (rows, columns), dtype = owner.weight.shape, owner.weight.dtype
    return LoadedWeight(name, library.baton_native_packed_size(rows, columns), dtype, write)


def _pack(library: ctypes.CDLL, weight: Tensor, threads: int, memory: Tensor) -> None:
    """Pack a contiguous weight `[rows, columns]` into `memory`, 1-D of the same dtype."""
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
