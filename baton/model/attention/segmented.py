"""Attention over KV in host memory, segment by segment, merged by log-sum-exp.

Queries attend to one segment after the other. Each gives a result and the logarithm of its sum of exponentials, from
which the result over all of them follows (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021,
arXiv:2112.05682). While one segment is computed the next one is copied, the next layer's first one during this layer's
MLP. The new tokens' own K and V are on the device already, so they are not read from their pages.

Sequences whose pages are all on the device go to that device's backend, in the same forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.attention.backend import AttentionBackend
from baton.model.attention.batch import AttentionBatch, HostKv
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.segments import Segment, split


class SegmentedAttention:
    """`append` and `attend` of AttentionBackend, for one forward pass with KV in host memory."""

    def __init__(self, device: AttentionBackend, host: HostKv, windows: Sequence[int | None]) -> None:
        """`device` is the backend for KV on the device; it also computes the segments. `windows`: of all layers."""
        self._device = device
        self._host = host
        self._windows = windows
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        if (rest := batch.on_device) is not None:
            self._device.append(kv, layer, k[rest.tokens], v[rest.tokens], rest.batch)
        for row, pages in self._host.tables.items():
            tokens, context = batch.tokens_of(row), batch.context_lens[row]
            # As later passes read them from their pages: these may have another dtype.
            own_k, own_v = (part[tokens.start : tokens.stop].to(kv.dtype) for part in (k, v))
            self._new[row] = own_k, own_v
            self._host.source.store(layer, pages, range(context - len(tokens), context), own_k, own_v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """Each sequence's queries are the last of the tokens that it appended."""
        result = torch.empty_like(q)
        if (rest := batch.on_device) is not None:
            result[rest.tokens] = self._device.attend(kv, layer, q[rest.tokens], rest.batch, window)
        past = {row: self._past(layer, row, batch, window) for row in self._host.tables}
        order = deque(segment for segments in past.values() for segment in segments)
        order.extend(self._first_of(layer + 1, batch))
        for row, segments in past.items():
            tokens = batch.tokens_of(row)
            queries = q[tokens.start : tokens.stop]
            result[tokens.start : tokens.stop] = self._attend_row(queries, row, segments, order, batch, window)
        if order:
            self._host.source.prefetch(order[0])
        return result

    def _attend_row(
        self,
        q: Tensor,
        row: int,
        segments: list[Segment],
        order: deque[Segment],
        batch: AttentionBatch,
        window: int | None,
    ) -> Tensor:
        """One sequence; `order` are the segments to read from here on, for all sequences."""
        k, v = self._new[row]
        source, begin = self._host.source, batch.context_lens[row] - len(q)
        merged = self._device.attend_segment(q, k, v, len(k) - len(q), window)
        for segment in segments:
            order.popleft()
            k, v = source.open(segment)
            if order:
                source.prefetch(order[0])
            found = self._device.attend_segment(q, k, v, begin - segment.tokens.start, window)
            source.close(segment)
            merged = merge(merged, found)
        return merged[0]

    def _first_of(self, layer: int, batch: AttentionBatch) -> list[Segment]:
        """The first segment that the layer will read, if there is one."""
        if layer == len(self._windows):
            return []
        past = (self._past(layer, row, batch, self._windows[layer]) for row in self._host.tables)
        return next((segments[:1] for segments in past if segments), [])

    def _past(self, layer: int, row: int, batch: AttentionBatch, window: int | None) -> list[Segment]:
        """The segments before the row's new tokens that any of its queries sees."""
        new = batch.context_lens[row] - len(self._new[row][0])
        query = batch.context_lens[row] - batch.query_lens[row]
        seen = range(0 if window is None else max(0, query - window + 1), new)
        return split(layer, row, self._host.tables[row], seen, self._host.source.size) if seen else []


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Results and log-sum-exps over two disjoint sets of keys, to those over both; each query sees a key of `one`.

    The result of `one` is overwritten: for a chunk it is large, and reading and writing it takes time. The share of
    `other` is exp(its lse) / (exp(its lse) + exp(lse of one)).
    """
    share = (other[1] - one[1]).sigmoid_()
    return one[0].lerp_(other[0], share.unsqueeze(-1)), torch.logaddexp(one[1], other[1])
