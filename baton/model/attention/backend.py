"""The contract of attention backends, and which of them serves which cache."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

import baton.model.attention.flash_backend as flash_backend
import baton.model.attention.varlen_backend as varlen_backend
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.torch_backend import TorchAttention


class AttentionBackend(Protocol):
    """Causal attention of new tokens over their sequences' pages. Stateless; all state is in the cache.

    Scores are scaled by head_dim ** -0.5. Query head h reads KV head h // (heads / kv_heads).
    """

    name: str

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Write the new tokens' `k` and `v`, `[T, kv_heads, head_dim]` each, into their pages."""
        ...

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """Attend with `q` `[T, heads, head_dim]` over what was appended so far; same shape and dtype back.

        A token sees positions up to its own; with `window` W only the latest W of them, its own included.
        """
        ...

    def attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attend with a sequence's `q` `[T, heads, head_dim]` to some of its `k` and `v` `[keys, kv_heads, head_dim]`.

        `distance` is the first query's position minus the first key's; queries and keys follow each other. Returns the
        result over these keys, float32 and shaped as `q`, and the log-sum-exp of their scores, float32 `[T, heads]`.
        For a query that sees none of them these are any finite numbers, and -inf.
        """
        ...


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
    if varlen_backend.runs_on(device) and varlen_backend.supports(dtype, head_dim):
        return varlen_backend.VarlenAttention.load()
    return TorchAttention()
