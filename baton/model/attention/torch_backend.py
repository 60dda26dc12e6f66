"""Attention on torch's own operators, on any device.

Sequences with one new token are computed together: their rows are gathered into a padded batch, the query
group of each KV head becomes the rows of one matmul (K and V are never repeated), and the softmax is float32.
Sequences are grouped so that at least half of a gathered batch is context in use. Longer chunks are computed
a sequence at a time with `scaled_dot_product_attention`, in blocks of queries, so that masks stay small and
keys outside a sliding window are never gathered.

Padding repeats a sequence's own first key, so no sequence ever reads a page that is not its own: a NaN left
in a freed page can't reach another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache

_QUERY_BLOCK = 512
"""Queries a masked block: bounds a mask to 512 x context, and skipped work to half a block."""


@dataclass(frozen=True)
class _Group:
    """Decode sequences computed together: tokens `[n]`, rows `[n * kv_heads, S]`, bias `[n, 1, S]`."""

    tokens: Tensor
    rows: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """One sequence with several new tokens: their range among all, and its visible rows `[kv_heads, S]`."""

    tokens: slice
    start: int  # position of the first new token, counted from the first visible key
    rows: Tensor


class TorchAttention:
    """See the module's text."""

    name = "torch"

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        kv.write("k", layer, batch.slots, k)
        kv.write("v", layer, batch.slots, v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """See AttentionBackend."""
        groups, chunks = batch.derive((self.name, window), lambda: _plan(kv, batch, window))
        if len(groups) == 1 and not chunks:
            return _decode(kv, layer, q, groups[0])
        out = torch.empty_like(q)
        for group in groups:
            out[group.tokens] = _decode(kv, layer, q[group.tokens], group)
        for chunk in chunks:
            out[chunk.tokens] = _prefill(kv, layer, q[chunk.tokens], chunk, window)
        return out


def _plan(kv: KvCache, batch: AttentionBatch, window: int | None) -> tuple[list[_Group], list[_Chunk]]:
    spans = [context if window is None else min(window, context) for context in batch.context_lens]
    ones = [sequence for sequence, query in enumerate(batch.query_lens) if query == 1]
    more = [sequence for sequence, query in enumerate(batch.query_lens) if query > 1]
    groups = [_group(kv, batch, members, spans) for members in group_by_length(ones, spans)]
    return groups, [_chunk(kv, batch, sequence, window) for sequence in more]


def group_by_length(sequences: Sequence[int], spans: Sequence[int]) -> list[list[int]]:
    """Split `sequences` into groups whose shortest span is at least half of their longest."""
    groups: list[list[int]] = []
    for sequence in sorted(sequences, key=lambda sequence: -spans[sequence]):
        if not groups or 2 * spans[sequence] < spans[groups[-1][0]]:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _group(kv: KvCache, batch: AttentionBatch, members: list[int], spans: Sequence[int]) -> _Group:
    members = sorted(members)
    sequences = torch.tensor(members)
    ends = torch.tensor([batch.context_lens[member] for member in members])
    lengths = torch.tensor([spans[member] for member in members])
    steps = torch.arange(int(lengths.max()))
    padding = steps >= lengths[:, None]
    positions = (ends - lengths)[:, None] + steps.masked_fill(padding, 0)
    device = batch.device
    slots = batch.slots_of(sequences.to(device), positions.to(device))
    bias = None
    if padding.any():
        bias = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))[:, None].to(device)
    tokens = torch.tensor([batch.query_starts[member] for member in members]).to(device)
    return _Group(tokens, kv.rows(slots).flatten(0, 1), bias)


def _chunk(kv: KvCache, batch: AttentionBatch, sequence: int, window: int | None) -> _Chunk:
    context, query = batch.context_lens[sequence], batch.query_lens[sequence]
    first = 0 if window is None else max(0, context - query - window + 1)
    positions = torch.arange(first, context, device=batch.device)[None]
    slots = batch.slots_of(torch.tensor([sequence], device=batch.device), positions)
    tokens = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
    return _Chunk(tokens, context - query - first, kv.rows(slots[0]))


def _decode(kv: KvCache, layer: int, q: Tensor, group: _Group) -> Tensor:
    """`q` `[n, heads, head_dim]`, one token a sequence."""
    count, heads, head_dim = q.shape
    keys = kv.gather("k", layer, group.rows, q.dtype)
    values = kv.gather("v", layer, group.rows, q.dtype)
    folded = (q * head_dim**-0.5).reshape(count * kv.kv_heads, heads // kv.kv_heads, head_dim)
    scores = torch.bmm(folded, keys.transpose(1, 2)).float().view(count, heads, -1)
    if group.bias is not None:
        scores += group.bias
    weights = scores.softmax(dim=-1).to(q.dtype).view(count * kv.kv_heads, heads // kv.kv_heads, -1)
    return torch.bmm(weights, values).view(count, heads, head_dim)


def _prefill(kv: KvCache, layer: int, q: Tensor, chunk: _Chunk, window: int | None) -> Tensor:
    """`q` `[t, heads, head_dim]`, consecutive tokens of one sequence."""
    tokens, heads, head_dim = q.shape
    group = heads // kv.kv_heads
    # KV heads are the batch, and stride 0 shows each to its query group without a copy.
    keys = kv.gather("k", layer, chunk.rows, q.dtype)[:, None].expand(-1, group, -1, -1)
    values = kv.gather("v", layer, chunk.rows, q.dtype)[:, None].expand(-1, group, -1, -1)
    queries = q.view(tokens, kv.kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if chunk.start == 0 and (window is None or window >= tokens):
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return found.permute(2, 0, 1, 3).reshape(q.shape)
    out = torch.empty_like(q)
    for begin in range(0, tokens, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, tokens)
        low = 0 if window is None else max(0, chunk.start + begin - window + 1)
        high = chunk.start + end
        seen = torch.arange(low, high, device=q.device)
        distance = torch.arange(chunk.start + begin, high, device=q.device)[:, None] - seen
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        found = F.scaled_dot_product_attention(
            queries[:, :, begin:end], keys[:, :, low:high], values[:, :, low:high], attn_mask=mask
        )
        out[begin:end] = found.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim)
    return out
