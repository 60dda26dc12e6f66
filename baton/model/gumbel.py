"""Drawing a token by the Gumbel-max trick: the largest of logit + noise, where each token has noise of its own.

With independent standard Gumbel noise the winner is distributed as softmax(logits) (Gumbel 1954; Maddison et
al. 2014, arXiv:1411.0030). Against the inverse of the cumulative distribution it has one great advantage: the
last bits of logits, which depend on the shapes of matrix products, change the winner only where the first two
are nearly tied. A running sum over the vocabulary has as many borders as tokens, and all of them move.

A token's noise is -log(-log(1 - u)) with u = (z + 1/2) / 2**31, where z is 31 bits of a hash of token id and key:
MurmurHash3's 32-bit finalizer (Appleby, public domain), twice, with a word of the key before each. It is found in
float32 first, which tells the winner unless others come within MARGIN of it; then float64 decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 1e-3
"""Far more than the error of a float32 score, far less than the usual lead of a winner."""

_GOLDEN, _FIRST, _SECOND = (constant - 2**32 for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_BELOW_ONE = 1 - 2**-24

_CACHED = 1 << 16
"""Logits taken together on a CPU: few enough for its cache, enough to outweigh the cost of an operation."""


def draw(scaled: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """The column that wins in each row, int64 `[R]`.

    `scaled`: float32 logits `[R, n]`, -inf where a token must not win; each row has another one. `token_ids`: int32
    `[R, n]` or `[1, n]`, what the noise is for. `keys`: int32 `[R, 2]`, the words of `noise_key` as signed numbers.
    """
    if scaled.device.type != "cpu":
        return _race(scaled, token_ids, keys)
    rows = max(1, _CACHED // scaled.shape[1])
    parts = (torch.split(whole, rows) for whole in (scaled, token_ids.expand(len(scaled), -1), keys))
    return torch.cat([_race(*part) for part in zip(*parts, strict=True)])


def _race(scaled: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    bits = _bits(token_ids, keys)
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    score = scaled - uniform.neg_().log1p_().neg_().log_()
    near = score >= score.amax(-1, keepdim=True) - MARGIN
    if int(near.sum()) == len(scaled):
        return score.argmax(-1)
    exact = scaled.double() - (bits.double().add_(0.5).mul_(-(2.0**-31))).log1p_().neg_().log_()
    return exact.masked_fill_(~near, -torch.inf).argmax(-1)


def _bits(token_ids: Tensor, keys: Tensor) -> Tensor:
    """31 hashed bits for each token id, int32; products wrap around, as int32 does in torch."""
    mixed = _mix(token_ids * _GOLDEN + keys[:, :1])
    return _mix(mixed.bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32, in place; the masks make torch's arithmetic shifts logical ones."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
