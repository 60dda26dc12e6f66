"""From logits to tokens, for a whole batch at once.

The steps are, in vLLM's order: allowed_token_ids, min_tokens, logit_bias and the penalties. Then greedy rows take the
argmax. The other rows divide by the temperature, apply min_p, top_k and top_p (`baton.model.truncation`), and draw.
Log-probabilities are computed from the raw logits.

A draw adds noise to each logit and takes the largest sum (`baton.model.gumbel`). The noise depends only on seed, choice
index, output index and token id.

Every operation is row by row, so a row's token does not depend on other rows. All state is a pure function of the
SequenceState: the state that is kept between steps equals the state that a rebuild would give.

Each row costs only the steps that its parameters ask for. Large state of a row (`baton.model.logits_processor`,
`baton.model.penalties`) is built once, when the row joins. Only `_SamplingMetadata`, a few numbers for each row, is
rebuilt when other rows join or leave.

The copy of sampled tokens from the device to the host is queued at once; `SamplerOutput.read` waits for it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import NoToken
from baton.model.gumbel import Draws, GumbelArgmax, LowestNoise, lowest_noise, noise_key
from baton.model.logit_tiles import LogitTiles
from baton.model.logits_processor import LogitsProcessor, RowProcessor, row_processor
from baton.model.penalties import PenalizedRows, PenaltyEntry, PenaltyTable, apply_penalties
from baton.model.tensors import download, upload
from baton.model.truncation import WINDOW, Limits, draw_limited
from baton.request import SamplingParams, SequenceState, TokenInfo

_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smallest divisor of logits, in place of a lower temperature: float32 could round that to 0, and 0 / 0 is NaN."""

_PROBLEMS = ("logits are not finite", "no token is allowed")


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
class _SamplingMetadata:
    """Sampling parameters of the batch as tensors; kept until a row joins or leaves, or a min_tokens ban ends.

    All indices are int64. `drawn` has the rows that draw. `free` and `limited` are positions in `drawn`: rows without
    and with a limit (min_p, top_k, top_p). `reported` lists the rows with log-probabilities; `reporting` is the same on
    the device.
    """

    processor: LogitsProcessor
    penalized: Sequence[PenalizedRows]
    drawn: Tensor
    temperature: Tensor
    free: Tensor
    limited: Tensor
    limits: Limits
    reported: list[int]
    reporting: Tensor


class SamplerBatch:
    """The sampling state of a batch. A new row goes to the end; the last row fills the place of a removed one."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device, lowest: LowestNoise = lowest_noise
    ) -> None:
        """Make an empty batch. `lowest` is `baton.model.gumbel.lowest_noise`, or a function with the same results."""
        self._lowest = lowest
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._rows: list[_Row] = []
        self._table = PenaltyTable(device)
        self._metadata: _SamplingMetadata | None = None

    def add(self, state: SequenceState) -> None:
        """Add a sequence as the new last row."""
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
    def penalizes(self) -> bool:
        """Whether a row has a penalty, so that `add_token_ids` must get every output."""
        return any(row.penalties is not None for row in self._rows)

    @property
    def all_greedy(self) -> bool:
        """Whether the next token of each row is the argmax of its unchanged logits, without log-probabilities."""
        metadata = self._metadata = self._metadata or self._build()
        changed = metadata.processor.changes or metadata.penalized
        return not (changed or metadata.reported or len(metadata.drawn))

    def sample(self, logits: Tensor) -> list[TokenInfo | NoToken]:
        """Choose the next token of each row, and wait for the device; arguments and errors as in `launch`."""
        return self.launch(logits).read()

    @torch.inference_mode()
    def launch(self, logits: Tensor) -> SamplerOutput:
        """Choose the next token of each row on the device. The caller then counts the tokens with `add_outputs`.

        `logits` is float32 `[B, vocab]`, and is overwritten. A row gets NoToken in place of a token if its logits are
        not finite or no token is allowed. On CUDA the call does not wait for the device, unless a row has top_k, top_p
        or min_p.
        """
        metadata = self._metadata = self._metadata or self._build()
        checks = [logits.sum(-1).isfinite()]
        raw = logits[metadata.reporting] if metadata.reported else None
        metadata.processor.apply(logits)
        for group in metadata.penalized:
            apply_penalties(logits, group)
        tiles = LogitTiles(logits)
        if metadata.processor.forbids:
            checks.append(tiles.maxima.amax(-1) > -math.inf)
        sampled = SamplerOutput(self._choose(tiles, metadata), checks)
        if raw is not None:
            wanted = [self._rows[i].params.logprobs or 0 for i in metadata.reported]
            sampled.report(metadata.reported, raw, wanted)
        return sampled

    def add_outputs(self, counts: Sequence[int]) -> None:
        """Add a number of outputs to each row; `add_token_ids` takes the ids, for penalties."""
        for row, count in zip(self._rows, counts, strict=True):
            row.outputs += count
            if row.outputs - count < row.params.min_tokens <= row.outputs:
                self._metadata = None

    def add_token_ids(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Count the token id of a new output for the penalties of its row; `tokens` has each row at most once."""
        counted = [(self._rows[index].penalties, token) for index, token in tokens]
        entries = [(entry, token) for entry, token in counted if entry is not None]
        if entries and self._table.append(*zip(*entries, strict=True)):
            self._metadata = None

    def _denied(self, params: SamplingParams) -> Tensor | None:
        """The mask of another row with the same list object, if there is one: a choice of the same request."""
        wanted = params.allowed_token_ids
        return next((row.processor.denied for row in self._rows if row.params.allowed_token_ids is wanted), None)

    def _choose(self, tiles: LogitTiles, metadata: _SamplingMetadata) -> Tensor:
        tokens = tiles.argmax()
        if not len(metadata.drawn):
            return tokens
        pairs = [
            noise_key(row.params.seed or 0, row.state.choice_index, row.outputs)
            for row in self._rows
            if not row.params.greedy
        ]
        keys = upload(pairs, torch.int64, tokens.device).to(torch.int32)
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
            temperature=self._floats([max(params.temperature, _MIN_TEMPERATURE) for _, params in drawn])[:, None],
            free=self._index([j for j, (_, params) in enumerate(drawn) if not self._is_limited(params)]),
            limited=self._index([j for j, _ in limited]),
            limits=self._limits([params for _, params in limited]),
            reported=reported,
            reporting=self._index(reported),
        )

    def _is_limited(self, params: SamplingParams) -> bool:
        return self._has_top_k(params) or params.top_p < 1.0 or params.min_p > 0.0

    def _has_top_k(self, params: SamplingParams) -> bool:
        return 0 < params.top_k < self._vocab_size

    def _limits(self, rows: Sequence[SamplingParams]) -> Limits:
        return Limits(
            top_k=self._index([p.top_k if self._has_top_k(p) else self._vocab_size for p in rows])[:, None],
            top_p=self._floats([p.top_p if p.top_p < 1.0 else math.inf for p in rows], torch.float64)[:, None],
            log_min_p=self._floats([math.log(p.min_p) if p.min_p else -math.inf for p in rows])[:, None],
            deep=[(j, p.top_k) for j, p in enumerate(rows) if self._has_top_k(p) and p.top_k > WINDOW],
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return upload(array("q", values), torch.int64, self._device)

    def _floats(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, dtype, self._device)


class SamplerOutput:
    """Tokens that a step has chosen. `tokens` is int64 `[B]`, on the device; it is 0 for a row that failed a check.

    On CUDA, tokens and checks are copied to the host together, and log-probabilities in a second copy.
    """

    def __init__(self, tokens: Tensor, checks: Sequence[Tensor]) -> None:
        """Queue the copy to the host. Each of `checks` is bool `[B]`, False for a row that fails.

        The first check is that logits are finite, the second that a token is allowed.
        """
        good = checks[0] if len(checks) == 1 else torch.stack(list(checks)).all(0)
        # The next step embeds this token before the host knows that the row has failed.
        self.tokens = tokens * good
        self._found = download(torch.stack([self.tokens, *checks]))
        self._rows: Sequence[int] = ()
        self._logprobs: Logprobs | None = None
        self._there = _mark(tokens.device)

    def report(self, rows: Sequence[int], logits: Tensor, tops: Sequence[int]) -> None:
        """Add log-probabilities of `rows`, from their raw logits, float32 `[n, vocab]`; `tops` as in `Logprobs.of`."""
        self._rows = rows
        chosen = self.tokens[upload(rows, torch.int64, self.tokens.device)]
        self._logprobs = Logprobs.of(logits, chosen, tops)
        self._there = _mark(self.tokens.device)

    def read(self) -> list[TokenInfo | NoToken]:
        """Wait for the device; returns the token of each row, or NoToken if the row failed a check."""
        if self._there is not None:
            self._there.synchronize()
        tokens, *checks = self._found.tolist()
        infos: list[TokenInfo | NoToken] = [TokenInfo(token) for token in tokens]
        if self._logprobs is not None:
            for row, info in zip(self._rows, self._logprobs.infos([tokens[row] for row in self._rows]), strict=True):
                infos[row] = info
        # The first problem of a row last, as it is the cause of the others.
        for problem, check in reversed(list(zip(_PROBLEMS, checks, strict=False))):
            for row, good in enumerate(check):
                if not good:
                    infos[row] = NoToken(problem)
        return infos


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the rows of a step, in host memory.

    `chosen` `[n, 2]` has the log-probability of one token of each row, and the row's normaliser. `values` and `ids`
    `[m, k]` have the likeliest tokens of the first m rows, which ask for alternatives. `tops` has the number of
    alternatives of each row.
    """

    chosen: Tensor
    values: Tensor
    ids: Tensor
    tops: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Logprobs:
        """Compute the log-probabilities of `tokens`, int64 `[n]`, and of the `tops[i]` likeliest tokens of each row i.

        `logits` are raw, float32 `[n, vocab]`. Rows with `tops[i] == 0` must come last. The results are being copied to
        the host when this returns; `infos` reads them.
        """
        norms = logits.logsumexp(-1, keepdim=True)
        chosen = torch.cat([logits.gather(1, tokens[:, None]) - norms, norms], 1)
        # Only rows that ask for alternatives pay for the search.
        asked = sum(top > 0 for top in tops)
        values, ids = logits[:0].topk(0)
        if asked:
            rows, count = torch.arange(asked, device=logits.device), min(max(tops), logits.shape[1])
            values, ids = LogitTiles(logits[:asked]).top(rows, count)
        return cls(download(chosen), download(values - norms[:asked]), download(ids), tops)

    def infos(self, token_ids: Sequence[int]) -> list[TokenInfo]:
        """One TokenInfo for each row, with the row's alternatives; call it when the copy to the host is complete."""
        alternatives = zip(self.ids.tolist(), self.values.tolist(), strict=True)
        infos = []
        for token, (logprob, _), top in zip(token_ids, self.chosen.tolist(), self.tops, strict=True):
            likeliest = tuple(zip(*next(alternatives), strict=True))[:top] if top else ()
            infos.append(TokenInfo(token, logprob, likeliest))
        return infos


@torch.inference_mode()
def token_infos(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenInfo]:
    """Log-probabilities of one given token of each row, with the row's `top[i]` likeliest alternatives.

    `logits` are raw, float32 `[n, vocab]`. Raises NoToken if they are not finite.
    """
    scores = Logprobs.of(logits, upload(token_ids, torch.int64, logits.device), top)
    if (there := _mark(logits.device)) is not None:
        there.synchronize()
    if not scores.chosen[:, 1].isfinite().all():
        raise NoToken(_PROBLEMS[0])
    return scores.infos(token_ids)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after all work that is queued on the device now; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    # Not the stream of the current device, which may be another one.
    event.record(torch.cuda.current_stream(device))
    return event
