"""Which backend serves which cache."""

from __future__ import annotations

from functools import cache

import torch

import baton.model.attention.flash_backend as flash_backend
from baton.model.attention.contract import AttentionBackend
from baton.model.attention.torch_backend import TorchAttention


@cache
def select(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, head_dim: int
) -> AttentionBackend:
    """The fastest backend for queries of `dtype` over such a cache on `device`; the answer is kept."""
    if (
        flash_backend.available()
        and flash_backend.runs_on(device)
        and flash_backend.supports(dtype, kv_dtype, page_size, head_dim)
    ):
        return flash_backend.FlashAttention(flash_backend.FlashKernels.load())
    return TorchAttention()
