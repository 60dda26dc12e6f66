"""Sampling noise that depends on nothing but (seed, choice index, output index), and the token it is for.

A counter-based generator has no state to carry, lose or share: any worker, in any batch, after any replay,
computes the same noise for the same token. Philox-4x32-10 is from Salmon et al., "Parallel Random Numbers:
As Easy as 1, 2, 3" (SC'11); its published vectors are in the tests. Plain integers: a step needs one call a
sequence, about 4 µs. `baton.model.gumbel` spreads a key over the vocabulary.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
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
