"""Attention on flash-attn's paged kernels (Dao 2023, arXiv:2307.08691), for CUDA.

The kernels follow page tables themselves, so nothing is gathered. Stock builds want pages of a multiple of
256 tokens, float16 or bfloat16, and a head_dim that is a multiple of 8 up to 256; `supports` says whether a
cache qualifies, and `select` falls back to torch's kernels where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.torch_backend import attend_segment

PAGE_MULTIPLE = 256
"""In stock flash-attn builds a page size must be a multiple of this."""


@dataclass(frozen=True)
class FlashKernels:
    """flash-attn's two functions, as its 2.x interface defines them."""

    with_kvcache: Callable[..., Tensor]
    varlen: Callable[..., Tensor]

    @classmethod
    def load(cls) -> FlashKernels:
        """Import flash-attn. Raises ImportError where it is not installed."""
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        return cls(flash_attn_with_kvcache, flash_attn_varlen_func)


def available() -> bool:
    """Whether flash-attn is installed; imports nothing."""
    return find_spec("flash_attn") is not None


def runs_on(device: torch.device) -> bool:
    """Whether `device` is a GPU that the kernels are built for: Ampere or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def supports(dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether the kernels can read such a cache with such queries."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and kv_dtype == dtype
        and page_size % PAGE_MULTIPLE == 0
        and head_dim % 8 == 0
        and head_dim <= 256
    )


class FlashAttention:
    """Attention backend on flash-attn.

    A step's call waits for nothing and reads no length on the host, so it can be captured in a CUDA graph: as of
    flash-attn 2.8.3; later sources check the longest context on the host. The number of parts into which it splits a
    context follows from the width of the page tables.
    """

    name = "flash"

    def __init__(self, kernels: FlashKernels) -> None:
        self._kernels = kernels

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        kv.write(KEYS, layer, batch.slots, k)
        kv.write(VALUES, layer, batch.slots, v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        keys, values = kv.pages(KEYS, layer), kv.pages(VALUES, layer)
        if batch.is_step:
            return self._kernels.with_kvcache(
                q[:, None],
                keys,
                values,
                cache_seqlens=batch.context_lens_tensor,
                block_table=batch.page_tables,
                causal=True,
                window_size=causal_window(window, step=True),
            )[:, 0]
        return self._kernels.varlen(
            q,
            keys,
            values,
            cu_seqlens_q=batch.cu_query_lens,
            cu_seqlens_k=batch.cu_context_lens,
            max_seqlen_q=max(batch.query_lens),
            max_seqlen_k=max(batch.context_lens),
            causal=True,
            window_size=causal_window(window),
            block_table=batch.page_tables,
        )

    def attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        limits = segment_window(len(q), len(k), distance, window)
        if limits is None:
            return attend_segment(q, k, v, distance, window)
        queries, keys = segment_lengths(len(q), len(k), q.device)
        out, lse, _ = self._kernels.varlen(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            cu_seqlens_q=queries,
            cu_seqlens_k=keys,
            max_seqlen_q=len(q),
            max_seqlen_k=len(k),
            causal=limits != (-1, -1),
            window_size=limits,
            return_attn_probs=True,
        )
        return out.float(), lse.transpose(0, 1)


def causal_window(window: int | None, *, step: bool = False) -> tuple[int, int]:
    """FlashAttention's limits for causal attention: keys before the query and after it, -1 for all.

    In a `step` the only query of a sequence is its last token, so without a window it needs no limits. With limits the
    kernels would read K and V for each query head, not once for all heads that share them, and torch's would not split
    a context over the device.
    """
    if step and window is None:
        return -1, -1
    return (-1 if window is None else window - 1), 0


def segment_window(tokens: int, keys: int, distance: int, window: int | None) -> tuple[int, int] | None:
    """The limits with which FlashAttention computes a segment (see `AttentionBackend.attend_segment`).

    With limits it lets the last query and the last key be at one position. None for a segment that is neither such a
    one nor seen whole by each query.
    """
    if distance >= keys - 1 and (window is None or distance + tokens <= window):
        return -1, -1
    return causal_window(window) if distance + tokens == keys else None


def segment_lengths(tokens: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Running totals from 0 of the one sequence of a segment, int32 `[2]` each: of its queries, of its keys.

    Made by kernels. A copy from the host would wait behind the copy of the next segment, and attention for both.
    """
    queries, totals = (torch.arange(0, each + 1, each, dtype=torch.int32, device=device) for each in (tokens, keys))
    return queries, totals
