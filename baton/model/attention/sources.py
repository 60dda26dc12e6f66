"""Where the torch backend has a sequence's K and V from: read where they lie, or copied out of the pages.

Where the pages of a sequence follow each other, its tokens do too, and K and V are a view of the pool. What is read is
exactly its tokens: the rest of its last page may hold what another has left there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.model.attention.batch import AttentionBatch
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.scratch import Scratch


class Source(Protocol):
    """K and V of n groups of S keys."""

    def load(self, part: str, layer: int, q: Tensor) -> Tensor:
        """`[n, kv_heads, S or more, head_dim]` of q's dtype, the last dimension contiguous.

        What was loaded before, the other part apart, may be lost.
        """
        ...


@dataclass(frozen=True)
class InPlace:
    """K and V of `count` times `length` slots from `first` on, where they lie."""

    kv: KvCache
    first: int
    count: int
    length: int

    @classmethod
    def of(
        cls, kv: KvCache, q: Tensor, batch: AttentionBatch, sequence: int, positions: range, count: int = 1
    ) -> InPlace | None:
        """Those of `positions`, 1 or more, of a sequence of the batch, in `count` groups; None if they must be copied.

        On CPU only: elsewhere the host would wait for the page tables.
        """
        if batch.device.type != "cpu" or kv.dtype != q.dtype:
            return None
        first = batch.run(sequence, positions)
        return None if first is None else cls(kv, first, count, len(positions) // count)

    def load(self, part: str, layer: int, q: Tensor) -> Tensor:
        """See Source."""
        return self.kv.run(part, layer, self.first, self.count, self.length)


@dataclass(frozen=True)
class Gathered:
    """Copied from `places`: slots `[n * S]`, or rows `[n * kv_heads * S]` if it must be `contiguous`; int32."""

    kv: KvCache
    places: Tensor
    count: int
    scratch: Scratch
    contiguous: bool = False

    def load(self, part: str, layer: int, q: Tensor) -> Tensor:
        """See Source; what is contiguous is lost also when the other part is loaded."""
        heads, head_dim = self.kv.kv_heads, self.kv.head_dim
        width = head_dim if self.contiguous else heads * head_dim
        # Who wants it contiguous is done with K when it takes V, which then goes where K is in the processor's cache.
        buffer = self.scratch.take("gathered" if self.contiguous else f"gathered {part}", (len(self.places), width), q)
        self.kv.gather(part, layer, self.places, buffer)
        if self.contiguous:
            return buffer.view(self.count, heads, -1, head_dim)
        return buffer.view(self.count, -1, heads, head_dim).transpose(1, 2)
