"""The draw against its plain twin, its distribution, and what the last bits of logits may not do."""

import math

import pytest
import torch
from torch import Tensor

from baton.model import gumbel as noise
from baton.model.gumbel import Draws, GumbelArgmax, _bits, lowest_noise, noise_key, philox, scores_of
from baton.model.logit_tiles import WIDTH, LogitTiles
from tests.unit.model.plain_noise import bits, fmix32, gumbel


def keys_of(rows: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor([noise_key(*row) for row in rows]).to(torch.int32)


def ids_to(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)[None]


def draw(scaled: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    return scores_of(scaled, token_ids, keys).argmax(-1)


def race(logits: Tensor, keys: Tensor, temperature: float = 1.0) -> tuple[GumbelArgmax, Tensor]:
    """A race of all rows, and the scaled logits."""
    tiles, rows = LogitTiles(logits), len(logits)
    heat = torch.full((rows, 1), temperature)
    draws = Draws(torch.arange(rows), logits.amax(-1, keepdim=True), heat, keys)
    return GumbelArgmax(tiles, draws, lowest_noise), draws.scale(logits)


def test_fmix32_equals_murmurhash3() -> None:
    """Values of the reference implementation in smhasher."""
    assert [fmix32(x) for x in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


def test_bits_are_those_of_the_plain_hash() -> None:
    rows = [(0, 0, 0), (2**64 - 1, 3, 70), (12345, 63, 2**33)]
    ids = torch.tensor([[0, 1, 2, 151_935, 2**31 - 1]], dtype=torch.int32)
    expected = [[bits(noise_key(*row), token) for token in ids[0].tolist()] for row in rows]
    assert _bits(ids, keys_of(rows)).tolist() == expected


def test_the_draw_equals_the_argmax_of_logits_plus_gumbel_noise() -> None:
    rows = [(seed, seed % 3, seed * 7) for seed in range(40)]
    scaled = torch.randn(40, 999, generator=torch.Generator().manual_seed(0)) * 3
    expected = [
        max(range(999), key=lambda token: float(line[token]) + gumbel(*row, token))
        for line, row in zip(scaled, rows, strict=True)
    ]
    assert draw(scaled, ids_to(999), keys_of(rows)).tolist() == expected


@pytest.mark.parametrize("vocab", [5, WIDTH, 300, 40 * WIDTH, 300 * WIDTH + 1])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
def test_a_race_by_blocks_is_won_by_the_best_score_of_all(vocab: int, spread: float) -> None:
    rows = 60
    keys = keys_of([(seed, 0, 1) for seed in range(rows)])
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    runners, scaled = race(logits, keys, 0.9)
    scores = scores_of(scaled, ids_to(vocab), keys)
    everything = torch.full((rows, 1), -math.inf)
    assert torch.equal(runners.argmax(torch.arange(rows), everything), scores.argmax(-1))
    # Among fewer tokens, and of some rows only.
    index = torch.arange(rows - 1, 0, -3)
    floor = scaled[index].quantile(0.9, dim=1, keepdim=True)
    among = scores[index].masked_fill(scaled[index] < floor, -math.inf)
    assert torch.equal(runners.argmax(index, floor), among.argmax(-1))


def test_a_whole_vocabulary_at_once_gives_the_same_winners() -> None:
    """The way of other devices, here on a CPU."""
    rows, vocab = 200, 3 * WIDTH + 7
    keys = keys_of([(seed, 0, 1) for seed in range(rows)])
    runners, _ = race(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2, keys)
    index, floor = torch.arange(rows), torch.full((rows, 1), -5.0)
    assert torch.equal(runners._dense(runners._draws.take(index), floor), runners.argmax(index, floor))


def test_no_noise_leaves_the_span() -> None:
    lowest, highest = noise._noise(torch.tensor([2**31 - 1, 0], dtype=torch.int32)).tolist()
    assert lowest == pytest.approx(-math.log(32 * math.log(2)))
    assert highest - lowest < noise.SPAN


def test_noise_belongs_to_the_token_and_not_to_the_column() -> None:
    scaled = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    keys = keys_of([(5, 0, 9)])
    plain = int(draw(scaled, ids_to(300), keys))
    assert int(order[draw(scaled[:, order], order[None].to(torch.int32), keys)]) == plain


def test_tokens_of_probability_zero_never_win() -> None:
    scaled = torch.full((500, 5), -math.inf)
    scaled[:, 2] = 0.0
    assert set(draw(scaled, ids_to(5), keys_of([(seed, 0, 0) for seed in range(500)])).tolist()) == {2}


def test_draws_follow_the_distribution() -> None:
    rounds, size = 20_000, 50
    logits = torch.linspace(0.0, -6.0, size)
    wins = draw(logits.expand(rounds, -1), ids_to(size), keys_of([(3, 0, index) for index in range(rounds)]))
    expected = rounds * logits.softmax(-1)
    counts = torch.bincount(wins, minlength=size)
    # Chi-squared with 49 degrees of freedom; 85.4 has probability 0.001.
    assert float(((counts - expected) ** 2 / expected).sum()) < 85.4


@pytest.mark.parametrize("place", ["seed", "choice", "index"])
def test_draws_that_follow_each_other_are_independent(place: str) -> None:
    size, rounds = 8, 8000
    rows = [
        (i if place == "seed" else 1, i if place == "choice" else 0, i if place == "index" else 0)
        for i in range(rounds + 1)
    ]
    wins = draw(torch.zeros(rounds + 1, size), ids_to(size), keys_of(rows))
    counts = torch.bincount(wins[:-1] * size + wins[1:], minlength=size * size)
    expected = rounds / size**2
    # Chi-squared with 63 degrees of freedom; 103.4 has probability 0.001.
    assert float(((counts - expected) ** 2 / expected).sum()) < 103.4


def test_the_last_bits_of_logits_hardly_ever_matter() -> None:
    """Errors of 1e-6 in logits, as between two shapes of a float32 product, where one token has half of the mass.

    The inverse of the cumulative distribution would change two of these 6,000 tokens.
    """
    rounds, size = 6000, 4096
    generator = torch.Generator().manual_seed(4)
    scaled = torch.randn(rounds, size, generator=generator)
    scaled[:, 7] = scaled.logsumexp(-1)
    noisy = scaled + 1e-6 * torch.randn(scaled.shape, generator=generator)
    keys = keys_of([(6, 0, index) for index in range(rounds)])
    assert torch.equal(draw(scaled, ids_to(size), keys), draw(noisy, ids_to(size), keys))


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
def test_philox_equals_published_test_vectors(
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
