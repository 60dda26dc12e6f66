"""Draws from rows with top_k, top_p or min_p.

Each of these keeps the tokens whose logit is at or above some value, so together they are one threshold for each row.
Tokens as likely as the last kept one are kept too, so the order of a sort does not matter. The threshold and the token
are searched among the 64 most likely tokens. A row that keeps more is drawn without top_p (`draw_wide`), and its token
is kept if the mass of the likelier ones is below p. If not, the token and all less likely ones are outside the nucleus,
and the row is drawn again from the likelier ones. The token that is drawn last has the highest score of all tokens in
the nucleus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import threshold

from baton.model.gumbel import Draws, GumbelArgmax, LowestNoise, scores_of
from baton.model.logit_tiles import LogitTiles

WINDOW = 64
"""Number of most likely tokens of a row that are searched first."""

_NO_WEIGHT = -80.0
"""A scaled logit that is too low to change a sum of weights up to 1, and high enough for a fast exp."""

_NARROW = 0.5
"""For a lower top_p, the first draw is likely to be outside the nucleus."""

_BINS, _LAST_BIN = 1 << 15, 0x7F80
"""Bins of float32 numbers of one sign, by the upper half of their bits; infinity is in bin _LAST_BIN."""

_SLACK = 1e-9
"""Bound of the relative error of a sum of weights."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of rows that use top_k, top_p or min_p: `[R, 1]` each, neutral where a row does not use one.

    `deep` lists the rows, by place, whose top_k is beyond the window, with that top_k.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    deep: Sequence[tuple[int, int]]


def draw_limited(tiles: LogitTiles, draws: Draws, limits: Limits, lowest: LowestNoise) -> Tensor:
    """Draw a token of each row within `limits`; returns token ids, int64 `[R]`.

    top_p is a part of the mass that min_p and top_k keep: a token is kept if the mass of the likelier ones is below it.
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
    least_kept = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    scores = scores_of(values, ids.to(torch.int32), draws.keys).masked_fill_(values < least_kept, -math.inf)
    tokens = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    if window < tiles.vocab:
        # Equal logits just beyond the window would be kept too.
        wide = (values[:, -1:] >= least_kept)[:, 0].nonzero()[:, 0]
        if len(wide):
            tokens[wide] = draw_wide(tiles, draws.take(wide), floor[wide], limits.top_p[wide], mass[wide], lowest)
    return tokens


def draw_wide(
    tiles: LogitTiles, draws: Draws, floor: Tensor, top_p: Tensor, mass: Tensor, lowest: LowestNoise
) -> Tensor:
    """Draw as `draw_limited` does, for rows that keep, or may keep, more tokens than the window.

    `floor`, float32 `[R, 1]`, is the least scaled logit that min_p and top_k keep. `mass`, float64 `[R, 1]`, is `top_p`
    times the mass that they keep. `top_p` and `mass` are infinite in a row without a top_p.
    """
    search = GumbelArgmax(tiles, draws, lowest)
    tokens = torch.empty_like(draws.rows)
    waiting = torch.arange(len(tokens), device=tokens.device)
    inside = torch.zeros_like(floor)
    # Otherwise a narrow nucleus among many tokens would need many draws.
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
    """The k-th largest scaled logit of each row, with k from `counts`: float32 `[R, 1]`."""
    found = []
    for place, count in enumerate(counts):
        part = draws.take(slice(place, place + 1))
        scaled = part.scale(tiles.logits[part.rows])[0]
        found.append(
            _kth(scaled, count) if scaled.device.type == "cpu" else scaled.kthvalue(1 + len(scaled) - count)[0]
        )
    return torch.stack(found)[:, None]


def _kth(scaled: Tensor, count: int) -> Tensor:
    """The `count`-th largest scaled logit of a row, found by the upper half of its bits, then by the lower half."""
    bits = scaled.abs().view(torch.int32)
    for shift in (16, 0):
        digits = (bits >> shift).bitwise_and_(0xFFFF).long()
        reached = torch.bincount(digits, minlength=1 << 16).cumsum(0)
        chosen = int(torch.searchsorted(reached, count))
        count -= int(reached[chosen - 1]) if chosen else 0
        bits = bits[digits == chosen]
    return bits[:1].view(torch.float32).neg()[0]


def nucleus(tiles: LogitTiles, draws: Draws, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the nucleus: two scaled logits, float32 `[R, 1]` each.

    Tokens below the first are outside: the likelier ones have at least `mass`. Tokens above the second are inside.
    """
    scaled = draws.scale(tiles.logits[draws.rows])
    masses = torch.zeros(len(scaled), _BINS, dtype=torch.float64, device=scaled.device)
    reached = masses.scatter_add_(1, _bins(scaled), scaled.exp_().double()).cumsum_(1)
    # A sum in another order may differ in its last bits.
    first = torch.searchsorted(reached, mass * (1 - _SLACK))
    last = torch.searchsorted(reached, mass * (1 + _SLACK))
    return _edge(last + 1), _edge(first)


def _bins(scaled: Tensor) -> Tensor:
    """The bins of scaled logits, int64 from 0 to _BINS; a less likely token has a higher bin."""
    return scaled.abs().view(torch.int32).bitwise_right_shift_(16).long()


def _edge(bins: Tensor) -> Tensor:
    """The largest scaled logit of each bin, or -inf where there is no such bin."""
    return bins.clamp_(max=_LAST_BIN).to(torch.int32).bitwise_left_shift_(16).view(torch.float32).neg_()


def mass_above(tiles: LogitTiles, draws: Draws, level: Tensor) -> Tensor:
    """The sum of exp(scaled logit) over the tokens whose scaled logit is above `level`: float64 `[R, 1]`.

    `level` must be below 0, the largest scaled logit.
    """
    if level.device.type != "cpu":
        return _mass_at_once(tiles, draws, level)
    level = level.clamp(min=_NO_WEIGHT)
    # One row at a time, because it stays in the cache.
    sums = torch.empty_like(level, dtype=torch.float64)
    spare = torch.empty(tiles.vocab)
    for i, (row, least) in enumerate(zip(draws.rows.tolist(), level[:, 0].tolist(), strict=True)):
        scaled = torch.sub(tiles.logits[row], draws.top[i], out=spare).div_(draws.temperature[i])
        sums[i] = threshold(scaled, least, _NO_WEIGHT, inplace=True).exp_().sum(dtype=torch.float64)
    return sums


def _mass_at_once(tiles: LogitTiles, draws: Draws, level: Tensor) -> Tensor:
    """Compute `mass_above` for all rows at once; NaN for a row that contains NaN, which is not drawn again."""
    level = level.clamp(min=_NO_WEIGHT)
    scaled = draws.scale(tiles.logits[draws.rows])
    return torch.where(scaled <= level, _NO_WEIGHT, scaled).exp_().sum(-1, keepdim=True, dtype=torch.float64)


def _below(level: Tensor) -> Tensor:
    return torch.nextafter(level, torch.full_like(level, -math.inf))
