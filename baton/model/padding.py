"""Rows of zeros beside those of a small batch, where more rows take less time.

oneDNN's AMX kernels change their blocks with the number of rows, and not always for the better: on a Xeon with two
cores, weights were read at 11.7 GB/s for 1 to 16 rows, 8.5 for 17 to 32, and 11.5 for 48. Which numbers are good ones
is measured once, on the model's own weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.linear import PackedStorage

_BAND = 16
"""Rows of a tile: within a band of as many, a product's time hardly changes."""

_BANDS = 4
_WEIGHT_BYTES = 1 << 27
"""Multiplied by in a measurement: more than the caches hold."""

_REPEATS = 5
_GAIN = 0.9
"""The share of its time that a product must be down to for rows to be added."""


class RowPadding:
    """To how many rows a batch is padded. `targets[i]`: rows for a batch of more than i and up to i + 1 bands."""

    def __init__(self, targets: Sequence[int] = ()) -> None:
        self._targets = tuple(targets)

    @classmethod
    def measured(cls, storages: Sequence[PackedStorage]) -> RowPadding:
        """Measure which padding makes products with these weights faster; takes tenths of a second.

        Nothing is padded where no AMX kernel would be chosen.
        """
        weights = [storage for storage in storages if storage.tiled]
        return cls(choose(_seconds(weights))) if weights else cls()

    def rows(self, count: int) -> int:
        """The rows to compute for `count` of them, 1 or more."""
        band = (count - 1) // _BAND
        return max(count, self._targets[band]) if band < len(self._targets) else count

    def pad(self, x: Tensor) -> Tensor:
        """`[n, columns]` with rows of zeros below, or as it is."""
        return pad_to(x, self.rows(len(x)))


def pad_to(x: Tensor, rows: int) -> Tensor:
    """`[n, columns]` as `[rows, columns]`, with zeros below; `x` itself if it has them."""
    return F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x


def cut_to(x: Tensor, rows: int) -> Tensor:
    """The first `rows` of `x`; `x` itself if it has no others."""
    return x[:rows] if rows < len(x) else x


def choose(seconds: Sequence[float]) -> list[int]:
    """The targets, from the time that products of 1, 2, ... bands of rows take."""
    targets = []
    for band, own in enumerate(seconds):
        best = min(range(band, len(seconds)), key=lambda other: seconds[other])
        targets.append(_BAND * (best + 1) if seconds[best] < _GAIN * own else 0)
    return targets


def _seconds(weights: Sequence[PackedStorage]) -> list[float]:
    """The median time of a pass over some of `weights`, for each number of bands; in turns, since speeds drift."""
    before = accumulate((weight.nbytes for weight in weights), initial=0)
    used = [weight for weight, held in zip(weights, before, strict=False) if held < _WEIGHT_BYTES]
    counts = [_BAND * (band + 1) for band in range(_BANDS)]
    inputs = {
        (count, columns): torch.zeros(count, columns, dtype=weights[0].dtype)
        for count in counts
        for columns in {weight.columns for weight in used}
    }
    took: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_REPEATS + 1):
        for count in counts:
            began = time.perf_counter()
            for weight in used:
                weight(inputs[count, weight.columns])
            took[count].append(time.perf_counter() - began)
    # The first turn makes the kernels.
    return [statistics.median(took[count][1:]) for count in counts]
