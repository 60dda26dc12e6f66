"""What the machine gives at this moment: bytes a second read from memory, and operations a second of a GEMM.

Bandwidth moves between minutes with what else the host does, so a rate is only worth comparing with a probe taken
beside it. Each probe tries several means and tells the best: a peak that one of our own kernels could pass would
be none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.bench.roofline import ModelShape

BUFFER_BYTES = 1 << 29
"""Read by each probe of the bandwidth: so much that it is not the caches' (of which a host's machines share some)."""
GEMM_ROWS = (256, 1024)
SQUARE = 4096
_REPEATS = 2
_COLUMNS = 4096


class Probes:
    """Probes for engines of `dtype` on `device`, holding their buffers until they are dropped.

    `shape` gives the GEMM probe the shapes of the model itself, beside a big square one.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        square: int = SQUARE,
    ) -> None:
        self._device = device
        self._reads = _reads(dtype, device, buffer_bytes)
        widths = [
            (shape.hidden_size, 2 * shape.intermediate_size),
            (shape.intermediate_size, shape.hidden_size),
            (square, square),
        ]
        self._products = [_product(rows, *width, dtype, device) for width in widths for rows in GEMM_ROWS]

    def bandwidth(self) -> float:
        """Bytes a second: the best of summing, of a matrix by a vector, and of copying, which reads and writes."""
        return max(count / self._best(run) for count, run in self._reads)

    def flops(self) -> float:
        """Floating-point operations a second: the best product of matrices in the engine's dtype."""
        return max(count / self._best(run) for count, run in self._products)

    def _best(self, run: Callable[[], object]) -> float:
        took = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            took.append(time.perf_counter() - began)
        return min(took)


Timed = tuple[int, Callable[[], object]]
"""What one call moves or computes, and the call."""


def _reads(dtype: torch.dtype, device: torch.device, size: int) -> Sequence[Timed]:
    columns = min(_COLUMNS, size // 32)
    floats = torch.ones(size // 4 // columns, columns, device=device)
    half, target = floats.view(-1).chunk(2)
    vector = torch.ones(columns, device=device)
    reads: list[Timed] = [
        (size, floats.view(torch.int64).sum),
        (size, lambda: torch.mv(floats, vector)),
        (size, lambda: target.copy_(half)),
    ]
    weight = torch.ones(size // 4 // columns, columns, dtype=dtype, device=device)
    reads.append((weight.numel() * dtype.itemsize, _linear(weight, 1)))
    return reads


def _product(rows: int, columns: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Timed:
    weight = torch.ones(outputs, columns, dtype=dtype, device=device)
    return 2 * rows * columns * outputs, _linear(weight, rows)


def _linear(weight: Tensor, rows: int) -> Callable[[], Tensor]:
    """The product of `[rows, columns]` with a weight `[outputs, columns]`, packed for oneDNN where that is faster."""
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return lambda: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return lambda: pointwise(x, packed, None, "none", [], "")
