"""The length of a chunk whose computation hides the copies of KV from host memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_SQUARE = 8192
"""Rows and columns of the measured product."""
_COPY_BYTES = 1 << 26
"""Of the measured copy; torch keeps the pinned memory for later copies."""
_REPEATS = 5


def hiding_chunk(flops_per_s: float, bytes_per_s: float, group: int, dtype_bytes: int) -> int:
    """Tokens of the shortest chunk whose attention takes as long as the copy of the KV that it sees.

    A key and a value of one KV head and `d` elements are `2 d dtype_bytes` bytes to copy. For each token of the chunk
    they cost 4 d operations (two products) for each of the `group` query heads that share the KV head. So d and the
    length of the context cancel: chunk = (flops_per_s / bytes_per_s) / (2 group / dtype_bytes).
    """
    return math.ceil(flops_per_s / bytes_per_s / (2 * group / dtype_bytes))


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Rates of a CUDA device: operations a second of a large product, bytes a second of a copy from pinned memory."""
    one = torch.empty(_SQUARE, _SQUARE, dtype=dtype, device=device).normal_()
    flops = 2 * _SQUARE**3 / _seconds(lambda: one @ one, device)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    return flops, _COPY_BYTES / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least time of several runs on the device, after one that is not timed."""
    run()
    found = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return float(min(found))
