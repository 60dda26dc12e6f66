"""The sampler on CUDA chooses the tokens that it chooses on a CPU, from the same logits."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.model.sampler import SamplerBatch, token_infos
from baton.request import SamplingParams, SequenceState, TokenInfo
from tests.unit.model.test_sampler import EOS, EVERYTHING, faults, some_logits, states_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDE = [
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=2, top_k=200),
    SamplingParams(seed=5, top_k=128, top_p=0.99),
    SamplingParams(seed=6, top_p=0.001),
    *(SamplingParams(seed=seed, top_p=0.2) for seed in range(20, 28)),
    SamplingParams(seed=9, min_p=0.4, top_p=0.5),
]
"""Parameters that keep more tokens than the first search reads, if logits are nearly equal."""


def batch_of(states: Sequence[SequenceState], vocab: int, device: torch.device) -> SamplerBatch:
    batch = SamplerBatch(vocab, EOS, device)
    for state in states:
        batch.add(state)
    return batch


def sampled(batch: SamplerBatch, logits: Tensor, device: torch.device) -> list[TokenInfo]:
    found = batch.sample(logits.to(device, copy=True))
    assert not faults(found)
    return [info for info in found if isinstance(info, TokenInfo)]


@pytest.mark.parametrize(("params", "spread"), [(EVERYTHING, 3.0), (WIDE, 0.3)], ids=["everything", "wide"])
@pytest.mark.parametrize("vocab", [300, 5000, 128256])
def test_tokens_are_those_of_a_cpu_while_a_batch_changes(
    vocab: int, params: Sequence[SamplingParams], spread: float
) -> None:
    states = states_of(list(params), vocab)
    batches = [batch_of(states, vocab, device) for device in (CPU, CUDA)]
    rows = len(states)
    for turn in range(6):
        logits = some_logits(rows, vocab, turn, spread)
        expected, found = (
            [info.token_id for info in sampled(batch, logits, device)]
            for batch, device in zip(batches, (CPU, CUDA), strict=True)
        )
        assert found == expected
        for batch in batches:
            batch.add_outputs([1] * rows)
            batch.add_token_ids(list(enumerate(expected)))
            batch.remove(turn)
        rows -= 1


def test_log_probabilities_are_those_of_a_cpu() -> None:
    vocab, tops = 5000, [0, 3, 20, 0, 1]
    states = states_of([SamplingParams(temperature=0.0, logprobs=count) for count in tops], vocab)
    logits = some_logits(len(states), vocab)
    expected, found = (sampled(batch_of(states, vocab, device), logits, device) for device in (CPU, CUDA))
    asked = [1, 2, 4]
    given = token_infos(logits[asked].to(CUDA), [expected[row].token_id for row in asked], [tops[row] for row in asked])
    for mine, theirs in zip([*found, *given], [*expected, *(expected[row] for row in asked)], strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)
    assert [len(info.top) for info in found] == tops


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_fail_alone(value: float) -> None:
    vocab = 5000
    params = [SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, min_p=0.1), SamplingParams(seed=3, top_k=200)]
    params += [SamplingParams(seed=4), SamplingParams(temperature=0.0, logprobs=2)]
    states = states_of(params * 2, vocab)
    logits = some_logits(len(states), vocab)
    expected = sampled(batch_of(states, vocab, CPU), logits, CPU)
    logits[: len(params), 7] = value
    found = batch_of(states, vocab, CUDA).sample(logits.to(CUDA))
    assert set(faults(found)) == set(range(len(params)))
    chosen = [info.token_id for info in found[len(params) :] if isinstance(info, TokenInfo)]
    assert chosen == [info.token_id for info in expected[len(params) :]]
