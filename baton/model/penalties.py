"""Repetition, presence and frequency penalties of a batch, over counts that grow with each token.

Only the distinct tokens of a sequence are held and touched, never the vocabulary: a table of an entry (row)
for each sequence that has penalties, with the token ids, how often each was generated, and how many columns
are in use. `append` after each token leaves the same table as `add` of the longer sequence, but for the order
of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.request import SamplingParams, SequenceState

_INITIAL = (8, 256)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty is not neutral."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class PenaltyTable:
    """See the module's text. Entries are small integers, reused after `remove`."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_INITIAL, dtype=torch.int64, device=device)
        self._counts = torch.zeros(_INITIAL, dtype=torch.float32, device=device)
        self._used = torch.zeros(_INITIAL[0], dtype=torch.int64, device=device)
        self._strength = torch.zeros(_INITIAL[0], 3, dtype=torch.float32, device=device)
        self._free = list(range(_INITIAL[0]))
        self._columns: dict[int, dict[int, int]] = {}

    def add(self, state: SequenceState) -> int:
        """A new entry for the sequence as it is."""
        columns = {token: i for i, token in enumerate(dict.fromkeys([*state.prompt_ids, *state.output_ids]))}
        counts = [0.0] * len(columns)
        for token in state.output_ids:
            counts[columns[token]] += 1
        if not self._free:
            self._grow(self._ids.shape[0] * 2, self._ids.shape[1])
        self._grow(self._ids.shape[0], len(columns))
        entry = self._free[-1]
        used = len(columns)
        self._ids[entry, :used] = self._tensor(list(columns))
        self._counts[entry, :used] = self._tensor(counts).float()
        self._used[entry] = used
        params = state.params
        strength = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        self._strength[entry] = self._tensor(strength).float()
        self._columns[entry] = columns
        return self._free.pop()

    def remove(self, entry: int) -> None:
        """Forget an entry."""
        del self._columns[entry]
        self._free.append(entry)

    def append(self, entries: Sequence[int], tokens: Sequence[int]) -> None:
        """Count one new token for each of `entries`, which are distinct."""
        places = []
        for entry, token in zip(entries, tokens, strict=True):
            columns = self._columns[entry]
            places.append(columns.setdefault(token, len(columns)))
        self._grow(self._ids.shape[0], max(places) + 1)
        rows, column = self._tensor(list(entries)), self._tensor(places)
        used = self._used[rows]
        # A column used for the first time may hold the count of a removed entry.
        self._counts[rows, column] = torch.where(column < used, self._counts[rows, column], 0.0) + 1.0
        self._ids[rows, column] = self._tensor(list(tokens))
        self._used[rows] = torch.maximum(used, column + 1)

    def apply(self, logits: Tensor, rows: Tensor, entries: Tensor) -> None:
        """Penalise in place `logits[rows]` (float32 `[B, vocab]`, int64 `[P]`) by `entries` (int64 `[P]`).

        As in vLLM: a seen token's positive logit is divided, its negative one multiplied, by the repetition
        penalty; then frequency times its count, and presence if it was generated at all, are subtracted.
        """
        width = max(len(columns) for columns in self._columns.values())
        columns = torch.arange(width, device=logits.device)
        # Entries shorter than the widest repeat their first column, and so write the same value twice.
        columns = torch.where(columns < self._used[entries, None], columns, 0)
        ids, counts = self._ids[entries[:, None], columns], self._counts[entries[:, None], columns]
        repetition, frequency, presence = self._strength[entries, :, None].unbind(1)
        values = logits[rows[:, None], ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[rows[:, None], ids] = values - frequency * counts - presence * (counts > 0)

    def counts(self, entry: int) -> dict[int, int]:
        """How often each seen token was generated; 0 for those of the prompt alone."""
        return {token: int(self._counts[entry, column]) for token, column in self._columns[entry].items()}

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._ids.device)

    def _grow(self, entries: int, width: int) -> None:
        old_entries, old_width = self._ids.shape
        if entries <= old_entries and width <= old_width:
            return
        width = max(old_width, 2 * width if width > old_width else 0)
        for name in ("_ids", "_counts"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(entries, width)
            new[:old_entries, :old_width] = old
            setattr(self, name, new)
        if entries > old_entries:
            self._used = torch.cat((self._used, self._used.new_zeros(entries - old_entries)))
            self._strength = torch.cat((self._strength, self._strength.new_zeros(entries - old_entries, 3)))
            self._free.extend(range(old_entries, entries))
