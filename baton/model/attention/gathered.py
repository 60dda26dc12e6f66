"""K and V of sequences, copied out of the pages into a workspace, in each forward pass that reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.model.attention.kv_cache import KvCache
from baton.model.attention.workspace import Workspace


@dataclass(frozen=True)
class GatheredKv:
    """K and V of `count` groups of S keys each, from `slots` (int32 `[count * S]`)."""

    kv: KvCache
    slots: Tensor
    count: int
    workspace: Workspace

    def load(self, part: str, layer: int, q: Tensor) -> Tensor:
        """`[count, kv_heads, S, head_dim]` of q's dtype, the last dimension contiguous.

        What was loaded before, the other part apart, is lost.
        """
        shape = (len(self.slots), self.kv.kv_heads, self.kv.head_dim)
        buffer = self.workspace.take(f"gathered {part}", shape, q)
        self.kv.gather(part, layer, self.slots, buffer)
        gathered: Tensor = buffer.unflatten(0, (self.count, -1))
        return gathered.transpose(1, 2)
