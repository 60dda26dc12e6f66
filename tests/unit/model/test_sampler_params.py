"""Any parameters, in any company, against the plain sampler."""

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from baton.errors import InvalidRequest
from baton.model.truncation import WINDOW
from baton.request import SamplingParams, SequenceState
from tests.effort import effort
from tests.unit.model.any_params import any_params
from tests.unit.model.test_sampler import EOS, batch_of, ids, plain, states_of

VOCAB = 5 * WINDOW


@effort(25)
@given(st.lists(any_params(VOCAB), min_size=1, max_size=6), st.sampled_from([0.05, 1.0, 6.0]), st.booleans())
def test_any_rows_are_those_of_the_plain_sampler(rows: list[SamplingParams], spread: float, ties: bool) -> None:
    for params in rows:
        try:
            params.check_vocabulary(VOCAB, EOS)
        except InvalidRequest:
            assume(False)
    states = states_of(rows, VOCAB, len(rows))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows))) * spread
    if ties:
        # Every value exact, so that equal sums are equal in any order.
        logits = logits.round()
    expected = [plain(row, state) for row, state in zip(logits, states, strict=True)]
    assert ids(batch_of(states, VOCAB), logits) == expected


@pytest.mark.parametrize("top_k", [WINDOW + 1, 100, VOCAB // 2, VOCAB - 1])
def test_a_large_top_k_keeps_what_is_as_likely_as_its_last(top_k: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, : top_k - 1] = 1.0
    assert max(drawn(SamplingParams(top_k=top_k, temperature=100.0), logits)) >= top_k
    logits[0, top_k:] = -1.0
    assert max(drawn(SamplingParams(top_k=top_k, temperature=100.0), logits)) < top_k


def test_a_top_k_above_the_allowed_tokens_keeps_them_all() -> None:
    allowed = tuple(random.Random(1).sample(range(VOCAB), WINDOW + 20))
    params = SamplingParams(top_k=VOCAB // 2, temperature=100.0, allowed_token_ids=allowed)
    assert drawn(params, torch.zeros(1, VOCAB)) == set(allowed)


def drawn(params: SamplingParams, logits: Tensor) -> set[int]:
    """The tokens that come in a few thousand draws; hot ones, where each that is kept comes sooner or later."""
    rows = 1500
    states = [SequenceState(replace(params, seed=seed), [1]) for seed in range(rows)]
    return set(ids(batch_of(states, VOCAB), logits.repeat(rows, 1)))
