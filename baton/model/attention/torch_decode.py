"""Attention of sequences with one new token each.

They are computed in groups, padded to the longest of each; padding repeats a sequence's own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention import torch_kernel
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.gathered import GatheredKv
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.workspace import Workspace

GROUP_COST = 2048
"""Slots that take as long to read as one more group of sequences does."""

_GROUP_SLOTS = 65536
"""Most slots that a group of several sequences gathers: bounds a workspace."""


@dataclass(frozen=True)
class DecodeGroup:
    """n sequences computed together, over S keys each.

    `tokens`: int64 `[n]`; `in_order`: they are 0 to n - 1. `bias`: 0, or -inf where padded, `[n, 1, 1, S]`; None if
    nothing is padded.
    """

    tokens: Tensor
    in_order: bool
    source: GatheredKv
    bias: Tensor | None

    def attend(self, layer: int, q: Tensor, kv_heads: int) -> Tensor:
        """`q` `[n, heads, head_dim]`; same shape back."""
        keys, values = (self.source.load(part, layer, q) for part in (KEYS, VALUES))
        return torch_kernel.attend(q.unflatten(1, (kv_heads, -1)), keys, values, self.bias)[0].flatten(1, 2)


def plan(kv: KvCache, q: Tensor, batch: AttentionBatch, window: int | None, workspace: Workspace) -> list[DecodeGroup]:
    """The groups of a batch's sequences that have one new token; of `q` only dtype and device are read."""
    spans = [context if window is None else min(window, context) for context in batch.context_lens]
    ones = [sequence for sequence, query in enumerate(batch.query_lens) if query == 1]
    return [_group(kv, q, batch, sorted(members), spans, workspace) for members in group_by_length(ones, spans)]


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


def _group(
    kv: KvCache, q: Tensor, batch: AttentionBatch, members: list[int], spans: Sequence[int], workspace: Workspace
) -> DecodeGroup:
    lengths = torch.tensor([spans[member] for member in members])
    begins = torch.tensor([batch.context_lens[member] - spans[member] for member in members])
    steps = torch.arange(int(lengths.max()))
    padding = steps >= lengths[:, None]
    positions = begins[:, None] + steps.masked_fill(padding, 0)
    slots = batch.slots_of(torch.tensor(members, device=batch.device), positions.to(batch.device)).int()
    tokens = [batch.query_starts[member] for member in members]
    bias = None
    if padding.any():
        bias = torch.zeros(padding.shape).masked_fill_(padding, float("-inf"))[:, None, None].to(q.device, q.dtype)
    return DecodeGroup(
        tokens=torch.tensor(tokens, device=q.device),
        in_order=tokens == list(range(len(tokens))),
        source=GatheredKv(kv, slots.flatten(), len(members), workspace),
        bias=bias,
    )
