"""The reference backend: a loop over tokens and heads in float32, to be read, not run in service."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache


class ReferenceAttention:
    """Results that every backend must equal."""

    name = "reference"

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        for token, (page, offset) in enumerate(self._places(batch)):
            kv.pages(KEYS, layer)[page, offset] = k[token].to(kv.dtype)
            kv.pages(VALUES, layer)[page, offset] = v[token].to(kv.dtype)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """See AttentionBackend."""
        out = torch.empty_like(q)
        group = q.shape[1] // kv.kv_heads
        token = 0
        sequences = zip(batch.page_tables, batch.query_lens, batch.context_lens, strict=True)
        for table, query, context in sequences:
            keys = kv.pages(KEYS, layer)[table.long()].flatten(0, 1).float()
            values = kv.pages(VALUES, layer)[table.long()].flatten(0, 1).float()
            for last in range(context - query, context):
                first = 0 if window is None else max(0, last - window + 1)
                for head in range(q.shape[1]):
                    seen = keys[first : last + 1, head // group]
                    weights = (seen @ q[token, head].float() * q.shape[2] ** -0.5).softmax(dim=0)
                    out[token, head] = weights @ values[first : last + 1, head // group]
                token += 1
        return out

    @staticmethod
    def _places(batch: AttentionBatch) -> list[tuple[int, int]]:
        sequences = zip(batch.page_tables, batch.query_lens, batch.context_lens, strict=True)
        return [
            (int(table[position // batch.page_size]), position % batch.page_size)
            for table, query, context in sequences
            for position in range(context - query, context)
        ]
