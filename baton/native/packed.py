"""Weights in the layout that the native kernels read (src/kernels.h)."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

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
    columns: int
    memory: Tensor

    @classmethod
    def pack(cls, library: ctypes.CDLL, weight: Tensor, threads: int = 1) -> PackedWeight:
        """Lay out a contiguous weight `[rows, columns]` on a CPU, in its own dtype."""
        rows, columns = weight.shape
        whole = rows % _PANEL == 0 and columns % _PANEL == 0
        new = torch.empty if whole else torch.zeros
        memory = new(library.baton_native_packed_size(rows, columns), dtype=weight.dtype)
        kind = TYPES[weight.dtype]

        def pack(begin: int) -> None:
            count = min(share, rows - begin)
            source = weight.data_ptr() + begin * columns * weight.itemsize
            library.baton_native_pack(source, kind, count, columns, begin, memory.data_ptr(), kind)

        share = -(-rows // (_PANEL * threads)) * _PANEL
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(pack, range(0, rows, share)))
        return cls(library, rows, columns, memory)

    def multiply(self, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
        """Float32 `[count, columns]` to float32 `[count, rows]`; `bias` float32 `[rows]`."""
        out = torch.empty(len(x), self.rows)
        kind, added = TYPES[self.memory.dtype], bias.data_ptr() if bias is not None else None
        self.library.baton_native_linear(
            x.data_ptr(), *x.shape, self.memory.data_ptr(), kind, self.rows, added, out.data_ptr(), threads
        )
        return out
