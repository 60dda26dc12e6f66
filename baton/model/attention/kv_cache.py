"""The KV pages of one rank: a tensor for each part of the KV format, and one more for pages in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from baton.kv.format import KvPart
from baton.model.tensors import DTYPES
from baton.model.zeros import SharedMemory, host_zeros


@dataclass(frozen=True, eq=False)
class KvCache:
    """Pages for all layers, by part: `[layers, pages, page_size, kv_heads, ...]` each, in a dtype of its own.

    Who owns which page is decided elsewhere (`baton.kv.pool`); this is memory. A *slot* is one token's place
    (page * page_size + offset). `kv_heads`, `head_dim` and `dtype` are those of the first part, the keys.

    `host`: the same parts for pages from number `host_from` on, in host memory beside the device's. It is empty where
    `parts` has all pages.
    """

    parts: dict[str, Tensor]
    host: Mapping[str, Tensor] = field(default_factory=dict)
    host_from: int = 0

    @classmethod
    def allocate(
        cls,
        parts: Sequence[KvPart],
        *,
        num_layers: int,
        num_pages: int,
        host_pages: int = 0,
        page_size: int,
        device: torch.device,
        shared: SharedMemory | None = None,
    ) -> KvCache:
        """Pages with these parts, `num_pages` on the device and `host_pages` in host memory, by higher numbers.

        They are zeroed, and committed now, or soon on a CPU, so not in mid-request. On CUDA the last page on the device
        belongs to no sequence, and its number is that of the first one in host memory. On a CPU the pages are in memory
        of this process, or in `shared`.
        """

        def zeros(part: KvPart, pages: int, pinned: bool = False) -> Tensor:
            shape, dtype = (num_layers, pages, page_size, *part.shape), DTYPES[part.dtype]
            if device.type == "cpu" or pinned:
                return host_zeros(shape, dtype, pinned=pinned, shared=shared)
            return torch.zeros(shape, dtype=dtype, device=device)

        if device.type == "cpu":
            return cls({part.name: zeros(part, num_pages + host_pages) for part in parts})
        host = {part.name: zeros(part, host_pages, pinned=True) for part in parts if host_pages}
        return cls({part.name: zeros(part, num_pages) for part in parts}, host, num_pages - 1)

    @property
    def num_layers(self) -> int:
        """Layers that have pages here."""
        return self._first.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, each of them in every layer and part."""
        return self._first.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._first.shape[2]

    @property
    def kv_heads(self) -> int:
        """KV heads of this rank's shard."""
        return self._first.shape[3]

    @property
    def head_dim(self) -> int:
        """Elements a head."""
        return self._first.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype; may differ from the compute dtype."""
        return self._first.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and parts."""
        return sum(part.nbytes // part.shape[1] for part in self.parts.values())

    @property
    def _first(self) -> Tensor:
        return next(iter(self.parts.values()))

    @cached_property
    def _slots(self) -> dict[str, tuple[Tensor, ...]]:
        """Each part's layers as `[slots, kv_heads, ...]`, views made once."""
        return {name: tuple(layer.flatten(0, 1) for layer in part) for name, part in self.parts.items()}

    def write(self, part: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Store `values` `[T, kv_heads, ...]` at `slots` (int64 `[T]`), cast to the part's dtype."""
        target = self._slots[part][layer]
        target.index_copy_(0, slots, values.to(target.dtype))

    def read(self, part: str, layer: int, slots: Tensor) -> Tensor:
        """A copy of what is at `slots` (int64 `[n]`): `[n, kv_heads, ...]`."""
        return self._slots[part][layer].index_select(0, slots)

    def pages(self, part: str, layer: int) -> Tensor:
        """One layer's pages `[pages, page_size, kv_heads, ...]`, a view."""
        return self.parts[part][layer]

    def spans(self, part: str, layer: int, pages: Sequence[int], tokens: range) -> Iterator[Tensor]:
        """Views `[n, kv_heads, ...]` that together are the positions `tokens` of the sequence with these `pages`.

        One view for each run of pages that follow each other.
        """
        size, at = self.page_size, tokens.start
        while at < tokens.stop:
            index = at // size
            begin, end = index, index + 1
            last = -(-tokens.stop // size)
            while end < last and pages[end] == pages[end - 1] + 1 and pages[end] != self.host_from:
                end += 1
            stop = min(end * size, tokens.stop)
            slots, page = self._slots[part][layer], pages[begin]
            if self.host and page >= self.host_from:
                slots, page = self.host[part][layer].flatten(0, 1), page - self.host_from
            low = page * size + at - begin * size
            yield slots[low : low + stop - at]
            at = stop
