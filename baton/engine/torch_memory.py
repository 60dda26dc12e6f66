"""KV pages in host memory: in and out as canonical bytes, and copied.

Safe from any thread beside a running step, because the pages that a transfer touches are not written by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kv.format import PartData
from baton.model.attention import KvCache
from baton.model.dtypes import DTYPES, dtype_name


@dataclass(frozen=True, slots=True)
class TorchMemory:
    kv: KvCache

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        # Not by torch, which would share so little between threads: from the asyncio loop, whose threads it has to wake
        # beside those of a forward pass, that took up to 20 ms.
        for view, width in self._part_views():
            old, new = (page * self.kv.page_size * width for page in (source, target))
            view[:, new : new + tokens * width] = view[:, old : old + tokens * width]

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        size = self.kv.page_size
        first, last = tokens.start // size, -(-tokens.stop // size)
        index, skipped = list(pages[first:last]), tokens.start - first * size
        found = []
        for name, part in self.kv.parts.items():
            kept = _bytes(part[layer])
            whole = len(heads) == kept.shape[2]
            taken = _pages(part[layer])[index] if whole else kept[index, :, heads.start : heads.stop]
            rows = taken.reshape(-1, len(heads), kept.shape[-1])[skipped : skipped + len(tokens)]
            shape = (len(tokens), len(heads), *part.shape[4:])
            found.append(PartData(name, dtype_name(part.dtype), shape, rows.reshape(-1).data))
        return found

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        count, heads = parts[0].shape[:2]
        size = self.kv.page_size
        first, offset = divmod(token_start, size)
        # The page that is begun already, the full ones after it, and the rest.
        lead = min(size - offset, count) if offset else 0
        full = (count - lead) // size
        begun = first + bool(offset)
        index, rest = list(pages[begun : begun + full]), lead + full * size
        for part in parts:
            kept = self.kv.parts[part.name][layer]
            view = _bytes(kept)[:, :, head_start : head_start + heads]
            rows = self._stored(part)
            if lead:
                view[pages[first], offset : offset + lead] = rows[:lead]
            if full and heads == kept.shape[2]:
                _pages(kept)[index] = rows[lead:rest].reshape(full, -1)
            elif full:
                view[index] = rows[lead:rest].reshape(full, size, heads, -1)
            if rest < count:
                view[pages[begun + full], : count - rest] = rows[rest:]

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        payloads, views = [], self._part_views()
        row_bytes = sum(width for _, width in views)
        block = np.empty((self.kv.num_layers, block_size * row_bytes), dtype=np.uint8)
        for start in range(token_start, token_start + count * block_size, block_size):
            for view, rows in self._runs(views, pages, range(start, start + block_size), block):
                rows[:] = view
            payloads.append(block.tobytes())
        return payloads

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        views = self._part_views()
        row_bytes = sum(width for _, width in views)
        for index, payload in enumerate(payloads):
            start = token_start + index * block_size
            block = np.frombuffer(payload, dtype=np.uint8).reshape(self.kv.num_layers, block_size * row_bytes)
            for view, rows in self._runs(views, pages, range(start, start + block_size), block):
                view[:] = rows

    def _part_views(self) -> list[tuple[NDArray[np.uint8], int]]:
        """Each part's pages as `[layers, bytes]`, and the bytes of one token in one layer."""
        slots = self.kv.num_pages * self.kv.page_size
        views = [_bytes(part.view(len(part), -1)) for part in self.kv.parts.values()]
        return [(view, view.shape[1] // slots) for view in views]

    def _runs(
        self,
        views: Sequence[tuple[NDArray[np.uint8], int]],
        pages: Sequence[int],
        tokens: range,
        block: NDArray[np.uint8],
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Pieces of the pages, and the same of the block `[layers, bytes]`: tokens that lie side by side in both.

        Views, of all layers at once: numpy copies a piece in one call, a run of bytes a layer.
        """
        size, begin = self.kv.page_size, 0
        for view, width in views:
            at = tokens.start
            while at < tokens.stop:
                page, offset = divmod(at, size)
                count = min(size - offset, tokens.stop - at)
                low, run = (pages[page] * size + offset) * width, count * width
                yield view[:, low : low + run], block[:, begin : begin + run]
                begin += run
                at += count

    def _stored(self, part: PartData) -> NDArray[np.uint8]:
        """The part as `[tokens, heads, bytes]` in the pages' element type."""
        kept, given = self.kv.parts[part.name].dtype, DTYPES[part.dtype]
        data = np.frombuffer(part.data, dtype=np.uint8)
        if given != kept:
            data = _bytes(torch.frombuffer(part.data, dtype=given).to(kept))
        return data.reshape(*part.shape[:2], -1)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A view of its memory: bytes in place of the last dimension's elements, which lie side by side."""
    # By bytes, because what is received begins at any address, and numpy copies page-sized runs at memcpy's speed;
    # torch moves elements of two bytes one by one, and takes ten times as long.
    view: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return view


def _pages(layer: Tensor) -> NDArray[np.uint8]:
    """A view of a layer's part, `[pages, ...]`: one row of bytes a page, which is one run to copy, not one a token."""
    # torch's `view` raises where numpy's `reshape` would copy, and what is then written would be lost.
    return _bytes(layer.view(len(layer), -1))
