"""Changes of logits before penalties and sampling: allowed tokens, minimum length, biases.

The tensors of a row (`RowProcessor`) stay on the device while the row is in the batch. When rows have joined or left,
the tensors of the batch (`LogitsProcessor`) are made from them. They cover only rows whose parameters change logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.tensors import upload
from baton.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RowProcessor:
    """Changes of the logits of one row.

    `denied` is bool `[vocab]`, true for each token that is not allowed. `ending` is int64: the ids of the tokens that
    are banned until `min_tokens` outputs exist. `bias` is a pair of token ids, int64, and the values that are added to
    their logits, float32. A field is None if the row's parameters do not ask for it.
    """

    denied: Tensor | None
    ending: Tensor | None
    bias: tuple[Tensor, Tensor] | None


def row_processor(
    params: SamplingParams, eos: frozenset[int], vocab_size: int, device: torch.device, denied: Tensor | None
) -> RowProcessor:
    """Make the tensors of a row. `denied` is the mask of another row with the same list of allowed tokens, or None."""
    if params.allowed_token_ids and denied is None:
        denied = torch.ones(vocab_size, dtype=torch.bool, device=device)
        denied.index_fill_(0, upload(array("q", params.allowed_token_ids), torch.int64, device), False)
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos)} if params.min_tokens else ()
    bias = None
    if params.logit_bias:
        token_ids, values = zip(*params.logit_bias, strict=True)
        bias = upload(array("q", token_ids), torch.int64, device), upload(values, torch.float32, device)
    return RowProcessor(denied, upload(array("q", ending), torch.int64, device) if ending else None, bias)


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """Changes of the logits of a whole batch, most of them one operation for all rows.

    `denied` lists (row, mask) pairs, one operation each. `bans` is a pair of equally long int64 tensors: rows and the
    token ids that are banned in them. `bias` has rows and token ids too, and the float32 values to add.
    """

    denied: Sequence[tuple[int, Tensor]]
    bans: tuple[Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, RowProcessor, bool]], device: torch.device) -> LogitsProcessor:
        """Make the tensors of a batch. `rows` has the index of each row, its tensors, and whether it may end now."""
        bans = [(row, part.ending) for row, part, may_end in rows if part.ending is not None and not may_end]
        bias = [(row, part.bias) for row, part, _ in rows if part.bias is not None]
        return cls(
            denied=[(row, part.denied) for row, part, _ in rows if part.denied is not None],
            bans=(_repeated(bans, device), torch.cat([ids for _, ids in bans])) if bans else None,
            bias=(
                _repeated([(row, ids) for row, (ids, _) in bias], device),
                torch.cat([ids for _, (ids, _) in bias]),
                torch.cat([values for _, (_, values) in bias]),
            )
            if bias
            else None,
        )

    @property
    def forbids(self) -> bool:
        """Whether there is a row in which some token is not allowed."""
        return bool(self.denied) or self.bans is not None

    @property
    def changes(self) -> bool:
        """Whether `apply` changes any logit."""
        return self.forbids or self.bias is not None

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, float32 `[B, vocab]`, in place."""
        for row, denied in self.denied:
            logits[row].masked_fill_(denied, -torch.inf)
        if self.bans is not None:
            logits[self.bans] = -torch.inf
        if self.bias is not None:
            rows, ids, values = self.bias
            logits.index_put_((rows, ids), values, accumulate=True)


def _repeated(parts: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
    """The index of each row, repeated once for each element of its tensor; int64."""
    lengths = [len(part) for _, part in parts]
    rows = upload(array("q", [row for row, _ in parts]), torch.int64, device)
    return torch.repeat_interleave(rows, upload(array("q", lengths), torch.int64, device), output_size=sum(lengths))
