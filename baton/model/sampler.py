"""From logits to tokens, for a whole batch at once.

Steps, in vLLM's order: the token masks (allowed_token_ids, a mask given with the call), min_tokens,
logit_bias, the penalties; then greedy rows take the argmax, and the others divide by the temperature, apply
min_p, top_k and top_p, and draw. Log-probabilities are those of the raw logits.

min_p, top_k and top_p each keep the tokens at or above some logit, so together they are one threshold a row;
tokens as likely as the last one kept are kept too, and no sort order matters. The threshold and the draw are
found among the 64 most likely tokens. A row that keeps more is drawn without top_p (`draw_wide`), and its token is
kept if the mass of the likelier ones is below p. If not, neither that token nor a less likely one is in the
nucleus, and the row is drawn again from the likelier ones: what is kept at last is what has most score within
the nucleus, and no sort is needed.

A draw adds to each logit a noise that depends on seed, choice index, output index and token id only, and takes
the largest (`baton.model.gumbel`).

Every operation is row by row, so a row's token does not depend on other rows. All state is a pure function of
the SequenceState; what is kept between steps (penalty counts, the metadata) equals what a rebuild would give.

A step does for each row only what that row's parameters ask for. What a row needs from step to step
(`baton.model.logits_processor`, `baton.model.penalties`) is built when it joins. What is rebuilt when others join or
leave (`_SamplingMetadata`) is a few numbers a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from baton.errors import NoToken
from baton.model.gumbel import Draws, GumbelArgmax, LowestNoise, lowest_noise, scores_of
from baton.model.logit_tiles import LogitTiles
from baton.model.logits_processor import LogitsProcessor, RowProcessor, row_processor
from baton.model.noise import noise_key
from baton.model.penalties import PenalizedRows, PenaltyEntry, PenaltyTable, apply_penalties
from baton.model.sampler_output import SamplerOutput
from baton.model.upload import upload, upload_ints
from baton.request import SamplingParams, SequenceState, TokenInfo

WINDOW = 64

_NO_WEIGHT = -80.0
"""A scaled logit too low to change a sum of weights of which the largest is 1, and high enough for a quick exp."""

_NARROW = 0.5
"""A top_p below which the first draw is likely to be in vain."""

_BINS, _LAST_BIN = 1 << 15, 0x7F80
"""Numbers of one sign by the upper half of their bits, in float32; infinity is in the last one."""

_SLACK = 1e-9
"""More than the relative error of a sum of weights."""

_COLDEST = torch.finfo(torch.float32).tiny
"""The lowest temperature divided by: a lower one could become 0 in float32, and make NaN of 0 / 0."""


@dataclass(eq=False, slots=True)
class _Row:
    state: SequenceState
    outputs: int
    processor: RowProcessor
    penalties: PenaltyEntry | None

    @property
    def params(self) -> SamplingParams:
        return self.state.params

    @property
    def may_end(self) -> bool:
        return self.outputs >= self.params.min_tokens


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of rows that use top_k, top_p or min_p: `[R, 1]` each, neutral where a row does not use one.

    `deep` lists the rows, by place, whose top_k is beyond the window, with that top_k.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    deep: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _SamplingMetadata:
    """Sampling parameters of the batch as tensors; kept until the batch or a min_tokens ban changes.

    Row indices are int64. `free` and `limited` index `drawn`; `reporting` is `reported` on the device.
    """

    processor: LogitsProcessor
    penalized: Sequence[PenalizedRows]
    drawn: Tensor
    temperature: Tensor
    free: Tensor
    limited: Tensor
    limits: _Limits
    reported: list[int]
    reporting: Tensor


class SamplerBatch:
    """The sampling state of a batch: rows are added at the end, and the last one fills the place of one removed."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device, lowest: LowestNoise = lowest_noise
    ) -> None:
        """`lowest` is `baton.model.gumbel.lowest_noise`, or what computes the same."""
        self._lowest = lowest
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._rows: list[_Row] = []
        self._table = PenaltyTable(device)
        self._metadata: _SamplingMetadata | None = None

    def add(self, state: SequenceState) -> None:
        """A new last row."""
        entry = self._table.add(state) if state.params.penalizes else None
        processor = row_processor(state.params, self._eos, self._vocab_size, self._device, self._denied(state.params))
        self._rows.append(_Row(state, len(state.output_ids), processor, entry))
        self._metadata = None

    def remove(self, index: int) -> None:
        """Remove a row; the last row takes its place."""
        row, last = self._rows[index], self._rows.pop()
        if last is not row:
            self._rows[index] = last
        if row.penalties is not None:
            self._table.remove(row.penalties)
        self._metadata = None

    @property
    def counts(self) -> bool:
        """Whether some row's next token depends on which tokens came before, so that `count` must know them all."""
        return any(row.penalties is not None for row in self._rows)

    @property
    def takes_largest(self) -> bool:
        """Whether each row's next token is that of its largest logit, and nothing else is asked about logits."""
        metadata = self._metadata = self._metadata or self._build()
        changed = metadata.processor.changes or metadata.penalized
        return not (changed or metadata.reported or len(metadata.drawn))

    def sample(self, logits: Tensor, mask: Tensor | None = None) -> list[TokenInfo | NoToken]:
        """The next token of each row, waiting for the device; call `accept` with the tokens that were taken."""
        return self.launch(logits, mask).read()

    @torch.inference_mode()
    def launch(self, logits: Tensor, mask: Tensor | None = None) -> SamplerOutput:
        """Choose the next token of each row on the device; call `advance` when they are taken.

        `logits`: float32 `[B, vocab]`, overwritten. `mask`: bool `[B, vocab]`, true where a token is allowed.
        A row whose logits are not finite, or without an allowed token, gets an error in place of a token.
        On CUDA nothing here waits for the device, but for rows with top_k, top_p or min_p.
        """
        metadata = self._metadata = self._metadata or self._build()
        checks = [logits.sum(-1).isfinite()]
        raw = logits[metadata.reporting] if metadata.reported else None
        metadata.processor.apply(logits, mask)
        for group in metadata.penalized:
            apply_penalties(logits, group)
        tiles = LogitTiles(logits)
        if metadata.processor.forbids or mask is not None:
            checks.append(tiles.maxima.amax(-1) > -math.inf)
        sampled = SamplerOutput(self._choose(tiles, metadata), checks)
        if raw is not None:
            wanted = [self._rows[i].params.logprobs or 0 for i in metadata.reported]
            sampled.report(metadata.reported, raw, wanted)
        return sampled

    def advance(self) -> None:
        """Each row's sequence has grown by a token; which one, `count` is told."""
        for row in self._rows:
            row.outputs += 1
            if row.outputs == row.params.min_tokens:
                self._metadata = None

    def count(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Rows, each at most once, and the tokens by which their sequences have grown."""
        counted = [(self._rows[index].penalties, token) for index, token in tokens]
        entries = [(entry, token) for entry, token in counted if entry is not None]
        if entries and self._table.append(*zip(*entries, strict=True)):
            self._metadata = None

    def accept(self, tokens: Sequence[int]) -> None:
        """Each row's sequence has grown by its entry of `tokens`."""
        self.advance()
        self.count(list(enumerate(tokens)))

    def _denied(self, params: SamplingParams) -> Tensor | None:
        """The mask of a row with the very same list: other choices of the request."""
        wanted = params.allowed_token_ids
        return next((row.processor.denied for row in self._rows if row.params.allowed_token_ids is wanted), None)

    def _choose(self, tiles: LogitTiles, metadata: _SamplingMetadata) -> Tensor:
        tokens = tiles.argmax()
        if not len(metadata.drawn):
            return tokens
        words = [
            noise_key(row.params.seed or 0, row.state.choice_index, row.outputs)
            for row in self._rows
            if not row.params.greedy
        ]
        keys = upload(words, torch.int64, tokens.device).to(torch.int32)
        top = tiles.maxima[metadata.drawn].amax(-1, keepdim=True)
        draws = Draws(metadata.drawn, top, metadata.temperature, keys)
        if len(metadata.free):
            free = draws.take(metadata.free)
            everything = torch.full_like(free.top, -math.inf)
            index = torch.arange(len(free.rows), device=tokens.device)
            tokens[free.rows] = GumbelArgmax(tiles, free, self._lowest).argmax(index, everything)
        if len(metadata.limited):
            limited = draws.take(metadata.limited)
            tokens[limited.rows] = draw_limited(tiles, limited, metadata.limits, self._lowest)
        return tokens

    def _build(self) -> _SamplingMetadata:
        rows = list(enumerate(self._rows))
        drawn = [(i, row.params) for i, row in rows if not row.params.greedy]
        limited = [(j, params) for j, (_, params) in enumerate(drawn) if self._is_limited(params)]
        penalized = [(i, row.penalties) for i, row in rows if row.penalties is not None]
        # Rows without alternatives last, as `Logprobs.of` wants them.
        reported = [i for i, row in rows if row.params.logprobs] + [i for i, row in rows if row.params.logprobs == 0]
        return _SamplingMetadata(
            processor=LogitsProcessor.of([(i, row.processor, row.may_end) for i, row in rows], self._device),
            penalized=self._table.grouped([i for i, _ in penalized], [entry for _, entry in penalized]),
            drawn=self._index([i for i, _ in drawn]),
            temperature=self._floats([max(params.temperature, _COLDEST) for _, params in drawn])[:, None],
            free=self._index([j for j, (_, params) in enumerate(drawn) if not self._is_limited(params)]),
            limited=self._index([j for j, _ in limited]),
            limits=self._limits([params for _, params in limited]),
            reported=reported,
            reporting=self._index(reported),
        )

    def _is_limited(self, params: SamplingParams) -> bool:
        return self._counts(params) or params.top_p < 1.0 or params.min_p > 0.0

    def _counts(self, params: SamplingParams) -> bool:
        return 0 < params.top_k < self._vocab_size

    def _limits(self, rows: Sequence[SamplingParams]) -> _Limits:
        return _Limits(
            top_k=self._index([p.top_k if self._counts(p) else self._vocab_size for p in rows])[:, None],
            top_p=self._floats([p.top_p if p.top_p < 1.0 else math.inf for p in rows], torch.float64)[:, None],
            log_min_p=self._floats([math.log(p.min_p) if p.min_p else -math.inf for p in rows])[:, None],
            deep=[(j, p.top_k) for j, p in enumerate(rows) if self._counts(p) and p.top_k > WINDOW],
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return upload_ints(values, self._device)

    def _floats(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, dtype, self._device)


def draw_limited(tiles: LogitTiles, draws: Draws, limits: _Limits, lowest: LowestNoise) -> Tensor:
    """The token ids drawn from what `limits` keep, int64 `[R]`.

    top_p counts the mass of what min_p and top_k keep, and keeps a token if the mass of the likelier ones is
    below p.
    """
    window = min(WINDOW, tiles.vocab)
    logits, ids = tiles.top(draws.rows, window)
    values = draws.scale(logits)
    kth = values.gather(1, limits.top_k.clamp(max=window) - 1)
    if limits.deep:
        deep = torch.tensor([place for place, _ in limits.deep]).to(values.device, non_blocking=True)
        kth[deep] = kth_largest(tiles, draws.take(deep), [count for _, count in limits.deep])
    floor = torch.maximum(torch.where(limits.top_k < tiles.vocab, kth, -math.inf), limits.log_min_p)
    weights = torch.where(values >= floor, values.exp().double(), 0.0)
    mass = limits.top_p * weights.sum(-1, keepdim=True)
    if window < tiles.vocab:
        beyond = ((values[:, -1:] >= floor) & (limits.top_p < math.inf))[:, 0].nonzero()[:, 0]
        if len(beyond):
            mass[beyond] = limits.top_p[beyond] * mass_above(tiles, draws.take(beyond), _below(floor[beyond]))
    kept = (weights.cumsum(-1) - weights < mass) & (values >= floor)
    # A row that is not finite keeps none.
    threshold = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    scores = scores_of(values, ids.to(torch.int32), draws.keys).masked_fill_(values < threshold, -math.inf)
    tokens = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    if window < tiles.vocab:
        # Equal logits just beyond the window would be kept too.
        wide = (values[:, -1:] >= threshold)[:, 0].nonzero()[:, 0]
        if len(wide):
            tokens[wide] = draw_wide(tiles, draws.take(wide), floor[wide], limits.top_p[wide], mass[wide], lowest)
    return tokens


def draw_wide(
    tiles: LogitTiles, draws: Draws, floor: Tensor, top_p: Tensor, mass: Tensor, lowest: LowestNoise
) -> Tensor:
    """As `draw_limited`, for rows that keep more tokens than the window, or may do so.

    `floor` (float32 `[R, 1]`): the least scaled logit that min_p and top_k keep; `mass` (float64 `[R, 1]`): `top_p` of
    what they keep. Both are infinite without a top_p.
    """
    search = GumbelArgmax(tiles, draws, lowest)
    tokens = torch.empty_like(draws.rows)
    waiting = torch.arange(len(tokens), device=tokens.device)
    inside = torch.zeros_like(floor)
    # Else a nucleus that is narrow among many tokens would be drawn for again and again.
    narrow = (top_p < _NARROW)[:, 0].nonzero()[:, 0]
    while len(waiting):
        if len(narrow):
            least, inside[narrow] = nucleus(tiles, draws.take(narrow), mass[narrow])
            floor[narrow] = torch.maximum(floor[narrow], least)
        part = draws.take(waiting)
        found = tokens[waiting] = search.argmax(waiting, floor[waiting])
        scaled = part.scale(tiles.logits[part.rows, found][:, None])
        doubtful = (scaled < 0) & (scaled <= inside[waiting]) & mass[waiting].isfinite()
        places = doubtful[:, 0].nonzero()[:, 0]
        above = mass_above(tiles, part.take(places), scaled[places])
        outside = places[(above >= mass[waiting[places]])[:, 0]]
        waiting, least = waiting[outside], scaled[outside]
        floor[waiting] = torch.nextafter(least, torch.full_like(least, math.inf))
        narrow = waiting[(inside[waiting] == 0)[:, 0]]
    return tokens


def kth_largest(tiles: LogitTiles, draws: Draws, counts: Sequence[int]) -> Tensor:
    """The k-th largest scaled logit of each row, k from `counts`: float32 `[R, 1]`."""
    found = []
    for place, count in enumerate(counts):
        part = draws.take(slice(place, place + 1))
        scaled = part.scale(tiles.logits[part.rows])[0]
        found.append(
            _kth(scaled, count) if scaled.device.type == "cpu" else scaled.kthvalue(1 + len(scaled) - count)[0]
        )
    return torch.stack(found)[:, None]


def _kth(scaled: Tensor, count: int) -> Tensor:
    """The scaled logit at place `count` of a row: by the upper half of its bits, then by the lower."""
    bits = scaled.abs().view(torch.int32)
    for shift in (16, 0):
        digits = (bits >> shift).bitwise_and_(0xFFFF).long()
        reached = torch.bincount(digits, minlength=1 << 16).cumsum(0)
        chosen = int(torch.searchsorted(reached, count))
        count -= int(reached[chosen - 1]) if chosen else 0
        bits = bits[digits == chosen]
    return bits[:1].view(torch.float32).neg()[0]


def nucleus(tiles: LogitTiles, draws: Draws, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Two scaled logits, float32 `[R, 1]` each, near the least whose likelier tokens have less than `mass`.

    Tokens below the first have `mass` or more above them, those above the second have less.
    """
    scaled = draws.scale(tiles.logits[draws.rows])
    masses = torch.zeros(len(scaled), _BINS, dtype=torch.float64, device=scaled.device)
    reached = masses.scatter_add_(1, _bins(scaled), scaled.exp_().double()).cumsum_(1)
    # A sum in another order may be another one in its last bits.
    first = torch.searchsorted(reached, mass * (1 - _SLACK))
    last = torch.searchsorted(reached, mass * (1 + _SLACK))
    return _edge(last + 1), _edge(first)


def _bins(scaled: Tensor) -> Tensor:
    """Scaled logits as the upper halves of their bits, int64 from 0 to _BINS: larger for what is less likely."""
    return scaled.abs().view(torch.int32).bitwise_right_shift_(16).long()


def _edge(bins: Tensor) -> Tensor:
    """The largest scaled logit of each bin, or -inf where there is no such bin."""
    return bins.clamp_(max=_LAST_BIN).to(torch.int32).bitwise_left_shift_(16).view(torch.float32).neg_()


def mass_above(tiles: LogitTiles, draws: Draws, level: Tensor) -> Tensor:
    """The sum of exp(scaled logit) over the tokens whose scaled logit is above `level`: float64 `[R, 1]`.

    Not for a level that the largest, 0, does not exceed.
    """
    if level.device.type != "cpu":
        return _mass_at_once(tiles, draws, level)
    level = level.clamp(min=_NO_WEIGHT)
    # A row at a time stays in the cache.
    sums = torch.empty_like(level, dtype=torch.float64)
    spare = torch.empty(tiles.vocab)
    for i, (row, least) in enumerate(zip(draws.rows.tolist(), level[:, 0].tolist(), strict=True)):
        scaled = torch.sub(tiles.logits[row], draws.top[i], out=spare).div_(draws.temperature[i])
        sums[i] = threshold(scaled, least, _NO_WEIGHT, inplace=True).exp_().sum(dtype=torch.float64)
    return sums


def _mass_at_once(tiles: LogitTiles, draws: Draws, level: Tensor) -> Tensor:
    """As `mass_above`, for all rows together; NaN for a row that contains NaN, which is not drawn again."""
    level = level.clamp(min=_NO_WEIGHT)
    scaled = draws.scale(tiles.logits[draws.rows])
    return torch.where(scaled <= level, _NO_WEIGHT, scaled).exp_().sum(-1, keepdim=True, dtype=torch.float64)


def _below(level: Tensor) -> Tensor:
    return torch.nextafter(level, torch.full_like(level, -math.inf))
