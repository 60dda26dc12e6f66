"""Working copies of running sequences' K and V on CPU, so that a step gathers no context.

    pages ──▶ a bucket's row: a whole context when its sequence joins, then the new token of each step
                 └─ a step's matmuls read the rows of a bucket in place

Pages stay what counts: a copy is made of them, is never written back, and may be dropped at any time. Sequences of
like length share a *bucket*, whose rows lie side by side and have one capacity. A row's places past its sequence
repeat the sequence's own first token, so what is multiplied by a weight of 0 is never another's, and no NaN but its
own.

A plan is made once a step. It drops the rows of sequences that the step does not have, finds places for new ones, and
says what each row lacks; each layer then copies that when it is attended. Plans are numbered, and each copy of a layer
knows the last one that it carried out. One that missed a plan is made anew: because a pass failed before it, or because
its sequence had the bucket for itself and was read in place (`sources`).

What is held of a sequence may not change in its pages, but for the last token, which a repeated step writes again. A
row whose sequence got shorter is made anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.scratch import Scratch

GROUP_COST = 2048
"""Slots that take as long to read as one more group of sequences does."""

_STRIDE = 64
"""Capacities are multiples of it, and of an eighth of the power of two below them."""

_COPIED_ROWS = 65536
"""Rows copied from pages at a time: bounds scratch memory."""


@dataclass(eq=False, slots=True)
class _Copy:
    """One layer's K or V of a bucket, `[rows, kv_heads, capacity, head_dim]`, as of plan number `plan`."""

    rows: Tensor
    plan: int


class Bucket:
    """Sequences that have a row each, of `capacity` tokens, `held` of them there. `room`: rows that are paid for."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.room = 0
        self.owners: list[Hashable] = []
        self.held: list[int] = []
        self.moves: list[tuple[int, int]] = []
        self.copies: dict[tuple[str, int], _Copy] = {}

    def remove(self, row: int) -> None:
        """The last row takes its place."""
        last = len(self.owners) - 1
        owner, held = self.owners.pop(), self.held.pop()
        if row < last:
            self.owners[row], self.held[row] = owner, held
            self.moves.append((last, row))

    def waste(self, contexts: dict[Hashable, int]) -> int:
        """Places of its rows that hold no token."""
        return sum(self.capacity - contexts[owner] for owner in self.owners)


@dataclass(frozen=True, eq=False)
class Share:
    """A bucket's part in one step: row i is that of `sequences[i]`, and lacks the tokens `missing[i]`."""

    kv: KvCache
    bucket: Bucket
    batch: AttentionBatch
    sequences: tuple[int, ...]
    missing: tuple[range, ...]
    plan: int
    scratch: Scratch

    def load(self, part: str, layer: int, q: Tensor) -> Tensor:
        """A layer's `part`, brought up to date: `[n, kv_heads, capacity, head_dim]` of q's dtype, contiguous."""
        copy = self.bucket.copies.get((part, layer))
        if copy is None:
            copy = self.bucket.copies[part, layer] = _Copy(self._empty(0, q), -1)
        anew = copy.plan < self.plan - 1
        if copy.plan == self.plan - 1:
            for source, target in self.bucket.moves:
                copy.rows[target] = copy.rows[source]
        if len(copy.rows) != self.bucket.room:
            rows = self._empty(self.bucket.room, q)
            kept = min(len(rows), len(copy.rows))
            rows[:kept] = copy.rows[:kept]
            copy.rows = rows
        flat = copy.rows.view(-1, self.kv.head_dim)
        for sources, targets in self._all if anew else self._new:
            buffer = self.scratch.take("copied", (len(sources), self.kv.head_dim), q)
            self.kv.gather(part, layer, sources, buffer)
            flat.index_copy_(0, targets, buffer)
        copy.plan = self.plan
        return copy.rows[: len(self.sequences)]

    def skip(self) -> None:
        """The rows are not read in this step: the copies would have to be made anew, and hold memory meanwhile."""
        self.bucket.copies.clear()

    def _empty(self, rows: int, q: Tensor) -> Tensor:
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(False):
            return torch.empty((rows, self.kv.kv_heads, self.bucket.capacity, self.kv.head_dim), dtype=q.dtype)

    @cached_property
    def _new(self) -> list[tuple[Tensor, Tensor]]:
        return self._places(self.missing)

    @cached_property
    def _all(self) -> list[tuple[Tensor, Tensor]]:
        return self._places([range(self.bucket.capacity)] * len(self.sequences))

    def _places(self, tokens: Sequence[range]) -> list[tuple[Tensor, Tensor]]:
        """Where `tokens` of each row lie in the pages and where they go, int64 rows of head_dim, in bounded pieces."""
        counts = torch.tensor([len(listed) for listed in tokens])
        rows = torch.repeat_interleave(torch.arange(len(tokens)), counts)
        before = torch.tensor([listed.start for listed in tokens]) - (counts.cumsum(0) - counts)
        positions = torch.arange(len(rows)) + before[rows]
        contexts = torch.tensor([self.batch.context_lens[sequence] for sequence in self.sequences])
        seen = positions.masked_fill(positions >= contexts[rows], 0)
        slots = self.batch.slots_of(torch.tensor(self.sequences)[rows], seen[:, None])
        heads = torch.arange(self.kv.kv_heads)
        sources = slots * self.kv.kv_heads + heads
        targets = (rows[:, None] * self.kv.kv_heads + heads) * self.bucket.capacity + positions[:, None]
        pieces = zip(sources.flatten().split(_COPIED_ROWS), targets.flatten().split(_COPIED_ROWS), strict=True)
        return list(pieces)


class ResidentKv:
    """The buckets of one engine's cache, in `limit` bytes or less. Belongs to the thread that computes steps."""

    def __init__(self, kv: KvCache, limit: int) -> None:
        self.kv = kv
        self._limit = limit
        self._buckets: list[Bucket] = []
        self._plans = 0
        self._scratch = Scratch()

    @property
    def allocated(self) -> int:
        """Bytes of all copies."""
        return sum(copy.rows.nbytes for bucket in self._buckets for copy in bucket.copies.values())

    def clear(self) -> None:
        """Drop all copies: what is wanted again is made anew from the pages."""
        self._buckets = []

    def plan(self, batch: AttentionBatch, q: Tensor) -> tuple[list[Share], list[int]]:
        """What a step over `batch` reads here, and the sequences that found no room; of `q` only the dtype is read.

        The shares are good until the next plan.
        """
        # First: if this raises, every copy has missed a plan.
        self._plans += 1
        contexts = dict(zip(batch.owners, batch.context_lens, strict=True))
        self._drop(contexts)
        self._place(contexts, q)
        sequence_of = {owner: sequence for sequence, owner in enumerate(batch.owners)}
        shares = [self._share(bucket, batch, sequence_of, contexts) for bucket in self._buckets]
        resident = {sequence for share in shares for sequence in share.sequences}
        return shares, [sequence for sequence in sequence_of.values() if sequence not in resident]

    def _drop(self, contexts: dict[Hashable, int]) -> None:
        """Remove rows of sequences that are not in the step, or have outgrown their bucket."""
        for bucket in self._buckets:
            bucket.moves.clear()
            for row in reversed(range(len(bucket.owners))):
                if not 0 < contexts.get(bucket.owners[row], 0) <= bucket.capacity:
                    bucket.remove(row)

    def _place(self, contexts: dict[Hashable, int], q: Tensor) -> None:
        """Give a row to each sequence that has none, the longest first, as far as there is room."""
        slot_bytes = len(self.kv.parts) * self.kv.num_layers * self.kv.kv_heads * self.kv.head_dim * q.element_size()
        slots = self._limit // slot_bytes
        rooms = {bucket: bucket.room for bucket in self._buckets}
        placed = {owner for bucket in self._buckets for owner in bucket.owners}
        joining = [owner for owner in contexts if owner not in placed]
        refused = False
        for owner in sorted(joining, key=lambda owner: -_capacity(contexts[owner])):
            bucket = self._bucket_for(contexts[owner], contexts, slots)
            refused |= bucket is None
            if bucket is not None:
                bucket.owners.append(owner)
                bucket.held.append(0)
        self._buckets = [bucket for bucket in self._buckets if bucket.owners]
        for bucket in self._buckets:
            rows, before = len(bucket.owners), rooms.get(bucket, 0)
            if bucket.room > 4 * rows:
                bucket.room = 2 * rows
            elif bucket.room > before and not refused:
                more = (slots - self._paid()) // bucket.capacity
                bucket.room += max(0, min(before + before // 2 - bucket.room, more))

    def _bucket_for(self, length: int, contexts: dict[Hashable, int], slots: int) -> Bucket | None:
        """The tightest bucket that may have a sequence of `length` without wasting more than a group costs."""
        wanted = _capacity(length)
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.capacity):
            if bucket.capacity < length:
                continue
            near = bucket.capacity <= wanted
            fits = bucket.owners and bucket.waste(contexts) + bucket.capacity - length <= GROUP_COST
            if (near or fits) and self._afford(bucket, slots):
                return bucket
        bucket = Bucket(wanted)
        if not self._afford(bucket, slots):
            return None
        self._buckets.append(bucket)
        return bucket

    def _afford(self, bucket: Bucket, slots: int) -> bool:
        """Have room for one more row, at the cost of the unused rows of all buckets if it must be."""
        if len(bucket.owners) < bucket.room:
            return True
        used = sum(len(other.owners) * other.capacity for other in self._buckets)
        if used + bucket.capacity > slots:
            return False
        if self._paid() + bucket.capacity > slots:
            for other in self._buckets:
                other.room = len(other.owners)
        bucket.room += 1
        return True

    def _paid(self) -> int:
        """Slots of all rooms."""
        return sum(bucket.room * bucket.capacity for bucket in self._buckets)

    def _share(
        self, bucket: Bucket, batch: AttentionBatch, sequence_of: dict[Hashable, int], contexts: dict[Hashable, int]
    ) -> Share:
        missing = []
        for row, owner in enumerate(bucket.owners):
            held, context = bucket.held[row], contexts[owner]
            anew = held == 0 or held > context
            # A step that is repeated writes its token again.
            missing.append(range(bucket.capacity) if anew else range(min(held, context - 1), context))
            bucket.held[row] = context
        sequences = tuple(sequence_of[owner] for owner in bucket.owners)
        return Share(self.kv, bucket, batch, sequences, tuple(missing), self._plans, self._scratch)


def _capacity(length: int) -> int:
    """A bucket's capacity for a sequence of `length` tokens."""
    step = max(_STRIDE, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
