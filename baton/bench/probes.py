"""The speed of the machine at this moment: bytes per second read from memory, and operations per second of a GEMM.

Bandwidth changes within minutes with the other load of the host, so a rate is compared with probes just before and
after it. Each probe tries several methods and returns the best, so that it is not slower than our own kernels.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.factory import kernels_for, measure_rates
from baton.native.packed import PackedWeight
from baton.planner.hardware import Hardware
from baton.planner.shape import ModelShape

BUFFER_BYTES = 1 << 29
"""Bytes that each probe of the bandwidth reads: more than the caches hold, which machines of a host may share."""
GEMM_ROWS, NATIVE_ROWS = (256, 1024), (256, 2048)
"""Rows that torch's operators and native kernels multiply."""
SQUARE = 4096
_ON_CUDA = 8
"""Factor for bytes and rows on a GPU, so that the time of a launch does not count."""
_REPEATS = 2
_COLUMNS = 4096
_COLD_ROWS = 128
"""Rows up to which a product is measured as in a step: it may wait for its weights, which must come from memory."""


class Probes:
    """Probes for engines of `dtype` on `device`. They keep their buffers as long as they exist.

    `shape` adds the shapes of the model to the GEMM probe, which also multiplies large square matrices. `library` has
    the native kernels, if the engine computes with them. They multiply beside torch's operators, which are slow in
    bfloat16 on some CPUs.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        library: CDLL | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        square: int = SQUARE,
    ) -> None:
        self._device = device
        self._shape, self._dtype, self._library, self._buffer_bytes = shape, dtype, library, buffer_bytes
        self._matrices: _Matrices | None = None
        scale = _ON_CUDA if device.type == "cuda" else 1
        self._reads = _reads(dtype, device, scale * buffer_bytes)
        widths = [
            (shape.hidden_size, 2 * shape.intermediate_size),
            (shape.intermediate_size, shape.hidden_size),
            (square, square),
        ]
        self._products = [
            (rows, _product(scale * rows, *width, dtype, device)) for width in widths for rows in GEMM_ROWS
        ]
        if library is not None:
            self._products += [
                (rows, _native_product(library, rows, *width, dtype)) for width in widths for rows in NATIVE_ROWS
            ]

    def bandwidth(self) -> float:
        """Bytes a second: the best of summing, of a matrix by a vector, and of copying, which reads and writes."""
        return max(self._rate(each) for each in self._reads.values())

    def flops(self) -> float:
        """Floating-point operations a second: the best product of matrices in the engine's dtype."""
        return max(self._rate(each) for _, each in self._products)

    def flops_256(self) -> float:
        """Floating-point operations a second: the best product of 256 rows."""
        return max(self._rate(each) for rows, each in self._products if rows == GEMM_ROWS[0])

    def step_rates(self, rows: int) -> tuple[float, float]:
        """Measured rates of the model's own matrices: operations/s of products with `rows` rows, bytes/s with one row.

        The matrices of several layers are multiplied in turn, so that they come from memory, as in a step. For more
        rows than a step has, one layer is measured, without the output projection, as in a prompt; with at most 2,048
        rows, because above that the rate does not change. Keeps the matrices from the first call on.
        """
        if self._matrices is None:
            self._matrices = _Matrices(self._shape, self._dtype, self._device, self._library, self._buffer_bytes)
        shape, matrices, rows = self._shape, self._matrices, min(rows, NATIVE_ROWS[-1])

        def seconds(rows: int) -> float:
            layer = self._best(matrices.product(matrices.layers, rows)) / len(matrices.layers)
            return shape.num_layers * layer + self._best(matrices.product([matrices.head], rows))

        one = seconds(1)
        bandwidth = shape.step_weights * self._dtype.itemsize / one
        if rows <= _COLD_ROWS:
            # The longer of two measurements of one row would be too long.
            return 2 * rows * shape.step_weights / (one if rows == 1 else seconds(rows)), bandwidth
        return 2 * rows * shape.layer_weights / self._best(matrices.product(matrices.layers[:1], rows)), bandwidth

    def state(self) -> dict[str, float]:
        """The state of the machine now, in bytes and operations per second; each is the best of several tries.

        `sum` and `packed` are bytes read by a sum, and by a linear of one row that is packed for oneDNN where it has
        kernels. `flops_256` is the best product of 256 rows. Two cores of a processor may share a matrix unit at one
        time and not at another. This changes `packed` and `flops_256`, but not `sum`.
        """
        reads = {name: self._rate(each) for name, each in self._reads.items()}
        products = [(rows, self._rate(each)) for rows, each in self._products]
        return {
            "bytes_per_s": max(reads.values()),
            "flops_per_s": max(rate for _, rate in products),
            "sum_bytes_per_s": reads["sum"],
            "packed_bytes_per_s": reads["packed"],
            "flops_256_per_s": max(rate for rows, rate in products if rows == GEMM_ROWS[0]),
        }

    def _rate(self, timed: Timed) -> float:
        count, run = timed
        return count / self._best(run)

    def _best(self, run: Callable[[], object]) -> float:
        took = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            took.append(time.perf_counter() - began)
        return min(took)


class _Matrices:
    """Matrices of layers, with at least `buffer_bytes` in them if the model has so many layers, and of the head."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, library: CDLL | None, buffer_bytes: int
    ) -> None:
        heads = shape.num_heads * shape.head_dim
        up = (shape.hidden_size, shape.intermediate_size)
        qkv = (shape.hidden_size, heads + 2 * shape.num_kv_heads * shape.head_dim)
        widths = [qkv, (heads, shape.hidden_size), up, up, up[::-1]]
        count = min(shape.num_layers, -(-buffer_bytes // (shape.layer_weights * dtype.itemsize)))
        self._threads = torch.get_num_threads()
        self._device = device

        def matrix(columns: int, rows: int) -> _Matrix:
            weight = torch.ones(rows, columns, dtype=dtype, device=device)
            return columns, weight if library is None else PackedWeight.pack(library, weight)

        self.layers = [[matrix(*width) for width in widths] for _ in range(count)]
        self.head = [matrix(shape.hidden_size, shape.vocab_size)]
        self._input_dtype = dtype if library is None else torch.float32

    def product(self, groups: list[list[_Matrix]], rows: int) -> Callable[[], None]:
        """A function that multiplies each matrix with `rows` rows."""
        matrices = [each for group in groups for each in group]
        widths = {columns for columns, _ in matrices}
        inputs = {width: torch.ones(rows, width, dtype=self._input_dtype, device=self._device) for width in widths}

        def multiply() -> None:
            for columns, weight in matrices:
                if isinstance(weight, Tensor):
                    F.linear(inputs[columns], weight)
                else:
                    weight.multiply(inputs[columns], threads=self._threads)

        return multiply


_Matrix = tuple[int, Tensor | PackedWeight]
"""Number of columns, and the weight."""


def this_machine(shape: ModelShape, dtype: torch.dtype) -> Callable[[int], Hardware]:
    """Rates of the first CUDA device, or of the CPU: as hardware with the rates of a step with so many rows.

    A call measures, once for each number of rows up to 2,048. The device is planned for alone, without links to others.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    probes = Probes(shape, dtype, device, library=kernels_for("auto", device).library)
    host = device.type == "cpu"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if host else torch.cuda.mem_get_info()[1]
    link = 0.0 if host else measure_rates(device, dtype)[1]

    @functools.cache
    def measured(rows: int) -> Hardware:
        flops, bandwidth = probes.step_rates(rows)
        source = f"measured with {rows} rows of the model's matrices, {dtype} on {device}"
        return Hardware("this", (flops, None, None), bandwidth, memory, link, 0.0, 0, 1, source)

    return lambda rows: measured(min(rows, NATIVE_ROWS[-1]))


Timed = tuple[int, Callable[[], object]]
"""Bytes or operations of one call, and the call."""


def _reads(dtype: torch.dtype, device: torch.device, size: int) -> dict[str, Timed]:
    columns = min(_COLUMNS, size // 32)
    floats = torch.ones(size // 4 // columns, columns, device=device)
    half, target = floats.view(-1).chunk(2)
    vector = torch.ones(columns, device=device)
    weight = torch.ones(size // 4 // columns, columns, dtype=dtype, device=device)
    return {
        "sum": (size, floats.view(torch.int64).sum),
        "matvec": (size, lambda: torch.mv(floats, vector)),
        "copy": (size, lambda: target.copy_(half)),
        "packed": (weight.numel() * dtype.itemsize, _linear(weight, 1)),
    }


def _product(rows: int, columns: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Timed:
    weight = torch.ones(outputs, columns, dtype=dtype, device=device)
    return 2 * rows * columns * outputs, _linear(weight, rows)


def _native_product(library: CDLL, rows: int, columns: int, outputs: int, dtype: torch.dtype) -> Timed:
    threads = torch.get_num_threads()
    packed = PackedWeight.pack(library, torch.ones(outputs, columns, dtype=dtype))
    x = torch.ones(rows, columns)
    return 2 * rows * columns * outputs, lambda: packed.multiply(x, threads=threads)


def _linear(weight: Tensor, rows: int) -> Callable[[], Tensor]:
    """The product of `[rows, columns]` with a weight `[outputs, columns]`, packed for oneDNN where that is faster."""
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not _packs():
        return lambda: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return lambda: pointwise(x, packed, None, "none", [], "")


def _packs() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
