"""Changes of logits before penalties and sampling: allowed tokens, minimum length, biases.

A row's part (`RowProcessor`) lies on the device from when the row joins the batch until it leaves. The batch's
(`LogitsProcessor`) is made of these when rows have joined or left, and works on the rows that have something to change.
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
    """One row's: `denied` is bool `[vocab]`, false where a token is allowed; `ending` are the token ids that min_tokens
    bans; `bias` are token ids and what is added to their logits. None of what the parameters don't ask for."""

    denied: Tensor | None
    ending: Tensor | None
    bias: tuple[Tensor, Tensor] | None


def row_processor(
    params: SamplingParams, eos: frozenset[int], vocab_size: int, device: torch.device, denied: Tensor | None
) -> RowProcessor:
    """A row's part; `denied` is given if another row with the same list of allowed tokens has it already."""
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
    """Changes of a whole batch: one operation for each kind, where that reads only the logits that change."""

    denied: Sequence[tuple[int, Tensor]]
    bans: tuple[Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, RowProcessor, bool]], device: torch.device) -> LogitsProcessor:
        """The batch's, of its rows: number, part, and whether the row may end."""
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
        """Whether some token of some row can't be chosen."""
        return bool(self.denied) or self.bans is not None

    @property
    def changes(self) -> bool:
        """Whether `apply` changes anything by itself."""
        return self.forbids or self.bias is not None

    def apply(self, logits: Tensor, mask: Tensor | None) -> None:
        """Change float32 `[B, vocab]` in place; `mask` is the call's own, bool `[B, vocab]`, true where allowed."""
        for row, denied in self.denied:
            logits[row].masked_fill_(denied, -torch.inf)
        if mask is not None:
            logits.masked_fill_(~mask, -torch.inf)
        if self.bans is not None:
            logits[self.bans] = -torch.inf
        if self.bias is not None:
            rows, ids, values = self.bias
            logits.index_put_((rows, ids), values, accumulate=True)


def _repeated(parts: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
    """Each row's number, as often as its part is long; int64."""
    lengths = [len(part) for _, part in parts]
    rows = upload(array("q", [row for row, _ in parts]), torch.int64, device)
    return torch.repeat_interleave(rows, upload(array("q", lengths), torch.int64, device), output_size=sum(lengths))
