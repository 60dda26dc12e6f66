"""Attention of sequences with one new token each.

They are computed in groups, padded to the longest of each. Small groups take one fused kernel, whose call is
cheap; large ones two batched matmuls with a softmax between, which need a quarter less time on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.attention import torch_kernel
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.scratch import Scratch

_GROUP_COST = 2048
"""Gathered slots that take as long as one more group."""

_GROUP_SLOTS = 65536
"""Most slots that a group of several sequences gathers: bounds scratch memory."""

_FUSED_SLOTS = 4096
"""Most gathered slots for which the fused kernel is the faster one."""

_STRIDE = 32
"""Gathered lengths are multiples of it, since each new shape costs oneDNN milliseconds for its kernels."""


@dataclass(frozen=True)
class Group:
    """n sequences computed together, gathered to S keys each.

    `tokens`: int64 `[n]`. `places`: int32, slots `[n * S]` if `fused`, rows `[n * kv_heads * S]` if not.
    `bias`: 0, or -inf where padded, `[n, 1, 1, S - first]` for the keys from `first` on; None if nothing is padded.
    """

    tokens: Tensor
    places: Tensor
    length: int
    first: int
    bias: Tensor | None
    fused: bool
    scratch: Scratch

    def attend(self, kv: KvCache, layer: int, q: Tensor) -> Tensor:
        """`q` `[n, heads, head_dim]`; same shape back."""
        queries = q.unflatten(1, (kv.kv_heads, -1))
        return (self._fused if self.fused else self._batched)(kv, layer, queries).flatten(1, 2)

    def _fused(self, kv: KvCache, layer: int, q: Tensor) -> Tensor:
        shape = (q.shape[0], self.length, kv.kv_heads, kv.head_dim)
        keys = self._gather(kv, "k", layer, "keys", q).view(shape).transpose(1, 2)
        values = self._gather(kv, "v", layer, "values", q).view(shape).transpose(1, 2)
        return torch_kernel.attend(q, keys, values, self.bias)[0]

    def _batched(self, kv: KvCache, layer: int, q: Tensor) -> Tensor:
        count, heads, group, head_dim = q.shape
        folded = q.reshape(count * heads, group, head_dim)
        keys = self._gather(kv, "k", layer, "keys", q).view(count * heads, -1, head_dim)
        scores = self.scratch.take("scores", (count * heads, group, self.length), q)
        torch.baddbmm(scores, folded, keys.transpose(1, 2), beta=0, alpha=head_dim**-0.5, out=scores)
        if self.bias is not None:
            scores.view(count, heads, group, -1)[..., self.first :] += self.bias
        # The kernel computes a softmax of bfloat16 in float32 and rounds at the end.
        torch.softmax(scores, dim=-1, out=scores)
        values = self._gather(kv, "v", layer, "keys", q).view(count * heads, -1, head_dim)
        return torch.bmm(scores, values).view(count, heads, group, head_dim)

    def _gather(self, kv: KvCache, part: str, layer: int, name: str, q: Tensor) -> Tensor:
        width = kv.kv_heads * kv.head_dim if self.fused else kv.head_dim
        buffer = self.scratch.take(name, (len(self.places), width), q)
        kv.gather(part, layer, self.places, buffer)
        return buffer


def plan(kv: KvCache, q: Tensor, batch: AttentionBatch, window: int | None, scratch: Scratch) -> list[Group]:
    """The groups of a batch's sequences that have one new token; of `q` only dtype and device are read."""
    spans = [context if window is None else min(window, context) for context in batch.context_lens]
    ones = [sequence for sequence, query in enumerate(batch.query_lens) if query == 1]
    return [_group(kv, q, batch, members, spans, scratch) for members in group_by_length(ones, spans)]


def group_by_length(sequences: Sequence[int], spans: Sequence[int]) -> list[list[int]]:
    """Split `sequences` so that a group's padding costs no more than another group would; longest first."""
    groups: list[list[int]] = []
    padding = 0
    for sequence in sorted(sequences, key=lambda sequence: -spans[sequence]):
        if groups:
            longest = spans[groups[-1][0]]
            padding += longest - spans[sequence]
        if not groups or padding > _GROUP_COST or longest * (len(groups[-1]) + 1) > _GROUP_SLOTS:
            groups.append([])
            padding = 0
        groups[-1].append(sequence)
    return groups


def _group(
    kv: KvCache, q: Tensor, batch: AttentionBatch, members: list[int], spans: Sequence[int], scratch: Scratch
) -> Group:
    members = sorted(members)
    longest, first = max(spans[member] for member in members), min(spans[member] for member in members)
    length = -(-longest // _STRIDE) * _STRIDE
    ends = torch.tensor([batch.context_lens[member] for member in members])
    lengths = torch.tensor([spans[member] for member in members])
    steps = torch.arange(length)
    padding = steps >= lengths[:, None]
    positions = (ends - lengths)[:, None] + steps.masked_fill(padding, 0)
    device = batch.device
    slots = batch.slots_of(torch.tensor(members, device=device), positions.to(device)).int()
    fused = device.type == "cpu" and slots.numel() <= _FUSED_SLOTS
    if fused:
        first = 0
    bias = None
    if first < length:
        bias = torch.zeros(padding.shape).masked_fill_(padding, float("-inf"))[:, None, None, first:]
    return Group(
        tokens=torch.tensor([batch.query_starts[member] for member in members], device=device),
        places=(slots if fused else kv.rows(slots)).flatten(),
        length=length,
        first=first,
        bias=None if bias is None else bias.to(device, q.dtype),
        fused=fused,
        scratch=scratch,
    )
