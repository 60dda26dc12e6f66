"""Inputs of decode steps by row, in device tensors that live as long as the ModelRunner.

Rows `[0, n)` are the batch. The other rows are at position 0 of the null page, which no sequence owns: a step over more
rows than the batch has (`baton.engine.cuda_graphs`) writes there and attends to one token. Each step writes its tokens
and the next positions into these tensors, so the next step needs nothing from the host but new pages of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.attention import AttentionBatch, HostKv
from baton.model.upload import upload


class StepInputs:
    """Inputs of a step. `ids`, `positions`: int64 `[slots]`; `tables`: int32 `[slots, width]`."""

    def __init__(
        self,
        slots: int,
        width: int,
        page_size: int,
        null_page: int,
        device: torch.device,
    ) -> None:
        """`null_page` is the page of rows without a sequence."""
        self.page_size = page_size
        self.ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tables = torch.full((slots, width), null_page, dtype=torch.int32, device=device)
        self._null_page = null_page
        self._device = device
        self._filled: list[int] = []

    def add(self, token_id: int, position: int, pages: Sequence[int]) -> None:
        """A new last row: its newest token, where that is in its sequence, and the sequence's pages."""
        row = len(self._filled)
        entry = upload([token_id, position], torch.int64, self._device)
        self.ids[row], self.positions[row] = entry[0], entry[1]
        self._filled.append(0)
        self.extend(row, pages)

    def extend(self, row: int, pages: Sequence[int]) -> None:
        """`pages` follow those of the row. A handle may have more than the model's length needs."""
        begin = self._filled[row]
        end = min(begin + len(pages), self.tables.shape[1])
        if end > begin:
            self.tables[row, begin:end] = upload(pages[: end - begin], torch.int32, self._device)
            self._filled[row] = end

    def remove(self, index: int) -> None:
        """Row `index` left, and the last one takes its place."""
        last = len(self._filled) - 1
        filled = self._filled.pop()
        for part in (self.ids, self.positions, self.tables):
            if index < last:
                part[index] = part[last]
        if index < last:
            self._filled[index] = filled
        self.positions[last] = 0
        self.tables[last] = self._null_page

    def clear(self) -> None:
        """No row is left."""
        while self._filled:
            self.remove(len(self._filled) - 1)

    def batch(self, contexts: Sequence[int], width: int, host: HostKv | None = None) -> AttentionBatch:
        """The first rows as attention sees them; `contexts` count the new token, and need `width` pages at most.

        `host` has the rows with pages in host memory.
        """
        count = len(contexts)
        return AttentionBatch.step(contexts, self.positions[:count], self.tables[:count, :width], self.page_size, host)

    def advance(self, tokens: Tensor) -> None:
        """A step over the first rows has chosen `tokens`, int64 `[n]`."""
        self.ids[: len(tokens)] = tokens
        self.positions[: len(tokens)] += 1
