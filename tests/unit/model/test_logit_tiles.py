"""Logits as tiles against the plain operations on whole rows."""

import math

import pytest
import torch

from baton.model.logit_tiles import WIDTH, LogitTiles

SIZES = [1, 5, WIDTH - 1, WIDTH, WIDTH + 1, 7 * WIDTH, 300 * WIDTH, 300 * WIDTH + 9]


@pytest.mark.parametrize("vocab", SIZES)
def test_the_first_of_the_largest_is_found(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-2, 3, (40, vocab), generator=generator).float()
    logits[0] = 1.0
    logits[1, : vocab - 1] = -math.inf
    assert torch.equal(LogitTiles(logits).argmax(), logits.argmax(-1))


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_of_some_rows_are_those_of_topk(vocab: int, ties: bool) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    if ties:
        logits = logits.round()
    rows = torch.tensor([7, 0, 3])
    for count in {1, min(20, vocab), min(140, vocab), vocab}:
        values, ids = LogitTiles(logits).top(rows, count)
        assert torch.equal(values, logits[rows].topk(count).values)
        assert torch.equal(values, logits[rows].gather(1, ids))
        assert all(len(set(row)) == count for row in ids.tolist())


def test_a_block_is_read_once_for_each_of_its_tokens() -> None:
    vocab = 2 * WIDTH + 10
    tiles = LogitTiles(torch.arange(3.0 * vocab).view(3, vocab))
    rows, which = torch.tensor([2, 2, 2]), torch.tensor([0, 1, 2])
    values, first = tiles.read(rows, which)
    assert first.tolist() == [0, WIDTH, vocab - WIDTH]
    assert values[values > -math.inf].tolist() == tiles.logits[2].tolist()
    assert tiles.maxima[2].tolist() == values.amax(-1).tolist()
