"""Attention of sequences with one new token each.

They are computed in groups, padded to the longest of each: those that have working copies (`resident`) by the bucket,
others gathered from their pages. A group of one reads its pages in place where it can, whatever the length: each step
then has another shape, which costs the fused kernel nothing. For two or more a kernel call each costs more than copies.
Small groups take one fused kernel, whose call is cheap; large ones two batched
matmuls with a softmax between, which need a quarter less time on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.attention import torch_kernel
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.resident import GROUP_COST, Share
from baton.model.attention.scratch import Scratch
from baton.model.attention.sources import Gathered, InPlace, Source

_GROUP_SLOTS = 65536
"""Most slots that a group of several sequences gathers: bounds scratch memory."""

_FUSED_SLOTS = 4096
"""Most slots for which the fused kernel is the faster one."""

_STRIDE = 32
"""Gathered lengths are multiples of it, since each new shape costs oneDNN milliseconds for its kernels."""


@dataclass(frozen=True)
class Group:
    """n sequences computed together, over S keys each.

    `tokens`: int64 `[n]`; `in_order`: they are 0 to n - 1. `bias`: 0, or -inf where padded, `[n, 1, 1, S - first]` for
    the keys from `first` on; None if nothing is padded. One that is not `fused` wants S contiguous keys of `source`.
    """

    tokens: Tensor
    in_order: bool
    source: Source
    length: int
    first: int
    bias: Tensor | None
    fused: bool
    scratch: Scratch

    def attend(self, layer: int, q: Tensor, kv_heads: int) -> Tensor:
        """`q` `[n, heads, head_dim]`; same shape back."""
        queries = q.unflatten(1, (kv_heads, -1))
        return (self._fused if self.fused else self._batched)(layer, queries).flatten(1, 2)

    def _fused(self, layer: int, q: Tensor) -> Tensor:
        keys, values = (self.source.load(part, layer, q)[:, :, : self.length] for part in ("k", "v"))
        return torch_kernel.attend(q, keys, values, self.bias)[0]

    def _batched(self, layer: int, q: Tensor) -> Tensor:
        count, heads, group, head_dim = q.shape
        folded = q.reshape(count * heads, group, head_dim)
        keys = self.source.load("k", layer, q).view(count * heads, self.length, head_dim)
        scores = self.scratch.take("scores", (count * heads, group, self.length), q)
        torch.baddbmm(scores, folded, keys.transpose(1, 2), beta=0, alpha=head_dim**-0.5, out=scores)
        if self.bias is not None:
            scores.view(count, heads, group, -1)[..., self.first :] += self.bias
        # The kernel computes a softmax of bfloat16 in float32 and rounds at the end.
        torch.softmax(scores, dim=-1, out=scores)
        values = self.source.load("v", layer, q).view(count * heads, self.length, head_dim)
        return torch.bmm(scores, values).view(count, heads, group, head_dim)


def plan(kv: KvCache, q: Tensor, batch: AttentionBatch, window: int | None, scratch: Scratch) -> list[Group]:
    """The groups of a batch's sequences that have one new token; of `q` only dtype and device are read."""
    spans = [context if window is None else min(window, context) for context in batch.context_lens]
    ones = [sequence for sequence, query in enumerate(batch.query_lens) if query == 1]
    groups: list[Group] = []
    if batch.resident is not None and window is None:
        shares, ones = batch.resident.plan(batch, q)
        for share in shares:
            alone = _alone(kv, q, batch, share.sequences, spans, scratch)
            if alone is not None:
                share.skip()
            groups.append(alone or _resident(share, batch, q, scratch))
    return groups + [
        _alone(kv, q, batch, members, spans, scratch) or _gathered(kv, q, batch, members, spans, scratch)
        for members in group_by_length(ones, spans)
    ]


def group_by_length(sequences: Sequence[int], spans: Sequence[int]) -> list[list[int]]:
    """Split `sequences` so that a group's padding costs no more than another group would; longest first."""
    groups: list[list[int]] = []
    padding = 0
    for sequence in sorted(sequences, key=lambda sequence: -spans[sequence]):
        if groups:
            longest = spans[groups[-1][0]]
            padding += longest - spans[sequence]
        if not groups or padding > GROUP_COST or longest * (len(groups[-1]) + 1) > _GROUP_SLOTS:
            groups.append([])
            padding = 0
        groups[-1].append(sequence)
    return groups


def _alone(
    kv: KvCache, q: Tensor, batch: AttentionBatch, members: Sequence[int], spans: Sequence[int], scratch: Scratch
) -> Group | None:
    """The group of a single sequence, if its K and V can be read where they lie."""
    if len(members) > 1:
        return None
    (member,) = members
    context, length = batch.context_lens[member], spans[member]
    source = InPlace.of(kv, q, batch, member, range(context - length, context))
    if source is None:
        return None
    return _group(source, [batch.query_starts[member]], [length], length, True, q, scratch)


def _resident(share: Share, batch: AttentionBatch, q: Tensor, scratch: Scratch) -> Group:
    contexts = [batch.context_lens[sequence] for sequence in share.sequences]
    length = -(-max(contexts) // _STRIDE) * _STRIDE
    fused = len(contexts) * length <= _FUSED_SLOTS
    return _group(share, share.sequences, contexts, length if fused else share.bucket.capacity, fused, q, scratch)


def _gathered(
    kv: KvCache, q: Tensor, batch: AttentionBatch, members: list[int], spans: Sequence[int], scratch: Scratch
) -> Group:
    members = sorted(members)
    lengths = [spans[member] for member in members]
    length = -(-max(lengths) // _STRIDE) * _STRIDE
    begins = torch.tensor([batch.context_lens[member] - spans[member] for member in members])
    steps = torch.arange(length)
    positions = begins[:, None] + steps.masked_fill(steps >= torch.tensor(lengths)[:, None], 0)
    device = batch.device
    slots = batch.slots_of(torch.tensor(members, device=device), positions.to(device)).int()
    fused = device.type == "cpu" and slots.numel() <= _FUSED_SLOTS
    source = Gathered(kv, (slots if fused else kv.rows(slots)).flatten(), len(members), scratch, not fused)
    return _group(source, [batch.query_starts[member] for member in members], lengths, length, fused, q, scratch)


def _group(
    source: Source,
    tokens: Sequence[int],
    lengths: Sequence[int],
    padded: int,
    fused: bool,
    q: Tensor,
    scratch: Scratch,
) -> Group:
    """Of sequences with `lengths` keys, `padded` to one length."""
    first = 0 if fused else min(lengths)
    bias = None
    if min(lengths) < padded:
        padding = torch.arange(first, padded) >= torch.tensor(lengths)[:, None]
        bias = torch.zeros(padding.shape).masked_fill_(padding, float("-inf"))[:, None, None].to(q.device, q.dtype)
    return Group(
        tokens=torch.tensor(tokens, device=q.device),
        in_order=list(tokens) == list(range(len(tokens))),
        source=source,
        length=padded,
        first=first,
        bias=bias,
        fused=fused,
        scratch=scratch,
    )
