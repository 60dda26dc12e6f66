"""Philox against its published vectors, and the keys made of it."""

import pytest

from baton.model.noise import noise_key, philox

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Random123 1.14, kat_vectors: philox4x32 10.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == expected


def test_keys_are_fixed_for_ever() -> None:
    """A stream that is replayed by a later release must continue with the same noise."""
    assert noise_key(0, 0, 0) == (0x6627E8D5, 0xE169C58D)
    assert noise_key(0x299F31D0A4093822, 0x13198A2E, 0x85A308D3243F6A88) == (0xAE120E9D, 0xA08A4CAB)


def test_keys_differ_by_seed_choice_and_index() -> None:
    keys = {
        noise_key(seed, choice, index)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for choice in range(4)
        for index in (*range(50), 2**32, 2**33)
    }
    assert len(keys) == 4 * 4 * 52
