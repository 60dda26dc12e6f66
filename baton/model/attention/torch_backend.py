"""Attention on torch's own operators, on any device: the reference for other backends, and the fallback.

One sequence after the other, its K and V are copied out of their pages and multiplied by torch's
`scaled_dot_product_attention`. Exactly the tokens that its queries see are copied, so no sequence ever reads what is
not its own: a NaN left in a freed page can't reach another request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache

_MASK_ELEMENTS = 1 << 22
"""Queries times keys computed together: bounds the memory of a chunk's mask."""

_SCORES = 1 << 24
"""Scores of a segment that are computed together: 64 MiB."""


class TorchAttention:
    """Attention by torch's operators."""

    name = "torch"
    blocks = 0
    """Blocks of queries that this process has begun, in all instances: what shows that a long layer goes on."""

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        kv.write(KEYS, layer, batch.slots, k)
        kv.write(VALUES, layer, batch.slots, v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        sequences = zip(q.split(batch.query_lens), batch.page_tables, batch.context_lens, strict=True)
        return torch.cat([_attend(kv, layer, *sequence, window) for sequence in sequences])

    def attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Computed in float32."""
        return attend_segment(q, k, v, distance, window)


def _attend(kv: KvCache, layer: int, q: Tensor, table: Tensor, context: int, window: int | None) -> Tensor:
    """The last tokens of one sequence, `q` `[tokens, heads, head_dim]`, over their part of its `context` tokens."""
    found, end = [], context - len(q)
    for block in q.split(max(1, _MASK_ELEMENTS // context)):
        TorchAttention.blocks += 1
        begin, end = end, end + len(block)
        first = 0 if window is None else max(0, begin - window + 1)
        k, v = (_read(kv.pages(part, layer), table, first, end).to(q.dtype) for part in (KEYS, VALUES))
        mask = None
        if len(block) > 1:
            queries, keys = (torch.arange(low, end, device=q.device) for low in (begin, first))
            distance = queries[:, None] - keys
            mask = (distance >= 0) & (distance < (window or context))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (block, k, v))
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _read(pages: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """The tokens from `first` to `end` of the sequence with that page table: `[tokens, kv_heads, head_dim]`."""
    size = pages.shape[1]
    skipped = first // size
    tokens = pages[table[skipped : -(-end // size)]].flatten(0, 1)
    return tokens[first - skipped * size : end - skipped * size]


def attend_segment(q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Computed in float32, or as it comes in float64, some queries at a time."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    (tokens, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    result = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=dtype, device=q.device)
    k, v = (x.to(dtype).transpose(0, 1).unsqueeze(1) for x in (k, v))
    size = max(1, _SCORES // (heads * keys))
    for begin in range(0, tokens, size):
        TorchAttention.blocks += 1
        end = min(begin + size, tokens)
        # The query heads of a KV head beside each other: [kv_heads, group, queries, dim].
        rows = (q[begin:end].to(dtype) * dim**-0.5).view(end - begin, kv_heads, -1, dim).permute(1, 2, 0, 3)
        scores = rows @ k.transpose(2, 3)
        if distance + begin < keys - 1 or (window is not None and distance + end - 1 >= window):
            positions = torch.arange(distance + begin, distance + end, device=q.device)
            apart = positions[:, None] - torch.arange(keys, device=q.device)
            scores.masked_fill_((apart < 0) | (apart >= (window or distance + end)), -torch.inf)
        # A query without keys: exponentials of -inf, not of -inf - -inf.
        highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        found = (weights @ v).div_(total.clamp(min=torch.finfo(dtype).tiny))
        result[begin:end] = found.permute(2, 0, 1, 3).reshape(end - begin, heads, dim)
        lse[begin:end] = (highest + total.log()).permute(2, 0, 1, 3).reshape(end - begin, heads)
    return result, lse
