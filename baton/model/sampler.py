"""From logits to tokens, for a whole batch at once.

Steps, in vLLM's order: the token masks (allowed_token_ids, a mask given with the call), min_tokens,
logit_bias, the penalties; then greedy rows take the argmax, and the others divide by the temperature, apply
min_p, top_k and top_p, and draw. Log-probabilities are those of the raw logits.

min_p, top_k and top_p each keep the tokens at or above some logit, so together they are one threshold a row;
tokens as likely as the last one kept are kept too, and no sort order matters. The threshold and the draw are
found among the 256 most likely tokens; a row whose nucleus is wider is done again with sixteen times as many,
and so on.

A draw adds to each logit a noise that depends on seed, choice index, output index and token id only, and takes
the largest (`baton.model.gumbel`).

Every operation is row by row, so a row's token does not depend on its mates. All state is a pure function of
the SequenceState; what is kept between steps (penalty counts, the plan) equals what a rebuild would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import EngineError
from baton.model.gumbel import draw
from baton.model.noise import noise_key
from baton.model.penalties import PenaltyTable, has_penalties
from baton.request import SamplingParams, SequenceState, TokenInfo

WINDOW = 256

_COLDEST = torch.finfo(torch.float32).tiny
"""The lowest temperature divided by: a lower one could become 0 in float32, and make NaN of 0 / 0."""


@dataclass(eq=False, slots=True)
class _Row:
    name: str
    state: SequenceState
    outputs: int
    penalties: int | None

    @property
    def params(self) -> SamplingParams:
        return self.state.params

    @property
    def may_end(self) -> bool:
        return self.outputs >= self.params.min_tokens


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of rows that are drawn from part of the vocabulary: each `[R, 1]`, neutral where a row does not use it."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    def take(self, rows: Tensor) -> _Limits:
        return _Limits(self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do for the present batch; built once, kept until the batch or a min_tokens ban changes.

    Row indices are int64. `free` and `limited` index `drawn`; an index of all rows is None, to spare the
    copy.
    """

    allowed: tuple[Tensor, Tensor] | None
    bans: tuple[Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor, Tensor] | None
    penalised: tuple[Tensor, Tensor] | None
    greedy: Tensor | None
    drawn: Tensor
    temperature: Tensor
    free: Tensor
    limited: Tensor
    limits: _Limits
    reported: list[int]


class SamplerBatch:
    """The sampling state of a batch: rows are added at the end, and the last one fills the place of one removed."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._rows: list[_Row] = []
        self._table = PenaltyTable(device)
        self._plan: _Plan | None = None

    def add(self, name: str, state: SequenceState) -> None:
        """A new last row; `name` is for error messages."""
        entry = self._table.add(state) if has_penalties(state.params) else None
        self._rows.append(_Row(name, state, len(state.output_ids), entry))
        self._plan = None

    def remove(self, index: int) -> None:
        """Remove a row; the last row takes its place."""
        row, last = self._rows[index], self._rows.pop()
        if last is not row:
            self._rows[index] = last
        if row.penalties is not None:
            self._table.remove(row.penalties)
        self._plan = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, mask: Tensor | None = None) -> list[TokenInfo]:
        """The next token of each row; `accept` tells the batch that they were taken.

        `logits`: float32 `[B, vocab]`, overwritten. `mask`: bool `[B, vocab]`, true where a token is allowed.
        Raises EngineError, naming the rows, for logits that are not finite and for rows without an allowed
        token.
        """
        self._check(logits.sum(-1).isfinite(), "logits are not finite")
        plan = self._plan = self._plan or self._build()
        raw = logits[self._index(plan.reported)] if plan.reported else None
        self._edit(logits, mask, plan)
        tokens = self._choose(logits, plan).tolist()
        infos = [TokenInfo(token) for token in tokens]
        if raw is not None:
            wanted = [self._rows[i].params.logprobs for i in plan.reported]
            found = token_infos(raw, [tokens[i] for i in plan.reported], [count or 0 for count in wanted])
            for i, info in zip(plan.reported, found, strict=True):
                infos[i] = info
        return infos

    def accept(self, tokens: Sequence[int]) -> None:
        """Each row's sequence has grown by its entry of `tokens`."""
        for row in self._rows:
            row.outputs += 1
            if row.outputs == row.params.min_tokens:
                self._plan = None
        counted = [(row.penalties, token) for row, token in zip(self._rows, tokens, strict=True)]
        entries = [(entry, token) for entry, token in counted if entry is not None]
        if entries:
            self._table.append(*zip(*entries, strict=True))

    def _edit(self, logits: Tensor, mask: Tensor | None, plan: _Plan) -> None:
        if plan.allowed is not None:
            rows, allowed = plan.allowed
            logits[rows] = logits[rows].masked_fill_(~allowed, -math.inf)
        if mask is not None:
            logits.masked_fill_(~mask, -math.inf)
        if plan.bans is not None:
            logits[plan.bans] = -math.inf
        if plan.bias is not None:
            rows, ids, values = plan.bias
            logits.index_put_((rows, ids), values, accumulate=True)
        if plan.penalised is not None:
            self._table.apply(logits, *plan.penalised)
        if plan.allowed is not None or mask is not None or plan.bans is not None:
            self._check(logits.amax(-1) > -math.inf, "no token is allowed")

    def _choose(self, logits: Tensor, plan: _Plan) -> Tensor:
        if plan.greedy is None:
            return logits.argmax(-1)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        tokens[plan.greedy] = logits[plan.greedy].argmax(-1)
        words = [
            noise_key(row.params.seed or 0, row.state.choice_index, row.outputs)
            for row in self._rows
            if not row.params.greedy
        ]
        keys = torch.tensor(words, device=logits.device).to(torch.int32)
        drawn = logits if len(words) == len(self._rows) else logits[plan.drawn]
        # The largest becomes 0, so that no temperature overflows.
        scaled = (drawn - drawn.amax(-1, keepdim=True)) / plan.temperature
        chosen = torch.empty_like(plan.drawn)
        if len(plan.free):
            part = scaled if len(plan.free) == len(chosen) else scaled[plan.free]
            everything = torch.arange(self._vocab_size, dtype=torch.int32, device=logits.device)[None]
            chosen[plan.free] = draw(part, everything, keys[plan.free])
        if len(plan.limited):
            part = scaled if len(plan.limited) == len(chosen) else scaled[plan.limited]
            chosen[plan.limited] = draw_limited(part, plan.limits, keys[plan.limited])
        tokens[plan.drawn] = chosen
        return tokens

    def _check(self, good: Tensor, problem: str) -> None:
        if not good.all():
            bad = [row.name for row, fine in zip(self._rows, good.tolist(), strict=True) if not fine]
            raise EngineError(f"{problem}: {', '.join(bad)}")

    def _build(self) -> _Plan:
        rows = list(enumerate(self._rows))
        drawn = [(i, row.params) for i, row in rows if not row.params.greedy]
        limited = [(j, params) for j, (_, params) in enumerate(drawn) if self._is_limited(params)]
        bias = [(i, token, value) for i, row in rows for token, value in row.params.logit_bias]
        bans = [(i, token) for i, row in rows if not row.may_end for token in self._ending(row.params)]
        penalised = [(i, row.penalties) for i, row in rows if row.penalties is not None]
        allowed = [(i, row.params.allowed_token_ids) for i, row in rows if row.params.allowed_token_ids]
        return _Plan(
            allowed=self._allowed(allowed) if allowed else None,
            bans=(self._index([i for i, _ in bans]), self._index([t for _, t in bans])) if bans else None,
            bias=(
                self._index([i for i, _, _ in bias]),
                self._index([token for _, token, _ in bias]),
                self._floats([value for _, _, value in bias]),
            )
            if bias
            else None,
            penalised=(self._index([i for i, _ in penalised]), self._index([e for _, e in penalised]))
            if penalised
            else None,
            greedy=self._index([i for i, row in rows if row.params.greedy]) if drawn else None,
            drawn=self._index([i for i, _ in drawn]),
            temperature=self._floats([max(params.temperature, _COLDEST) for _, params in drawn])[:, None],
            free=self._index([j for j, (_, params) in enumerate(drawn) if not self._is_limited(params)]),
            limited=self._index([j for j, _ in limited]),
            limits=self._limits([params for _, params in limited]),
            reported=[i for i, row in rows if row.params.logprobs is not None],
        )

    def _is_limited(self, params: SamplingParams) -> bool:
        return 0 < params.top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0

    def _ending(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}

    def _allowed(self, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(len(rows), self._vocab_size, dtype=torch.bool, device=self._device)
        for j, (_, token_ids) in enumerate(rows):
            mask[j, self._index(token_ids)] = True
        return self._index([i for i, _ in rows]), mask

    def _limits(self, rows: Sequence[SamplingParams]) -> _Limits:
        return _Limits(
            top_k=self._index([min(p.top_k or self._vocab_size, self._vocab_size) for p in rows])[:, None],
            top_p=self._floats([p.top_p if p.top_p < 1.0 else math.inf for p in rows], torch.float64)[:, None],
            log_min_p=self._floats([math.log(p.min_p) if p.min_p else -math.inf for p in rows])[:, None],
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def draw_limited(scaled: Tensor, limits: _Limits, keys: Tensor, window: int = WINDOW) -> Tensor:
    """As `draw`, from the tokens that `limits` keep, to token ids; the logits' maximum must be 0.

    top_p counts the mass of what min_p and top_k keep, and keeps a token if the mass of the likelier ones is
    below p.
    """
    vocab_size = scaled.shape[1]
    window = min(window, vocab_size)
    values, ids = scaled.topk(window)
    kth = values.gather(1, limits.top_k.clamp(max=window) - 1)
    floor = torch.maximum(torch.where(limits.top_k < vocab_size, kth, -math.inf), limits.log_min_p)
    weights = torch.where(values >= floor, values.exp().double(), 0.0)
    total = weights.sum(-1, keepdim=True)
    beyond = values[:, -1:] >= floor
    if window < vocab_size and beyond.any():
        everything = torch.where(scaled >= floor, scaled.exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        total = torch.where(beyond, everything, total)
    kept = (weights.cumsum(-1) - weights < limits.top_p * total) & (values >= floor)
    threshold = values.gather(1, kept.sum(-1, keepdim=True) - 1)
    column = draw(values.masked_fill(values < threshold, -math.inf), ids.to(torch.int32), keys)
    tokens = ids.gather(1, column[:, None])[:, 0]
    if window < vocab_size:
        # Equal logits just beyond the window would be kept too.
        again = ((values[:, -1:] >= threshold) | ((limits.top_k > window) & (limits.top_k < vocab_size)))[:, 0]
        rows = again.nonzero()[:, 0]
        if len(rows):
            tokens[rows] = draw_limited(scaled[rows], limits.take(rows), keys[rows], 16 * window)
    return tokens


@torch.inference_mode()
def token_infos(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenInfo]:
    """Log-probabilities of one token a row, with its `top[i]` alternatives: from raw float32 `[n, vocab]` logits.

    Raises EngineError for logits that are not finite.
    """
    norms = logits.logsumexp(-1, keepdim=True)
    if not norms.isfinite().all():
        raise EngineError("logits are not finite")
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    found = (chosen - norms)[:, 0].tolist()
    count = min(max(top), logits.shape[1])
    values, ids = logits.topk(count, dim=-1)
    alternatives = [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), (values - norms).tolist(), strict=True)
    ]
    return [
        TokenInfo(token, logprob, row[:wanted])
        for token, logprob, row, wanted in zip(token_ids, found, alternatives, top, strict=True)
    ]
