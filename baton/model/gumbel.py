"""Drawing a token by the Gumbel-max trick: the largest of logit + noise, where each token has noise of its own.

With independent standard Gumbel noise the winner is distributed as softmax(logits) (Gumbel 1954; Maddison et
al. 2014, arXiv:1411.0030). The last bits of logits depend on the shapes of matrix products. Here they change the winner
only if the two best scores are nearly equal. If a token were drawn by a running sum of probabilities instead, they
would move the borders of all tokens.

A token's noise is -log(-log(1 - u)) with u = (z + 1/2) / 2**31, where z is 31 bits of a hash of token id and key:
MurmurHash3's 32-bit finalizer (Appleby, public domain), twice, with a word of the key before each. Scores are
compared in float64. The smallest z of a tile of tokens and its largest logit give an upper bound of its scores. So on a
CPU one logarithm is taken for each tile, and then one for each token of the few tiles that may have the winner.

The key of a token's noise depends on nothing but (seed, choice index, output index). A counter-based generator has no
state to carry, lose or share: any worker, in any batch, after any replay, computes the same noise for the same token.
The generator is Philox-4x32-10 from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11); its published
vectors are in the tests. It is computed in Python, one call for each sequence of a step, about 4 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.logit_tiles import LogitTiles

SPAN = 26.0
"""An upper bound of the largest noise minus the smallest noise, which is log(32 ln 2) + 32 ln 2 = 25.3."""

MARGIN = 1e-3
"""Scores this near to the best one are compared again in float64: far more than the error of a float32 score with
noise above -2.5, and far less than the usual distance between the two best scores."""

_FIRST_READ = 32
"""Number of tiles that are read first, to find a good score that rules out most other tiles."""

_SLACK = 1e-9
"""An upper bound of the error of a float64 score."""

_GOLDEN, _FIRST, _SECOND = (constant - 2**32 for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_BELOW_ONE = 1 - 2**-24

_CACHED = 1 << 18
"""Number of tokens that are hashed in one operation on a CPU: they fit into its cache."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
"""Constants of Philox."""

_Words = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows of logits to draw from.

    `rows` has the indices of the rows, int64 `[R]`. `top` and `temperature` are the largest logit and the temperature
    of each row, float32 `[R, 1]`. `keys` are the words of `noise_key` as signed numbers, int32 `[R, 2]`.
    """

    rows: Tensor
    top: Tensor
    temperature: Tensor
    keys: Tensor

    def take(self, index: Tensor | slice) -> Draws:
        """The draws at these indices."""
        return Draws(self.rows[index], self.top[index], self.temperature[index], self.keys[index])

    def scale(self, values: Tensor) -> Tensor:
        """Subtract the largest logit from `values` `[R, n]`, so that none overflows; divide by the temperature."""
        return (values - self.top) / self.temperature


class GumbelArgmax:
    """Finds the argmax of logit + noise over the vocabulary; the bounds of the tiles' scores are computed once."""

    def __init__(self, tiles: LogitTiles, draws: Draws, lowest: LowestNoise) -> None:
        """`lowest` is `lowest_noise`, or a function with the same results."""
        self._tiles = tiles
        self._draws = draws
        self._maxima = draws.scale(tiles.maxima[draws.rows])
        self._bound = self._bounds(lowest) if self._maxima.device.type == "cpu" else None

    def argmax(self, index: Tensor, floor: Tensor) -> Tensor:
        """Draw a token for each of the draws at `index`, int64 `[Q]`; returns token ids, int64 `[Q]`.

        Only tokens with a scaled logit of at least `floor`, float32 `[Q, 1]`, are drawn; there must be one in each row.
        """
        if self._bound is None:
            return self._dense(self._draws.take(index), floor)
        bound = self._bound[index].masked_fill_(self._maxima[index] < floor, -torch.inf)
        first = bound.topk(min(_FIRST_READ, bound.shape[1]), sorted=False).indices
        places = torch.arange(len(index)).repeat_interleave(first.shape[1])
        scores, tokens = self._scores(index, places, first.flatten(), floor)
        best = scores.view(len(index), -1).amax(-1, keepdim=True)
        more, tiles = (bound >= best).scatter_(1, first, False).nonzero(as_tuple=True)
        if len(more):
            other_scores, other_tokens = self._scores(index, more, tiles, floor)
            places, scores = torch.cat((places, more)), torch.cat((scores, other_scores))
            tokens = torch.cat((tokens, other_tokens))
            best = best[:, 0].scatter_reduce_(0, more, other_scores, "amax")[:, None]
        tokens = tokens.masked_fill_(scores < best[places, 0], self._tiles.vocab)
        return torch.full_like(index, self._tiles.vocab).scatter_reduce_(0, places, tokens, "amin")

    def _scores(self, index: Tensor, places: Tensor, tiles: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
        """The best score of each tile, float64 `[P]`, and its token, int64 `[P]`; `places` are indices into `index`."""
        draws = self._draws.take(index[places])
        values, first = self._tiles.read(draws.rows, tiles)
        scaled = draws.scale(values)
        ids = first[:, None].to(torch.int32) + torch.arange(self._tiles.width, dtype=torch.int32)
        scores = scores_of(scaled, ids, draws.keys).masked_fill_(scaled < floor[places], -torch.inf)
        best, lane = scores.max(-1)
        return best, first + lane

    def _bounds(self, lowest: LowestNoise) -> Tensor:
        """Upper bound of the scores of each tile, float64 `[R, n]`; -inf where no token can win."""
        rows, tiles = (self._maxima >= -SPAN).nonzero(as_tuple=True)
        width = self._tiles.width
        first = (tiles * width).clamp_(max=self._tiles.vocab - width).to(torch.int32)
        bound = torch.full_like(self._maxima, -torch.inf, dtype=torch.float64)
        noise = _noise(lowest(first, self._draws.keys[rows], width))
        bound[rows, tiles] = self._maxima[rows, tiles] + noise + _SLACK
        return bound

    def _dense(self, draws: Draws, floor: Tensor) -> Tensor:
        """Draw as `argmax` does, but over the whole vocabulary, first in float32, and without a wait for the device."""
        scaled = draws.scale(self._tiles.logits[draws.rows])
        scaled.masked_fill_(scaled < floor, -torch.inf)
        bits = _bits(torch.arange(self._tiles.vocab, dtype=torch.int32, device=scaled.device)[None], draws.keys)
        uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
        score = scaled - uniform.neg_().log1p_().neg_().log_()
        near = score >= score.amax(-1, keepdim=True) - MARGIN
        return (scaled + _noise(bits)).masked_fill_(~near, -torch.inf).argmax(-1)


def lowest_noise(first: Tensor, keys: Tensor, width: int) -> Tensor:
    """The smallest z of each tile, int32 `[P]`; its token has the largest noise of the tile.

    `first` has the first token id of each tile of `width` tokens, int32 `[P]`. `keys` is int32 `[P, 2]`, as in `Draws`.
    """
    starts = (first * _GOLDEN).add_(keys[:, 0])[:, None]
    lanes = torch.arange(width, dtype=torch.int32).mul_(_GOLDEN)
    lowest = torch.empty_like(first)
    count = _CACHED // width
    bits, spare = torch.empty(2, min(count, len(first)), width, dtype=torch.int32)
    for part in range(0, len(first), count):
        chosen = slice(part, part + count)
        size = len(lowest[chosen])
        mixed = torch.add(starts[chosen], lanes, out=bits[:size])
        torch.amin(_hash(mixed, keys[chosen, 1:], spare[:size]), -1, out=lowest[chosen])
    return lowest


LowestNoise = Callable[[Tensor, Tensor, int], Tensor]
"""The type of `lowest_noise`, and of functions with the same results."""


def scores_of(scaled: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Scores of tokens, float64 `[R, n]`: scaled logits plus noise.

    `scaled` is float32 `[R, n]`, `token_ids` are the ids of its columns, int32 `[R, n]` or `[1, n]`, and `keys` is
    int32 `[R, 2]`, as in `Draws`.
    """
    return scaled + _noise(_bits(token_ids, keys))


def _noise(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(-(2.0**-31)).log1p_().neg_().log_().neg_()


def _bits(token_ids: Tensor, keys: Tensor) -> Tensor:
    """31 hashed bits for each token id, int32; products wrap around, as int32 does in torch."""
    mixed = token_ids * _GOLDEN + keys[:, :1]
    return _hash(mixed, keys[:, 1:], torch.empty_like(mixed))


def _hash(mixed: Tensor, second: Tensor, spare: Tensor) -> Tensor:
    """Two finalizers with the second word of the key between them, in place."""
    return _mix(_mix(mixed, spare).bitwise_xor_(second), spare).bitwise_and_(0x7FFFFFFF)


def _mix(x: Tensor, spare: Tensor) -> Tensor:
    """MurmurHash3's fmix32, in place; the masks make torch's arithmetic shifts logical ones."""
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 13, out=spare).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF))


def philox(counter: _Words, key: tuple[int, int]) -> _Words:
    """Four random 32-bit words from a counter of four 32-bit words and a key of two (Philox-4x32-10)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def noise_key(seed: int, choice_index: int, output_index: int) -> tuple[int, int]:
    """The key of the noise of one output token: two words in [0, 2**32).

    `seed` and `output_index` are in [0, 2**64), `choice_index` is in [0, 2**32).
    """
    counter = (output_index & _MASK, output_index >> 32, choice_index, 0)
    first, second, _, _ = philox(counter, (seed & _MASK, seed >> 32))
    return first, second
