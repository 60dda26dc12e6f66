"""Repetition, presence and frequency penalties of a batch, over counts that grow with each token.

Only the distinct tokens of a sequence are held and touched, never the vocabulary. Each sequence that has penalties has
an entry: a row with a column for each distinct token. Entries lie in slabs, tables whose rows have the same width. An
entry that needs more columns moves to a wider slab. So a sequence with many distinct tokens does not slow down others,
and no entry moves because another one is added or grows. `append` after each token gives the same entry as `add` of the
longer sequence, except for the order of the columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.tensors import upload
from baton.request import SequenceState

_MIN_WIDTH = 256
_WIDTH_FACTOR = 4
_SLAB = 1 << 13
"""Number of elements of a slab; a slab for larger entries has one row."""
_PIECE = 4096
"""Number of token ids that are counted in one call, because the call holds the interpreter's lock."""


class _Slab:
    """Rows for entries of up to `width` distinct tokens.

    `ids` and `counts` are `[rows, width]`: the token of each column, and the number of times it was generated. `used`
    has the number of columns in use of each row. `strength` `[rows, 3]` has the repetition, frequency and presence
    penalties. `free` lists the rows without an entry.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        rows = max(1, _SLAB // width)
        self.width = width
        self.ids = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.used = torch.zeros(rows, dtype=torch.int64, device=device)
        self.strength = torch.zeros(rows, 3, dtype=torch.float32, device=device)
        self.free = list(range(rows))


@dataclass(eq=False, slots=True)
class PenaltyEntry:
    """The counts of a sequence: row `index` of `slab`. `columns` has the column of each distinct token."""

    slab: _Slab
    index: int
    columns: dict[int, int]


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """The P rows of a batch whose entries are in one slab.

    `rows` has their indices in the batch, `indices` those in the slab; both are int64 `[P]`.
    """

    slab: _Slab
    entries: Sequence[PenaltyEntry]
    rows: Tensor
    indices: Tensor


class PenaltyTable:
    """The entries of all sequences with penalties, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[_Slab] = []

    def add(self, state: SequenceState) -> PenaltyEntry:
        """Make an entry for a sequence, with counts of its present tokens."""
        distinct = _distinct(state)
        columns = dict(zip(distinct, range(len(distinct)), strict=True))
        entry = self._place(columns)
        slab, used, index = entry.slab, len(columns), entry.index
        slab.ids[index, :used] = upload(array("q", list(columns)), torch.int64, self._device)
        slab.counts[index, :used] = 0.0
        if state.output_ids:
            generated = upload(array("q", [columns[token] for token in state.output_ids]), torch.int64, self._device)
            slab.counts[index].index_add_(0, generated, torch.ones(len(generated), device=self._device))
        slab.used[index] = used
        params = state.params
        strength = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        slab.strength[index] = upload(strength, torch.float32, self._device)
        return entry

    def remove(self, entry: PenaltyEntry) -> None:
        """Forget an entry."""
        slab = entry.slab
        slab.free.append(entry.index)
        if slab.width > _SLAB:
            # Its memory is large, and seldom needed again.
            self._slabs.remove(slab)

    def append(self, entries: Sequence[PenaltyEntry], tokens: Sequence[int]) -> bool:
        """Count one new token for each of `entries`, which must differ; returns whether one moved to a wider slab."""
        moved = False
        for entry, token in zip(entries, tokens, strict=True):
            entry.columns.setdefault(token, len(entry.columns))
            if len(entry.columns) > entry.slab.width:
                self._widen(entry)
                moved = True
        for slab, places in _by_slab(entries).items():
            rows = self._index([entries[place].index for place in places])
            column = self._index([entries[place].columns[tokens[place]] for place in places])
            used = slab.used[rows]
            # A column used for the first time may hold the count of a removed entry.
            slab.counts[rows, column] = torch.where(column < used, slab.counts[rows, column], 0.0) + 1.0
            slab.ids[rows, column] = self._index([tokens[place] for place in places])
            slab.used[rows] = torch.maximum(used, column + 1)
        return moved

    def grouped(self, rows: Sequence[int], entries: Sequence[PenaltyEntry]) -> list[PenalizedRows]:
        """Group `rows` of a batch by the slabs of their entries, for `apply_penalties`; valid until an entry moves."""
        return [
            PenalizedRows(
                slab,
                [entries[place] for place in places],
                self._index([rows[place] for place in places]),
                self._index([entries[place].index for place in places]),
            )
            for slab, places in _by_slab(entries).items()
        ]

    def counts(self, entry: PenaltyEntry) -> dict[int, int]:
        """Number of times that each token of the sequence was generated; 0 if it is only in the prompt."""
        return {token: int(entry.slab.counts[entry.index, column]) for token, column in entry.columns.items()}

    def _place(self, columns: dict[int, int]) -> PenaltyEntry:
        width = _MIN_WIDTH
        while width < len(columns):
            width *= _WIDTH_FACTOR
        slab = next((slab for slab in self._slabs if slab.width == width and slab.free), None)
        if slab is None:
            slab = _Slab(width, self._device)
            self._slabs.append(slab)
        return PenaltyEntry(slab, slab.free.pop(), columns)

    def _widen(self, entry: PenaltyEntry) -> None:
        old, index, width = entry.slab, entry.index, entry.slab.width
        wide = self._place(entry.columns)
        wide.slab.ids[wide.index, :width] = old.ids[index]
        wide.slab.counts[wide.index, :width] = old.counts[index]
        wide.slab.used[wide.index] = old.used[index]
        wide.slab.strength[wide.index] = old.strength[index]
        self.remove(PenaltyEntry(old, index, entry.columns))
        entry.slab, entry.index = wide.slab, wide.index

    def _index(self, values: Sequence[int]) -> Tensor:
        return upload(array("q", values), torch.int64, self._device)


def apply_penalties(logits: Tensor, group: PenalizedRows) -> None:
    """Penalize rows of `logits` (float32 `[B, vocab]`) in place.

    As in vLLM, only tokens of the sequence change. A positive logit is divided by the repetition penalty, and a
    negative one is multiplied by it. Then the frequency penalty times the token's count is subtracted, and the presence
    penalty if the token was generated.
    """
    slab, entries, rows = group.slab, group.indices, group.rows[:, None]
    columns = torch.arange(max(len(entry.columns) for entry in group.entries), device=logits.device)
    # Entries shorter than the widest repeat their first column, and so write the same value twice.
    columns = torch.where(columns < slab.used[entries, None], columns, 0)
    ids, counts = slab.ids[entries[:, None], columns], slab.counts[entries[:, None], columns]
    repetition, frequency, presence = slab.strength[entries, :, None].unbind(1)
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, ids] = values - frequency * counts - presence * (counts > 0)


def _by_slab(entries: Sequence[PenaltyEntry]) -> dict[_Slab, list[int]]:
    """Indices into `entries`, grouped by slab."""
    places: dict[_Slab, list[int]] = {}
    for place, entry in enumerate(entries):
        places.setdefault(entry.slab, []).append(place)
    return places


def _distinct(state: SequenceState) -> dict[int, None]:
    """The token ids of a sequence, each once, in the order in which they first occur."""
    found: dict[int, None] = {}
    for ids in (state.prompt_ids, state.output_ids):
        for start in range(0, len(ids), _PIECE):
            found.update(dict.fromkeys(ids[start : start + _PIECE]))
    return found
