"""Tensors: dtypes by name, and copies of small values between host and device."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TYPES = {"I": torch.uint32, "q": torch.int64}
"""Dtypes by the type code of an array."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name, as in `KvPart`."""
    return str(dtype).removeprefix("torch.")


with warnings.catch_warnings():
    # Torch warns once in a process about a read-only buffer. Received buffers are only read.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A new tensor of `values` on `device`.

    A copy from pageable memory makes the host wait for the whole stream. A copy from pinned memory is only queued, and
    torch's allocator does not reuse that memory before the copy is done.
    """
    if isinstance(values, array):
        tensor = _tensor(values, dtype)
        return tensor if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _tensor(values: array[int], dtype: torch.dtype) -> Tensor:
    """A copy of an array. `torch.tensor` would ask Python for each number: 6 ms for the pages of a million tokens."""
    if not values:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(values, dtype=_TYPES[values.typecode]).to(dtype, copy=True)


def download(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete when the device has reached this point; a CPU tensor is not copied."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
