"""Attention of a chunk: several consecutive new tokens of one sequence.

Queries are taken in blocks. The keys that all queries of a block see, its *middle*, are attended without a
mask; the *edges*, the block's own keys and, with a sliding window, those that leave it within the block, with
one. The two are merged by their log-sum-exps. Nothing before the window is read. On CPU the unmasked kernel
is bound by its exponentials, and a mask over everything costs a third more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention import torch_kernel
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.gathered import GatheredKv
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.workspace import Workspace

_LONG_BLOCK = 512
"""Queries a block where the past is longer than that: K and V of a middle are packed once a block."""

_FOLDED_ROWS = 768
"""Rows (queries times query group) that a shorter block should have: torch's kernel takes 256 at a time then."""


@dataclass(frozen=True)
class PrefillChunk:
    """One sequence's new tokens, in n blocks of B queries, the last padded.

    `tokens`: their range among all. `middle`: M keys, none if no block has any, and in `ranges` those of each block
    (low >= high where it has none). `edges`: E keys of each block. `mask`: `[n or 1, 1, B * group, E]`, of q's dtype.
    """

    tokens: slice
    block: int
    middle: GatheredKv | None
    ranges: tuple[tuple[int, int], ...]
    edges: GatheredKv
    mask: Tensor

    def attend(self, kv: KvCache, layer: int, q: Tensor, out: Tensor) -> None:
        """`q` and `out` `[T, heads, head_dim]`."""
        count = len(self.ranges)
        folded = self._fold(q, count, kv.kv_heads)
        found, lse = torch_kernel.attend(
            folded, self.edges.load(KEYS, layer, q), self.edges.load(VALUES, layer, q), self.mask
        )
        if self.middle is not None:
            keys, values = self.middle.load(KEYS, layer, q), self.middle.load(VALUES, layer, q)
        for index, (low, high) in enumerate(self.ranges):
            target = out[index * self.block : (index + 1) * self.block].unflatten(1, (kv.kv_heads, -1))
            edge = self._by_token(found[index], target)
            if low >= high:
                target.copy_(edge)
                continue
            middle, middle_lse = torch_kernel.attend(
                folded[index : index + 1], keys[:, :, low:high], values[:, :, low:high], None
            )
            weight = torch_kernel.weight(lse[index], middle_lse[0])[..., None].to(q.dtype)
            torch.lerp(self._by_token(middle[0], target), edge, self._by_token(weight, target), out=target)

    def _fold(self, q: Tensor, count: int, kv_heads: int) -> Tensor:
        """The query group as rows: `[T, heads, head_dim]` to `[n, kv_heads, B * group, head_dim]`, padded."""
        missing = count * self.block - q.shape[0]
        padded = F.pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
        blocks = padded.unflatten(1, (kv_heads, -1)).unflatten(0, (count, self.block))
        folded: Tensor = blocks.transpose(1, 2).flatten(2, 3)
        return folded

    def _by_token(self, folded: Tensor, target: Tensor) -> Tensor:
        """`[kv_heads, B * group, x]` as `[size, kv_heads, group, x]`, a view, for the tokens of `target`."""
        size, kv_heads, group, _ = target.shape
        return folded.view(kv_heads, self.block, group, -1).transpose(0, 1)[:size]


def plan(
    kv: KvCache, q: Tensor, batch: AttentionBatch, sequence: int, window: int | None, workspace: Workspace
) -> PrefillChunk:
    """The chunk of one sequence of the batch; of `q` only its heads, dtype and device are read."""
    context, tokens = batch.context_lens[sequence], batch.query_lens[sequence]
    past, group = context - tokens, q.shape[1] // kv.kv_heads
    size = min(tokens, _block(past, group))
    firsts = range(past, context, size)
    reach = None if window is None or window >= context else window
    seen = [(0 if reach is None else max(0, first + size - reach), first) for first in firsts]
    lowest = min((low for low, high in seen if low < high), default=0)
    highest = max((high for low, high in seen if low < high), default=0)
    keys, mask = _edges(firsts, size, reach)
    middle = None
    if lowest < highest:
        middle = GatheredKv(kv, _slots(batch, sequence, torch.arange(lowest, highest)), 1, workspace)
    return PrefillChunk(
        tokens=slice(batch.query_starts[sequence], batch.query_starts[sequence + 1]),
        block=size,
        middle=middle,
        ranges=tuple((low - lowest, high - lowest) for low, high in seen),
        edges=GatheredKv(kv, _slots(batch, sequence, keys.clamp(0, context - 1)), len(firsts), workspace),
        mask=mask[:, None].repeat_interleave(group, dim=2).to(q.device, q.dtype),
    )


def _block(past: int, group: int) -> int:
    """Queries a block: few enough that a mask hides little, enough to fill the kernel."""
    size = 64
    while size * group < _FOLDED_ROWS or (past >= _LONG_BLOCK and size < _LONG_BLOCK):
        size *= 2
    return size


def _edges(firsts: range, size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Positions of the edge keys of blocks at `firsts` `[n * E]`, some outside the context, and the masks.

    Masks are float32 `[n, size, E]`, or `[1, size, E]` where all blocks have the same.
    """
    first = torch.tensor(firsts)[:, None]
    queries = first + torch.arange(size)
    keys = queries
    if window is not None:
        keys = torch.cat([first - window + 1 + torch.arange(min(window, size) - 1), queries], dim=1)
    if window is None or firsts[0] >= window - 1:
        queries, first = queries[:1], first[:1]
    shown = keys[: len(first), None]
    hidden = (shown > queries[..., None]) | (shown < 0)
    if window is not None:
        hidden |= shown <= queries[..., None] - window
    return keys.flatten(), torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _slots(batch: AttentionBatch, sequence: int, positions: Tensor) -> Tensor:
    """The slots of `positions` `[n]` of one sequence, int32."""
    sequences = torch.tensor([sequence], device=batch.device)
    return batch.slots_of(sequences, positions[None].to(batch.device))[0].int()
