"""The contract of attention backends."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache


class AttentionBackend(Protocol):
    """Causal attention of new tokens over their sequences' pages. Stateless; all state is in the cache.

    Scores are scaled by head_dim ** -0.5. Query head h reads KV head h // (heads / kv_heads).
    """

    name: str

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Write the new tokens' `k` and `v`, `[T, kv_heads, head_dim]` each, into their pages."""
        ...

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        """Attend with `q` `[T, heads, head_dim]` over what was appended so far; same shape and dtype back.

        A token sees positions up to its own; with `window` W only the latest W of them, its own included.
        """
        ...
