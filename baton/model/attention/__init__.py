"""Paged attention: a pool of pages, a description of one forward's sequences, and backends over both.

A forward pass holds any mixture of prefill chunks and decode steps. Per layer the decoder calls a backend
twice: `append` writes the new tokens' K and V into their pages, `attend` lets every new token see its
sequence's pages, itself included. A chunk and a decode batch are the same two calls with other lengths.

    AttentionBatch     the lengths and page tables of one forward, and what is derived from them once
    KvCache            the pool, and the only code that knows how pages lie in memory
    AttentionBackend   the contract; `select` picks one: flash-attn or torch's kernels of that kind on CUDA, torch's
                       scaled_dot_product_attention anywhere
    SegmentedAttention sequences with pages in host memory beside others, through a SegmentSource

Backends reach K and V through `KvCache` only.
"""

from __future__ import annotations

from baton.model.attention.backend import AttentionBackend, select
from baton.model.attention.batch import AttentionBatch, HostKv
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.segmented import SegmentedAttention
from baton.model.attention.segments import SegmentRing, SegmentSource, SegmentViews

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "HostKv",
    "KvCache",
    "SegmentRing",
    "SegmentSource",
    "SegmentViews",
    "SegmentedAttention",
    "select",
]
