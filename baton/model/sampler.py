"""From logits to tokens, for a whole batch at once.

Steps, in vLLM's order: the token masks (allowed_token_ids, a mask given with the call), min_tokens,
logit_bias, the penalties; then greedy rows take the argmax, and the others divide by the temperature, apply
min_p, top_k and top_p, and draw. Log-probabilities are those of the raw logits.

min_p, top_k and top_p each keep the tokens at or above some logit, so together they are one threshold a row;
tokens as likely as the last one kept are kept too, and no sort order matters. The threshold and the draw are
found among the 64 most likely tokens. A row whose nucleus is wider is drawn without top_p, and its token is
kept if the mass of the likelier ones is below p. If not, neither that token nor a less likely one is in the
nucleus, and the row is drawn again from the likelier ones: what is kept at last is what has most score within
the nucleus, and no sort is needed.

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
from torch.nn.functional import threshold

from baton.model.blocks import Blocks
from baton.model.gumbel import Draws, Race, scores_of
from baton.model.noise import noise_key
from baton.model.penalties import PenaltyTable, has_penalties
from baton.model.sampled import Sampled
from baton.model.upload import upload
from baton.request import SamplingParams, SequenceState, TokenInfo

WINDOW = 64

_NO_WEIGHT = -80.0
"""A scaled logit too low to change a sum of weights of which the largest is 1, and high enough for a quick exp."""

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

    Row indices are int64. `free` and `limited` index `drawn`.
    """

    allowed: tuple[Tensor, Tensor] | None
    bans: tuple[Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor, Tensor] | None
    penalised: tuple[Tensor, Tensor] | None
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

    @property
    def counts(self) -> bool:
        """Whether some row's next token depends on which tokens came before, so that `count` must know them all."""
        return any(row.penalties is not None for row in self._rows)

    def sample(self, logits: Tensor, mask: Tensor | None = None) -> list[TokenInfo]:
        """The next token of each row, as `launch` and `Sampled.read`; `accept` tells the batch that they were taken."""
        return self.launch(logits, mask).read()

    @torch.inference_mode()
    def launch(self, logits: Tensor, mask: Tensor | None = None) -> Sampled:
        """Choose the next token of each row on the device; `advance` tells the batch that they were taken.

        `logits`: float32 `[B, vocab]`, overwritten. `mask`: bool `[B, vocab]`, true where a token is allowed.
        Reading raises EngineError, naming the rows, for logits that are not finite and for rows without an
        allowed token. On CUDA nothing here waits for the device, but for rows with top_k, top_p or min_p.
        """
        plan = self._plan = self._plan or self._build()
        checks = [logits.sum(-1).isfinite()]
        raw = logits[self._index(plan.reported)] if plan.reported else None
        self._edit(logits, mask, plan)
        blocks = Blocks(logits)
        if plan.allowed is not None or mask is not None or plan.bans is not None:
            checks.append(blocks.maxima.amax(-1) > -math.inf)
        sampled = Sampled(self._choose(blocks, plan), checks, [row.name for row in self._rows])
        if raw is not None:
            wanted = [self._rows[i].params.logprobs or 0 for i in plan.reported]
            sampled.report(plan.reported, raw, wanted)
        return sampled

    def advance(self) -> None:
        """Each row's sequence has grown by a token; which one, `count` is told."""
        for row in self._rows:
            row.outputs += 1
            if row.outputs == row.params.min_tokens:
                self._plan = None

    def count(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Rows, each at most once, and the tokens by which their sequences have grown."""
        counted = [(self._rows[index].penalties, token) for index, token in tokens]
        entries = [(entry, token) for entry, token in counted if entry is not None]
        if entries:
            self._table.append(*zip(*entries, strict=True))

    def accept(self, tokens: Sequence[int]) -> None:
        """Each row's sequence has grown by its entry of `tokens`."""
        self.advance()
        self.count(list(enumerate(tokens)))

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

    def _choose(self, blocks: Blocks, plan: _Plan) -> Tensor:
        tokens = blocks.argmax()
        if not len(plan.drawn):
            return tokens
        words = [
            noise_key(row.params.seed or 0, row.state.choice_index, row.outputs)
            for row in self._rows
            if not row.params.greedy
        ]
        keys = upload(words, torch.int64, tokens.device).to(torch.int32)
        top = blocks.maxima[plan.drawn].amax(-1, keepdim=True)
        draws = Draws(plan.drawn, top, plan.temperature, keys)
        if len(plan.free):
            free = draws.take(plan.free)
            everything = torch.full_like(free.top, -math.inf)
            winners = Race(blocks, free).winners(torch.arange(len(free.rows), device=tokens.device), everything)
            tokens[free.rows] = winners
        if len(plan.limited):
            limited = draws.take(plan.limited)
            tokens[limited.rows] = draw_limited(blocks, limited, plan.limits)
        return tokens

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
        return upload(values, torch.int64, self._device)

    def _floats(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, dtype, self._device)


def draw_limited(blocks: Blocks, draws: Draws, limits: _Limits) -> Tensor:
    """The token ids drawn from what `limits` keep, int64 `[R]`.

    top_p counts the mass of what min_p and top_k keep, and keeps a token if the mass of the likelier ones is
    below p.
    """
    window = min(WINDOW, blocks.vocab)
    logits, ids = blocks.top(draws.rows, window)
    values = draws.scale(logits)
    counted = limits.top_k < blocks.vocab
    kth = values.gather(1, limits.top_k.clamp(max=window) - 1)
    floor = torch.maximum(torch.where(counted, kth, -math.inf), limits.log_min_p)
    weights = torch.where(values >= floor, values.exp().double(), 0.0)
    mass = limits.top_p * weights.sum(-1, keepdim=True)
    if window < blocks.vocab:
        beyond = ((values[:, -1:] >= floor) & (limits.top_p < math.inf))[:, 0].nonzero()[:, 0]
        if len(beyond):
            mass[beyond] = limits.top_p[beyond] * mass_above(blocks, draws.take(beyond), _below(floor[beyond]))
    kept = (weights.cumsum(-1) - weights < mass) & (values >= floor)
    # A row that is not finite keeps none.
    threshold = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    scores = scores_of(values, ids.to(torch.int32), draws.keys).masked_fill_(values < threshold, -math.inf)
    tokens = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    if window < blocks.vocab:
        # Equal logits just beyond the window would be kept too.
        wide = ((values[:, -1:] >= threshold) | (counted & (limits.top_k > window)))[:, 0].nonzero()[:, 0]
        if len(wide):
            tokens[wide] = draw_wide(blocks, draws.take(wide), limits.take(wide), floor[wide], mass[wide])
    return tokens


def draw_wide(blocks: Blocks, draws: Draws, limits: _Limits, floor: Tensor, mass: Tensor) -> Tensor:
    """As `draw_limited`, for rows that keep more than the window, or may.

    `floor` (float32 `[R, 1]`): the least scaled logit that min_p and top_k keep; `mass` (float64 `[R, 1]`): top_p of
    what they keep. Both are found here for a top_k beyond the window.
    """
    deep = ((limits.top_k > WINDOW) & (limits.top_k < blocks.vocab))[:, 0].nonzero()[:, 0]
    if len(deep):
        part, bounds = draws.take(deep), limits.take(deep)
        logits, _ = blocks.top(part.rows, int(bounds.top_k.max()))
        floor[deep] = torch.maximum(part.scale(logits.gather(1, bounds.top_k - 1)), bounds.log_min_p)
        mass[deep] = bounds.top_p * mass_above(blocks, part, _below(floor[deep]))
    race = Race(blocks, draws)
    tokens = torch.empty_like(draws.rows)
    waiting = torch.arange(len(tokens), device=tokens.device)
    while len(waiting):
        part = draws.take(waiting)
        found = tokens[waiting] = race.winners(waiting, floor[waiting])
        scaled = part.scale(blocks.logits[part.rows, found][:, None])
        doubtful = ((scaled < 0) & (limits.top_p[waiting] < math.inf))[:, 0].nonzero()[:, 0]
        above = mass_above(blocks, part.take(doubtful), scaled[doubtful])
        outside = doubtful[(above >= mass[waiting[doubtful]])[:, 0]]
        waiting, least = waiting[outside], scaled[outside]
        floor[waiting] = torch.nextafter(least, torch.full_like(least, math.inf))
    return tokens


def mass_above(blocks: Blocks, draws: Draws, level: Tensor) -> Tensor:
    """The sum of exp(scaled logit) over the tokens whose scaled logit is above `level`: float64 `[R, 1]`.

    Not for a level that the largest, 0, does not exceed.
    """
    if level.device.type != "cpu":
        return _mass_at_once(blocks, draws, level)
    level = level.clamp(min=_NO_WEIGHT)
    # A row at a time stays in the cache.
    sums = torch.empty_like(level, dtype=torch.float64)
    spare = torch.empty(blocks.vocab)
    for i, (row, least) in enumerate(zip(draws.rows.tolist(), level[:, 0].tolist(), strict=True)):
        scaled = torch.sub(blocks.logits[row], draws.top[i], out=spare).div_(draws.temperature[i])
        sums[i] = threshold(scaled, least, _NO_WEIGHT, inplace=True).exp_().sum(dtype=torch.float64)
    return sums


def _mass_at_once(blocks: Blocks, draws: Draws, level: Tensor) -> Tensor:
    """As `mass_above`, all rows together; NaN where a row has one, as there: no draw is repeated for such a row."""
    level = level.clamp(min=_NO_WEIGHT)
    scaled = draws.scale(blocks.logits[draws.rows])
    return torch.where(scaled <= level, _NO_WEIGHT, scaled).exp_().sum(-1, keepdim=True, dtype=torch.float64)


def _below(level: Tensor) -> Tensor:
    return torch.nextafter(level, torch.full_like(level, -math.inf))
