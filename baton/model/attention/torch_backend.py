"""Attention on torch's own operators, on any device.

Sequences with one new token are computed together, in groups of like length (`torch_decode`); chunks a
sequence at a time, in blocks of queries (`torch_prefill`). K and V are copied out of the pages into a workspace
(`gathered`), and never repeated: the query group of each KV head becomes rows of one matmul.

What is copied is exactly a sequence's tokens, and padding repeats its own keys, so no sequence ever reads what is not
its own: a NaN left in a freed page can't reach another request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention import torch_decode, torch_prefill
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.workspace import Workspace


class TorchAttention:
    """See the module's text."""

    name = "torch"

    def __init__(self) -> None:
        self._workspace = Workspace()

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        slots = batch.slots
        kv.write(KEYS, layer, slots, k)
        kv.write(VALUES, layer, slots, v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """See AttentionBackend."""
        if window is not None and window >= max(batch.context_lens):
            window = None
        groups, chunks = batch.derive((self.name, window), lambda: self._plan(kv, q, batch, window))
        if not chunks and len(groups) == 1 and groups[0].in_order:
            return groups[0].attend(layer, q, kv.kv_heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in groups:
            out.index_copy_(0, group.tokens, group.attend(layer, q.index_select(0, group.tokens), kv.kv_heads))
        for chunk in chunks:
            chunk.attend(kv, layer, q[chunk.tokens], out[chunk.tokens])
        return out

    def _plan(
        self, kv: KvCache, q: Tensor, batch: AttentionBatch, window: int | None
    ) -> tuple[list[torch_decode.DecodeGroup], list[torch_prefill.PrefillChunk]]:
        chunks = [
            torch_prefill.plan(kv, q, batch, sequence, window, self._workspace)
            for sequence, query in enumerate(batch.query_lens)
            if query > 1
        ]
        return torch_decode.plan(kv, q, batch, window, self._workspace), chunks
