"""Logits in tiles of neighbouring tokens, with the largest logit of each tile.

Finding the index of a row's maximum takes ten times as long as finding the maximum, and finding its few largest values
twenty times. So the maxima of all tiles are found first, and then only the tiles that can have these values are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 128


class LogitTiles:
    """A view of logits, float32 `[B, vocab]`, which must not change later, and have no NaN and no +inf.

    Tiles have `width` tokens; the last one of a row may overlap the one before it. `maxima` is float32 `[B, n]`.
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
        """The token id of each row's largest logit, int64 `[B]`; the lowest id if several are equal."""
        rows = torch.arange(len(self.maxima), device=self.maxima.device)
        values, first = self.read(rows, self.maxima.argmax(-1))
        return first + values.argmax(-1)

    def top(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits of each of `rows` (int64 `[R]`), in descending order, and their token ids."""
        if 2 * count > self.maxima.shape[1]:
            values, ids = self.logits[rows].topk(count)
            return values, ids
        # With `count` tiles of the largest maxima, no other tile has a logit above any of these maxima.
        tiles = self.maxima[rows].topk(count, sorted=False).indices
        values, first = self.read(rows.repeat_interleave(count), tiles.flatten())
        best, columns = values.view(len(rows), -1).topk(count)
        return best, first.view(len(rows), -1).gather(1, columns // self.width) + columns % self.width
