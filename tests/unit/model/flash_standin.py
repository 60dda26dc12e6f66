"""flash-attn's two functions as its documentation states them, computed densely.

They hold FlashAttention to the conventions of flash-attn 2.8's interface (page tables, running totals, the
window counted from the query, causality aligned at the bottom right) where there is no GPU to run the real
kernels; tests/gpu runs those.
"""

from typing import Any

import torch
from torch import Tensor

from baton.model.attention.flash_backend import FlashKernels
from baton.model.attention.torch_backend import attend_segment
from tests.unit.model.attention_contract import dense


def _window(window_size: tuple[int, int]) -> int | None:
    left, right = window_size
    assert right == 0
    return None if left == -1 else left + 1


def _paged(cache: Tensor, table: Tensor, length: int) -> Tensor:
    used = -(-length // cache.shape[1])
    return cache[table[:used].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """One new token of each: `q` `[batch, 1, heads, head_dim]`, caches `[pages, page_size, kv_heads, head_dim]`.

    Like the real one it learns lengths and pages from tensors alone.
    """
    assert causal
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    # Only without limits does the real one read K and V once for all heads of a group.
    assert window_size == (-1, -1) or window_size[0] >= 0
    group, window = q.shape[2] // k_cache.shape[2], None if window_size == (-1, -1) else _window(window_size)
    k, v = (
        part[block_table.long()].flatten(1, 2).float().repeat_interleave(group, dim=2).transpose(1, 2)
        for part in (k_cache, v_cache)
    )
    places = torch.arange(k.shape[2])[None]
    seen = places < cache_seqlens[:, None]
    if window is not None:
        seen &= places >= cache_seqlens[:, None] - window
    scores = (q.float().transpose(1, 2) @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights @ v.masked_fill(~seen[:, None, :, None], 0)).transpose(1, 2).to(q.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor | None = None,
    return_attn_probs: bool = False,
) -> Any:
    """`q` `[total tokens, heads, head_dim]`; `k`, `v` `[pages, page_size, kv_heads, head_dim]`.

    Without a block table `k` and `v` are `[total tokens, kv_heads, head_dim]`; here of one sequence. The log-sum-exp of
    `return_attn_probs` is `[heads, total tokens]`.
    """
    if block_table is None:
        assert return_attn_probs
        assert (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()) == ([0, max_seqlen_q], [0, max_seqlen_k])
        # Causality is aligned at the bottom right.
        distance = len(k) - len(q) if causal else len(k)
        out, lse = attend_segment(q, k, v, distance, _window(window_size) if causal else None)
        return out.to(q.dtype), lse.transpose(0, 1), None
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    queries, contexts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(queries), max(contexts))
    outs = [
        dense(one, _paged(k, table, length), _paged(v, table, length), _window(window_size))
        for one, table, length in zip(q.split(queries), block_table, contexts, strict=True)
    ]
    return torch.cat(outs).to(q.dtype)


KERNELS = FlashKernels(flash_attn_with_kvcache, flash_attn_varlen_func)
