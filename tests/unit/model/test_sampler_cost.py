"""Cost of a row's parameters, counted: a row pays for what it asks, and its mates for none of it.

Counted are the elements that torch's operations read or write, and those that they put in order, which cost some
hundred times as much.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.errors import InvalidRequest
from baton.model.sampler import SamplerBatch
from baton.request import SamplingParams, SequenceState
from tests.effort import effort
from tests.unit.model.any_params import any_params

VOCAB, BATCH = 8_000, 32
CPU, EOS = torch.device("cpu"), frozenset({2})
PLAIN = SamplingParams(temperature=0.0)
ALL_BUT_ONE = SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(VOCAB - 1)))

ROW = 240 * VOCAB
"""Elements that a row may touch in a step, whatever it asks: the noise alone touches some 80 for each token."""

PLACES = {"index", "index_select", "gather", "index_put_", "index_add_", "index_fill_", "scatter_", "scatter_add_"}
"""Operations that touch of their first tensor only as much as the others say."""

_PROMPT = list(range(5, 400))
_LOGITS = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(7)) * 3


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.touched = self.ordered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in PLACES:
            tensors = tensors[1:]
        self.touched += sum(tensor.numel() for tensor in tensors)
        if not name.endswith("_"):
            self.touched += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if name == "topk":
            self.ordered += result[0].numel()
        elif name in ("sort", "kthvalue"):
            self.ordered += args[0].numel()
        return result


def batch_of(rows: Sequence[tuple[int, SamplingParams]]) -> SamplerBatch:
    batch = SamplerBatch(VOCAB, EOS, CPU)
    for number, params in rows:
        batch.add(SequenceState(params, _PROMPT, [3, 4], number))
    return batch


def counted(batch: SamplerBatch, numbers: Sequence[int], joins: SamplingParams | None = None) -> tuple[int, int]:
    """Elements touched and ordered by a step over rows with these logits, and by a row that joins before it."""
    logits = _LOGITS[list(numbers)]
    with Count() as count:
        if joins is not None:
            batch.add(SequenceState(joins, _PROMPT, [], len(numbers)))
        batch.sample(logits)
    return count.touched, count.ordered


def a_step(rows: Sequence[tuple[int, SamplingParams]]) -> tuple[int, int]:
    """As `counted`, of a step that is not the batch's first."""
    batch, numbers = batch_of(rows), [number for number, _ in rows]
    batch.sample(_LOGITS[numbers])
    return counted(batch, numbers)


def usable(params: SamplingParams) -> None:
    try:
        params.check_vocabulary(VOCAB, EOS)
    except InvalidRequest:
        assume(False)


@effort(8)
@given(one=any_params(VOCAB), others=any_params(VOCAB))
def test_a_row_costs_its_mates_nothing(one: SamplingParams, others: SamplingParams) -> None:
    usable(one)
    usable(others)
    if others.logprobs:
        # Alternatives are looked up for all rows that report some, as many as the one that wants most.
        others = replace(others, logprobs=max(others.logprobs, one.logprobs or 0))
    mates = [(number, replace(others, seed=number)) for number in range(1, BATCH)]
    touched, ordered = a_step([(0, one)])
    assert touched <= ROW
    assert ordered <= VOCAB // 4
    without = a_step(mates)
    together = a_step([(0, one), *mates])
    assert together[0] - without[0] <= touched + 2 * VOCAB
    assert together[1] - without[1] <= ordered + VOCAB // 4


@pytest.mark.parametrize(
    "one",
    [
        SamplingParams(seed=1, top_k=VOCAB - 1, temperature=100.0),
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(seed=1, top_p=0.001, temperature=100.0),
        ALL_BUT_ONE,
    ],
    ids=["top_k", "logprobs", "top_p", "allowed_token_ids"],
)
def test_the_cost_of_one_rows_parameters_is_not_paid_for_all_rows(one: SamplingParams) -> None:
    like = SamplingParams(seed=1, top_k=100, logprobs=0, temperature=100.0)
    mates = [(number, like) for number in range(1, BATCH)]
    touched, ordered = a_step([(0, one)])
    assert touched <= ROW
    assert ordered <= VOCAB // 4
    together, without = a_step([(0, one), *mates]), a_step(mates)
    assert together[0] - without[0] <= touched + VOCAB
    assert together[1] - without[1] <= ordered + VOCAB // 4


def test_many_tokens_with_penalties_are_counted_for_their_row_alone() -> None:
    penalties = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    batch = batch_of([(number, penalties) for number in range(BATCH - 1)])
    before, _ = counted(batch, range(BATCH - 1))
    batch.add(SequenceState(penalties, range(VOCAB), [], 0))
    batch.sample(_LOGITS.clone())
    after, _ = counted(batch, range(BATCH))
    assert after - before <= 40 * VOCAB


@pytest.mark.parametrize("joins", [PLAIN, ALL_BUT_ONE, SamplingParams(seed=1, logit_bias=((1, 2.0),), min_tokens=9)])
def test_joining_or_leaving_the_sampler_touches_only_one_row(joins: SamplingParams) -> None:
    full = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        logit_bias=tuple((i, 1.0) for i in range(100)),
        min_tokens=9,
        stop_token_ids=tuple(range(100)),
    )
    # Lists of their own, as different requests have them.
    rows = [(i, replace(full, allowed_token_ids=tuple(range(VOCAB - 1)))) for i in range(BATCH - 1)]
    batch = batch_of(rows)
    batch.sample(_LOGITS[: BATCH - 1].clone())
    usual, _ = counted(batch, range(BATCH - 1))
    touched, _ = counted(batch, range(BATCH), joins)
    alone, _ = counted(batch_of([]), [0], joins)
    # The 31 others have 6,200 banned and biased tokens, whose places are listed anew.
    assert touched - usual <= alone + 16 * VOCAB
    batch.remove(0)
    left, _ = counted(batch, range(BATCH - 1))
    assert left <= touched
