"""The pool of KV pages of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.zeros import host_zeros


@dataclass(frozen=True, eq=False)
class KvCache:
    """Pages for all layers: a listed set of parts, each `[layers, pages, page_size, kv_heads, head_dim]`.

    Who owns which page is decided elsewhere; this is memory. A *slot* is one token's place
    (page * page_size + offset).
    """

    parts: dict[str, Tensor]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvCache:
        """A pool with keys and values; zeroed, and committed now, or soon on a CPU, so not in mid-request."""
        shape = (num_layers, num_pages, page_size, kv_heads, head_dim)
        if device.type == "cpu":
            return cls({name: host_zeros(shape, dtype) for name in (KEYS, VALUES)})
        return cls({name: torch.zeros(shape, dtype=dtype, device=device) for name in (KEYS, VALUES)})

    @property
    def num_layers(self) -> int:
        """Layers that have pages here."""
        return self._any.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, each of them in every layer and part."""
        return self._any.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._any.shape[2]

    @property
    def kv_heads(self) -> int:
        """KV heads of this worker's shard."""
        return self._any.shape[3]

    @property
    def head_dim(self) -> int:
        """Elements a head."""
        return self._any.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype; may differ from the compute dtype."""
        return self._any.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and parts."""
        return sum(part.nbytes // part.shape[1] for part in self.parts.values())

    @property
    def _any(self) -> Tensor:
        return next(iter(self.parts.values()))

    @cached_property
    def _slots(self) -> dict[str, tuple[Tensor, ...]]:
        """Each part's layers as `[slots, kv_heads, head_dim]`, views made once."""
        return {name: tuple(layer.flatten(0, 1) for layer in part) for name, part in self.parts.items()}

    def write(self, part: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Store `values` `[T, kv_heads, head_dim]` at `slots` (int64 `[T]`), cast to the storage dtype."""
        self._slots[part][layer].index_copy_(0, slots, values.to(self.dtype))

    def gather(self, part: str, layer: int, slots: Tensor, out: Tensor) -> None:
        """Copy what lies at `slots` (int32 or int64 `[n]`) into `out` `[n, kv_heads, head_dim]`, in its dtype."""
        source = self._slots[part][layer]
        if out.dtype == self.dtype:
            torch.index_select(source, 0, slots, out=out)
        else:
            out.copy_(source.index_select(0, slots))

    def pages(self, part: str, layer: int) -> Tensor:
        """One layer's pages `[pages, page_size, kv_heads, head_dim]`, for kernels that follow page tables."""
        return self.parts[part][layer]
