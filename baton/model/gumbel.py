"""Drawing a token by the Gumbel-max trick: the largest of logit + noise, where each token has noise of its own.

With independent standard Gumbel noise the winner is distributed as softmax(logits) (Gumbel 1954; Maddison et
al. 2014, arXiv:1411.0030). Against the inverse of the cumulative distribution it has one great advantage: the
last bits of logits, which depend on the shapes of matrix products, change the winner only where the first two
are nearly tied. A running sum over the vocabulary has as many borders as tokens, and all of them move.

A token's noise is -log(-log(1 - u)) with u = (z + 1/2) / 2**31, where z is 31 bits of a hash of token id and key:
MurmurHash3's 32-bit finalizer (Appleby, public domain), twice, with a word of the key before each. Scores are
compared in float64. The smallest z of a tile of tokens, and its largest logit, bound all its scores: so on a CPU
logarithms are taken once a tile, and then for the tokens of the few tiles that may hold the winner.

The key of a token's noise depends on nothing but (seed, choice index, output index). A counter-based generator has no
state to carry, lose or share: any worker, in any batch, after any replay, computes the same noise for the same token.
Philox-4x32-10 is from Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11); its published vectors are
in the tests. Plain integers: a step needs one call a sequence, about 4 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.logit_tiles import LogitTiles

SPAN = 26.0
"""More than the largest noise less the smallest: log(32 ln 2) + 32 ln 2 = 25.3."""

MARGIN = 1e-3
"""Far more than the error of a float32 score, but for noise below -2.5; far less than the usual lead of a winner."""

_FIRST_READ = 32
"""Tiles read to find a good score before the others are ruled out."""

_SLACK = 1e-9
"""More than the error of a float64 score."""

_GOLDEN, _FIRST, _SECOND = (constant - 2**32 for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_BELOW_ONE = 1 - 2**-24

_CACHED = 1 << 18
"""Tokens hashed together on a CPU: few enough for its cache, enough to outweigh the cost of an operation."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
"""Constants of Philox."""

_Words = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows of logits to draw from: `rows` int64 `[R]`, the largest logit and the temperature of each, float32
    `[R, 1]`, and the words of `noise_key` as signed numbers, int32 `[R, 2]`."""

    rows: Tensor
    top: Tensor
    temperature: Tensor
    keys: Tensor

    def take(self, index: Tensor | slice) -> Draws:
        """Some of them."""
        return Draws(self.rows[index], self.top[index], self.temperature[index], self.keys[index])

    def scale(self, values: Tensor) -> Tensor:
        """Logits `[R, n]`, divided by the temperature; the largest becomes 0, so that no temperature overflows."""
        return (values - self.top) / self.temperature


class GumbelArgmax:
    """The argmax of logit + noise over the whole vocabulary; what bounds the scores of a tile is computed once."""

    def __init__(self, tiles: LogitTiles, draws: Draws, lowest: LowestNoise) -> None:
        """`lowest` is `lowest_noise`, or what computes the same."""
        self._tiles = tiles
        self._draws = draws
        self._maxima = draws.scale(tiles.maxima[draws.rows])
        self._bound = self._bounds(lowest) if self._maxima.device.type == "cpu" else None

    def argmax(self, index: Tensor, floor: Tensor) -> Tensor:
        """Draw a token for each of `index`, places in the draws, int64 `[Q]`: token ids, int64 `[Q]`.

        Only tokens with a scaled logit of at least `floor` (float32 `[Q, 1]`) count; the likeliest one must reach it.
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
        """The best score of each pair of place in `index` and tile, float64 `[P]`, and the token that has it."""
        draws = self._draws.take(index[places])
        values, first = self._tiles.read(draws.rows, tiles)
        scaled = draws.scale(values)
        ids = first[:, None].to(torch.int32) + torch.arange(self._tiles.width, dtype=torch.int32)
        scores = scores_of(scaled, ids, draws.keys).masked_fill_(scaled < floor[places], -torch.inf)
        best, lane = scores.max(-1)
        return best, first + lane

    def _bounds(self, lowest: LowestNoise) -> Tensor:
        """No score of a tile is larger: float64 `[R, n]`, -inf where no token can win."""
        rows, tiles = (self._maxima >= -SPAN).nonzero(as_tuple=True)
        width = self._tiles.width
        first = (tiles * width).clamp_(max=self._tiles.vocab - width).to(torch.int32)
        bound = torch.full_like(self._maxima, -torch.inf, dtype=torch.float64)
        noise = _noise(lowest(first, self._draws.keys[rows], width))
        bound[rows, tiles] = self._maxima[rows, tiles] + noise + _SLACK
        return bound

    def _dense(self, draws: Draws, floor: Tensor) -> Tensor:
        """As `argmax`, over the whole vocabulary at once, first in float32, and without waiting for the device."""
        scaled = draws.scale(self._tiles.logits[draws.rows])
        scaled.masked_fill_(scaled < floor, -torch.inf)
        bits = _bits(torch.arange(self._tiles.vocab, dtype=torch.int32, device=scaled.device)[None], draws.keys)
        uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
        score = scaled - uniform.neg_().log1p_().neg_().log_()
        near = score >= score.amax(-1, keepdim=True) - MARGIN
        return (scaled + _noise(bits)).masked_fill_(~near, -torch.inf).argmax(-1)


def lowest_noise(first: Tensor, keys: Tensor, width: int) -> Tensor:
    """The smallest z of each tile, int32 `[P]`: the one with the most noise.

    `first`: int32 `[P]`, the first token id of each tile of `width` tokens. `keys`: int32 `[P, 2]`, as in `Draws`.
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
"""`lowest_noise`, or what computes the same."""


def scores_of(scaled: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Scaled logits with their noise, float64 `[R, n]`.

    `scaled`: float32 `[R, n]`. `token_ids`: int32 `[R, n]` or `[1, n]`, what the noise is for. `keys`: int32 `[R, 2]`.
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
    """Four 32-bit words from four of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def noise_key(seed: int, choice_index: int, output_index: int) -> tuple[int, int]:
    """Two words in [0, 2**32) that key one output token's noise.

    `seed` in [0, 2**64), `choice_index` in [0, 2**32), `output_index` in [0, 2**64).
    """
    counter = (output_index & _MASK, output_index >> 32, choice_index, 0)
    first, second, _, _ = philox(counter, (seed & _MASK, seed >> 32))
    return first, second
