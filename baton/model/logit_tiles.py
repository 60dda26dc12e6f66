"""Logits in tiles of neighbouring tokens, and the largest of each tile, which answers most questions about a row.

Finding the place of a maximum costs ten times as much as finding the maximum, and finding the first few of a row
twenty times. So the maxima of all tiles are found first, and only tiles that they leave in question are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 128


class LogitTiles:
    """A view of logits, float32 `[B, vocab]`, which must not change any more; every value below +inf, none NaN.

    Tiles have `width` tokens; the last one of a row may overlap its neighbour when read. `maxima` is float32 `[B, n]`.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, self.vocab = logits.shape
        self.logits = logits.contiguous()
        self.width = min(WIDTH, self.vocab)
        self._windows = self.logits.as_strided((rows * self.vocab - self.width + 1, self.width), (1, 1))
        whole = self.vocab // self.width
        maxima = self.logits[:, : whole * self.width].unflatten(1, (whole, self.width)).amax(-1)
        rest = self.logits[:, whole * self.width :]
        self.maxima = torch.cat((maxima, rest.amax(-1, keepdim=True)), 1) if rest.shape[1] else maxima

    def read(self, rows: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[P, width]` and first token id `[P]` for each pair of row and tile (int64 `[P]`).

        Tokens that belong to the tile before are -inf.
        """
        starts = tiles * self.width
        first = starts.clamp(max=self.vocab - self.width)
        values = self._windows.index_select(0, first + rows * self.vocab)
        if self.vocab % self.width:
            lanes = torch.arange(self.width, device=values.device)
            values.masked_fill_(lanes < (starts - first)[:, None], -torch.inf)
        return values, first

    def argmax(self) -> Tensor:
        """The first of each row's largest tokens, int64 `[B]`."""
        rows = torch.arange(len(self.maxima), device=self.maxima.device)
        values, first = self.read(rows, self.maxima.argmax(-1))
        return first + values.argmax(-1)

    def top(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits of each of `rows` (int64 `[R]`), in descending order, and their token ids."""
        if 2 * count > self.maxima.shape[1]:
            values, ids = self.logits[rows].topk(count)
            return values, ids
        # As many tiles as tokens wanted: what is in none of them is no larger than any of their maxima.
        tiles = self.maxima[rows].topk(count, sorted=False).indices
        values, first = self.read(rows.repeat_interleave(count), tiles.flatten())
        best, columns = values.view(len(rows), -1).topk(count)
        return best, first.view(len(rows), -1).gather(1, columns // self.width) + columns % self.width
