"""The sampler's noise in plain Python, a token at a time, as its documentation says."""

import math
from functools import lru_cache

from baton.model.gumbel import noise_key

_WORD = 2**32


def fmix32(x: int) -> int:
    """MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % _WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % _WORD
    return x ^ (x >> 16)


def bits(key: tuple[int, int], token: int) -> int:
    """31 bits for one token."""
    return fmix32(fmix32((token * 0x9E3779B1 + key[0]) % _WORD) ^ key[1]) % 2**31


@lru_cache(maxsize=1 << 20)
def gumbel(seed: int, choice_index: int, output_index: int, token: int) -> float:
    """Standard Gumbel noise of one token at one place of one choice."""
    z = bits(noise_key(seed, choice_index, output_index), token)
    return -math.log(-math.log1p(-(z + 0.5) / 2**31))
