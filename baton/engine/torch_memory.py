"""KV pages as tensors: in and out as canonical bytes, copied, and saved to host memory.

Safe from any thread beside a running step, because the pages that a transfer touches are not written by it.
On CUDA all threads use the default stream, so copies are ordered with the engine's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kv.format import PartData
from baton.model.attention import KvCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

with warnings.catch_warnings():
    # torch warns once a process that such a buffer must not be written to; received frames are only read.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Its name as KvPart has it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """See `baton.engine.paged.KvMemory`."""

    kv: KvCache

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """See KvMemory."""
        for part in self.kv.parts.values():
            part[:, target, :tokens] = part[:, source, :tokens]

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        """See KvMemory."""
        slots = self._slots(pages, tokens)
        found = []
        for name, part in self.kv.parts.items():
            rows = part[layer].flatten(0, 1)[:, heads.start : heads.stop].index_select(0, slots).cpu()
            data = rows.view(torch.uint8).flatten().numpy().data
            found.append(PartData(name, dtype_name(rows.dtype), tuple(rows.shape), data))
        return found

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """See KvMemory."""
        count, heads = parts[0].shape[:2]
        slots = self._slots(pages, range(token_start, token_start + count))
        for part in parts:
            home = self.kv.parts[part.name][layer].flatten(0, 1)[:, head_start : head_start + heads]
            rows = torch.frombuffer(part.data, dtype=DTYPES[part.dtype]).view(part.shape)
            home.index_copy_(0, slots, rows.to(home.device, home.dtype))

    def save(self, pages: Sequence[int], tokens: int) -> dict[str, Tensor]:
        """See KvMemory."""
        slots = self._slots(pages, range(tokens))
        return {name: part.flatten(1, 2).index_select(1, slots).cpu() for name, part in self.kv.parts.items()}

    def restore(self, pages: Sequence[int], saved: dict[str, Tensor]) -> None:
        """See KvMemory."""
        for name, rows in saved.items():
            slots = self._slots(pages, range(rows.shape[1]))
            self.kv.parts[name].flatten(1, 2).index_copy_(1, slots, rows.to(slots.device))

    def _slots(self, pages: Sequence[int], tokens: range) -> Tensor:
        """page * page_size + offset of each token, int64 on the pages' device."""
        size = self.kv.page_size
        first, last = tokens.start // size, -(-tokens.stop // size)
        starts = torch.tensor(pages[first:last], dtype=torch.int64) * size
        slots = (starts[:, None] + torch.arange(size)).flatten()
        slots = slots[tokens.start - first * size : tokens.stop - first * size]
        return slots.to(next(iter(self.kv.parts.values())).device)
