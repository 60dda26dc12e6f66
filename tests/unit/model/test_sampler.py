"""The sampler against a plain one, row by row, and what must not matter: batch mates, history, order."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.errors import NoToken
from baton.model import truncation
from baton.model.gumbel import Draws
from baton.model.logit_tiles import LogitTiles
from baton.model.penalties import PenaltyTable
from baton.model.sampler import SamplerBatch, token_infos
from baton.model.truncation import WINDOW
from baton.request import MIN_REPETITION_PENALTY, SamplingParams, SequenceState, TokenInfo
from tests.unit.model.plain_noise import gumbel

EOS = frozenset({2})
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)

EVERYTHING = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.3),
    SamplingParams(seed=3, temperature=50.0),
    SamplingParams(seed=4, temperature=1e-30),
    SamplingParams(seed=4, temperature=1e-46),
    SamplingParams(seed=5, top_k=1),
    SamplingParams(seed=6, top_k=7, temperature=1.5),
    SamplingParams(seed=7, top_p=0.6),
    SamplingParams(seed=7, top_p=1e-46),
    SamplingParams(seed=8, top_p=0.999, temperature=2.0),
    SamplingParams(seed=9, min_p=0.2, temperature=2.0),
    SamplingParams(seed=10, min_p=1.0),
    SamplingParams(seed=11, top_k=20, top_p=0.7, min_p=0.01, temperature=1.7),
    SamplingParams(seed=12, top_k=2**31 - 1, top_p=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.8),
    SamplingParams(temperature=0.0, repetition_penalty=0.5, presence_penalty=-1.0),
    SamplingParams(seed=12, repetition_penalty=MIN_REPETITION_PENALTY),
    SamplingParams(seed=13, frequency_penalty=1.5, presence_penalty=0.5, top_k=5),
    SamplingParams(seed=14, logit_bias=((3, 4.0), (5, -100.0), (6, 1.0))),
    SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), repetition_penalty=2.0),
    SamplingParams(seed=15, allowed_token_ids=(1, 4, 9, 11)),
    SamplingParams(temperature=0.0, allowed_token_ids=(8,)),
    SamplingParams(seed=16, min_tokens=4, stop_token_ids=(0, 1), top_k=3),
    SamplingParams(temperature=0.0, min_tokens=6, logit_bias=((2, 100.0),)),
    SamplingParams(temperature=0.0, min_tokens=6, ignore_eos=True, logit_bias=((2, 100.0),)),
]


def plain(logits: Tensor, state: SequenceState) -> int:
    """One token, step by step, after vLLM's documented order; sums and probabilities in float64."""
    params, x = state.params, logits.clone()
    if params.allowed_token_ids:
        keep = torch.zeros_like(x, dtype=torch.bool)
        keep[list(params.allowed_token_ids)] = True
        x[~keep] = -math.inf
    if len(state.output_ids) < params.min_tokens:
        x[[*params.stop_token_ids, *([] if params.ignore_eos else EOS)]] = -math.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*state.prompt_ids, *state.output_ids}:
        count = list(state.output_ids).count(token)
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.greedy:
        return int(x.argmax())
    x = (x - x.max()).double() / params.temperature
    x[x < math.log(params.min_p or 1e-300)] = -math.inf
    if 0 < params.top_k < len(x):
        x[x < x.sort(descending=True).values[params.top_k - 1]] = -math.inf
    if params.top_p < 1.0:
        likelihoods = x.softmax(-1)
        ordered = likelihoods.sort(descending=True).values
        before = ordered.cumsum(-1) - ordered
        # Tokens as likely as the last one kept are kept too.
        x[likelihoods < ordered[before < params.top_p][-1]] = -math.inf
    noise = [gumbel(params.seed or 0, state.choice_index, len(state.output_ids), token) for token in range(len(x))]
    return int((x + torch.tensor(noise, dtype=torch.float64)).argmax())


def batch_of(states: list[SequenceState], vocab: int) -> SamplerBatch:
    batch = SamplerBatch(vocab, EOS, CPU)
    for state in states:
        batch.add(state)
    return batch


def states_of(params: list[SamplingParams], vocab: int, seed: int = 0) -> list[SequenceState]:
    chooser = random.Random(seed)
    return [
        SequenceState(
            p,
            [chooser.randrange(vocab) for _ in range(chooser.randrange(1, 30))],
            [chooser.randrange(vocab) for _ in range(chooser.randrange(8))],
            chooser.randrange(3),
        )
        for p in params
    ]


def some_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def ids(batch: SamplerBatch, logits: Tensor) -> list[int]:
    found = batch.sample(logits.clone())
    assert not faults(found)
    return [info.token_id for info in found if isinstance(info, TokenInfo)]


@pytest.mark.parametrize("vocab", [16, 300, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_equals_the_plain_sampler(vocab: int, seed: int) -> None:
    states = states_of(EVERYTHING, vocab, seed)
    logits = some_logits(len(states), vocab, seed)
    expected = [plain(row, state) for row, state in zip(logits, states, strict=True)]
    assert ids(batch_of(states, vocab), logits) == expected


def test_a_nucleus_wider_than_the_window_is_exact() -> None:
    vocab = 96 * WINDOW
    wide = [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, top_k=3 * WINDOW),
        SamplingParams(seed=7, top_k=17 * WINDOW),
        SamplingParams(seed=3, top_k=5),
        SamplingParams(seed=4, min_p=0.3),
        SamplingParams(seed=5, top_k=2 * WINDOW, top_p=0.99),
        SamplingParams(seed=6, top_p=0.001),
        *(SamplingParams(seed=seed, top_p=0.2) for seed in range(20, 28)),
        SamplingParams(seed=8, top_k=1000, top_p=0.3),
        SamplingParams(seed=9, min_p=0.4, top_p=0.5),
    ]
    for seed in range(3):
        states = states_of(wide, vocab, seed)
        logits = some_logits(len(states), vocab, seed, spread=0.3)
        expected = [plain(row, state) for row, state in zip(logits, states, strict=True)]
        assert max(row.softmax(-1).topk(WINDOW).values.sum() for row in logits) < 0.5
        assert ids(batch_of(states, vocab), logits) == expected


def test_running_state_equals_the_rebuilt_one_while_rows_come_and_go() -> None:
    vocab = 40
    chooser = random.Random(5)
    waiting = states_of(EVERYTHING * 4, vocab, 3)
    batch = SamplerBatch(vocab, EOS, CPU)
    running: list[SequenceState] = []
    for round_ in range(120):
        while waiting and len(running) < 12 and chooser.random() < 0.6:
            state = waiting.pop()
            running.append(replace(state, output_ids=list(state.output_ids)))
            batch.add(state)
        if running and chooser.random() < 0.25:
            gone = chooser.randrange(len(running))
            batch.remove(gone)
            last = running.pop()
            if gone < len(running):
                running[gone] = last
        if not running:
            continue
        logits = some_logits(len(running), vocab, round_)
        tokens = ids(batch, logits)
        assert tokens == ids(batch_of(running, vocab), logits)
        batch.add_outputs([1] * len(tokens))
        batch.add_token_ids(list(enumerate(tokens)))
        for state, token in zip(running, tokens, strict=True):
            state.output_ids.append(token)  # type: ignore[attr-defined]


def test_penalty_counts_grow_to_what_a_rebuild_counts() -> None:
    table = PenaltyTable(CPU)
    chooser = random.Random(2)
    params = SamplingParams(repetition_penalty=1.2)
    states = [
        SequenceState(params, [chooser.randrange(900) for _ in range(length)], []) for length in (1, 5, 700, 30) * 5
    ]
    entries = [table.add(state) for state in states]
    for _ in range(60):
        tokens = [chooser.randrange(900) for _ in states]
        table.append(entries, tokens)
        for state, token in zip(states, tokens, strict=True):
            state.output_ids.append(token)  # type: ignore[attr-defined]
    fresh = PenaltyTable(CPU)
    for entry, state in zip(entries, states, strict=True):
        assert table.counts(entry) == fresh.counts(fresh.add(state))
    # Its place is used again, and what lies there from before does not count.
    place = entries[2].slab, entries[2].index
    table.remove(entries[2])
    again, token = table.add(states[2]), states[2].prompt_ids[0]
    assert (again.slab, again.index) == place
    before = table.counts(again)
    assert before == fresh.counts(fresh.add(states[2]))
    table.append([again], [token])
    table.append([again], [950])
    assert table.counts(again) == {**before, token: before[token] + 1, 950: 1}


class Pieces(list[int]):
    """Token ids that may be read in slices only."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all are read by one call, which keeps the interpreter's lock")


def test_the_tokens_of_a_long_prompt_are_counted_in_pieces() -> None:
    chooser, table = random.Random(3), PenaltyTable(CPU)
    ids = [chooser.randrange(9_000) for _ in range(10_000)]
    params = SamplingParams(frequency_penalty=0.5)
    plain = SequenceState(params, ids, [3, 9_001])
    assert table.counts(table.add(replace(plain, prompt_ids=Pieces(ids)))) == table.counts(table.add(plain))
    assert table.counts(table.add(plain)).keys() == {*ids, 3, 9_001}


def test_only_real_penalties_are_tracked() -> None:
    assert not SamplingParams().penalizes
    for field, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{field: value}).penalizes


def faults(found: Sequence[TokenInfo | NoToken]) -> dict[int, str]:
    """The rows without a token, and why."""
    return {row: str(one) for row, one in enumerate(found) if isinstance(one, NoToken)}


def test_rows_without_an_allowed_token_fail_alone() -> None:
    only_eos = SamplingParams(temperature=0.0, min_tokens=3, allowed_token_ids=(2,))
    batch = batch_of([SequenceState(GREEDY, [1], []), SequenceState(only_eos, [1], [])], 10)
    logits = some_logits(2, 10)
    found = batch.sample(logits.clone())
    assert faults(found) == {1: "no token is allowed"}
    assert found[0] == TokenInfo(int(logits[0].argmax()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [*EVERYTHING[:19], replace(GREEDY, logprobs=3)])
def test_rows_that_are_not_finite_fail_alone(value: float, params: SamplingParams) -> None:
    states = states_of([params] * 3, 300)
    logits = some_logits(3, 300)
    good = batch_of(states, 300).sample(logits.clone())
    for bad in (logits.clone(), torch.full_like(logits, value)):
        bad[1, 4] = value
        bad[0], bad[2] = logits[0], logits[2]
        sampled = batch_of(states, 300).launch(bad)
        found = sampled.read()
        assert faults(found) == {1: "logits are not finite"}
        assert (found[0], found[2]) == (good[0], good[2])
        # The next step looks it up.
        assert 0 <= int(sampled.tokens[1]) < 300


def test_scores_of_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NoToken, match="not finite"):
        token_infos(torch.full((3, 10), math.nan), [1, 2, 3], [0, 0, 0])


@pytest.mark.parametrize("at_once", [False, True], ids=["row by row", "at once"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_draw_of_a_row_that_is_not_finite_ends(value: float, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if at_once:
        monkeypatch.setattr(truncation, "mass_above", truncation._mass_at_once)
    params = [SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, min_p=0.1), SamplingParams(seed=3, top_k=200)]
    logits = some_logits(3, 1000)
    logits[:, 500] = value
    assert set(faults(batch_of(states_of(params, 1000), 1000).sample(logits))) == {0, 1, 2}


def test_sums_at_once_are_those_row_by_row() -> None:
    logits = some_logits(5, 1000)
    tiles = LogitTiles(logits)
    words = torch.zeros(5, 2, dtype=torch.int32)
    draws = Draws(
        torch.arange(5), logits.amax(-1, keepdim=True), torch.tensor([[0.3], [0.7], [1.0], [2.0], [9.0]]), words
    )
    level = torch.tensor([[-0.1], [-1.0], [-2.0], [-math.inf], [-0.5]])
    torch.testing.assert_close(
        truncation._mass_at_once(tiles, draws, level), truncation.mass_above(tiles, draws, level), rtol=1e-12, atol=0.0
    )


def test_logprobs_are_those_of_the_raw_logits() -> None:
    vocab = 30
    params = [
        SamplingParams(seed=1, temperature=0.2, logprobs=3, allowed_token_ids=(5, 6)),
        GREEDY,
        SamplingParams(temperature=0.0, logprobs=0, repetition_penalty=3.0),
        SamplingParams(seed=2, top_k=2, logprobs=5, logit_bias=((1, 9.0),)),
    ]
    states = states_of(params, vocab)
    logits = some_logits(4, vocab)
    expected = logits.log_softmax(-1)
    found = batch_of(states, vocab).sample(logits.clone())
    infos = [info for info in found if isinstance(info, TokenInfo)]
    assert (infos[1].logprob, infos[1].top) == (None, ())
    for row, count in ((0, 3), (2, 0), (3, 5)):
        info = infos[row]
        assert info.logprob == pytest.approx(float(expected[row, info.token_id]), abs=1e-5)
        best = expected[row].topk(count)
        assert [token for token, _ in info.top] == best.indices.tolist()
        assert [logprob for _, logprob in info.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_ties_are_kept_together_and_greedy_takes_the_first() -> None:
    logits = torch.zeros(1, 8)
    assert ids(batch_of([SequenceState(GREEDY, [1], [])], 8), logits) == [0]
    found = {
        ids(batch_of([SequenceState(SamplingParams(seed=seed, top_k=1), [1], [])], 8), logits)[0] for seed in range(60)
    }
    assert found == set(range(8))
