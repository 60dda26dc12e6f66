"""A token sampled from the hidden state that a chunk left is the one that the chunk sampled, on every engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.contract import ChunkResult, Engine
from baton.errors import EngineError
from baton.request import SamplingParams, SequenceState
from tests.contract.engines import GREEDY, MIXED, Rig, chunks, ignore, start, state, step

LOGPROBS = (SamplingParams(temperature=0.0, logprobs=3), SamplingParams(seed=9, temperature=0.8, logprobs=2))


def computed(
    engine: Engine, ids: Sequence[int], sample: Sequence[SequenceState], chunk: int = 1000, owner: str = "c/1"
) -> ChunkResult:
    """The last chunk of `ids`; its pages are free again, and computed over."""
    handle, result = engine.reserve(owner, len(ids)), ChunkResult()
    for begin, end in chunks(len(ids), chunk):
        result = engine.prefill_chunk(
            handle, ids, begin, end, on_layer=ignore, sample=sample if end == len(ids) else ()
        )
    engine.free(handle)
    other = engine.reserve("other", len(ids))
    engine.prefill_chunk(other, [0] * len(ids), 0, len(ids), on_layer=ignore)
    engine.free(other)
    return result


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("length", [1, 15, 48, 70])
def test_a_sample_equals_that_of_the_chunk(rig: Rig, length: int, chunk: int) -> None:
    """For several settings and choices at once, and each alone, with log-probabilities."""
    engine, prompt = rig.engine(), rig.prompt(length)
    states = [state(prompt, params, choice=choice) for params in (*MIXED, *LOGPROBS) for choice in (0, 3)]
    result = computed(engine, prompt, states, chunk)
    assert engine.sample(result.hidden, states) == result.tokens
    assert [engine.sample(result.hidden, [each])[0].token_id for each in states] == [
        info.token_id for info in result.tokens
    ]
    scored = [info for info in engine.sample(result.hidden, states) if info.logprob is not None]
    assert len(scored) >= 2 * len(LOGPROBS)
    assert all(len(info.top) == count for info, count in zip(scored[-4:], (3, 3, 2, 2), strict=True))


def test_a_sample_of_a_replay_goes_by_its_outputs(rig: Rig) -> None:
    """Penalties and seeds count what was said before."""
    engine, prompt = rig.engine(), rig.prompt(40)
    outputs = rig.prompt(9, seed=1)
    states = [state(prompt, params, outputs) for params in MIXED]
    result = computed(engine, [*prompt, *outputs], states)
    assert engine.sample(result.hidden, states) == result.tokens


def test_an_equal_engine_samples_the_same(rig: Rig) -> None:
    prompt = rig.prompt(50)
    states = [state(prompt, params) for params in MIXED]
    result = computed(rig.engine(page_size=16), prompt, states)
    assert rig.engine(page_size=32, pages=32).sample(result.hidden, states) == result.tokens


def test_a_hidden_state_is_taken_from_any_address(rig: Rig) -> None:
    engine, prompt = rig.engine(), rig.prompt(20)
    result = computed(engine, prompt, [state(prompt)])
    for offset in (1, 2, 3):
        view = memoryview(bytes(offset) + result.hidden)[offset:]
        assert engine.sample(view, [state(prompt)]) == result.tokens


def test_a_chunk_that_samples_nothing_leaves_no_hidden_state(rig: Rig) -> None:
    engine, prompt = rig.engine(), rig.prompt(20)
    handle = engine.reserve("a/1", 20)
    assert engine.prefill_chunk(handle, prompt, 0, 12, on_layer=ignore).hidden == b""
    assert engine.prefill_chunk(handle, prompt, 12, 20, on_layer=ignore, prompt_logprobs=0).hidden == b""
    assert len(engine.prefill_chunk(handle, prompt, 12, 20, on_layer=ignore, sample=[state(prompt)]).hidden) > 0


def test_scores_change_no_hidden_state(rig: Rig) -> None:
    engine, prompt = rig.engine(), rig.prompt(20)
    handle, wanted = engine.reserve("a/1", 20), [state(prompt)]
    plain = engine.prefill_chunk(handle, prompt, 0, 20, on_layer=ignore, sample=wanted)
    scored = engine.prefill_chunk(handle, prompt, 0, 20, on_layer=ignore, sample=wanted, prompt_logprobs=2)
    assert scored.tokens == plain.tokens
    assert engine.sample(scored.hidden, wanted) == plain.tokens


def test_what_can_not_be_a_hidden_state_is_refused(rig: Rig) -> None:
    engine, prompt = rig.engine(), rig.prompt(20)
    good = computed(engine, prompt, [state(prompt)])
    for wrong in (b"", good.hidden[:-1], good.hidden + b"\0", good.hidden * 2, good.hidden[:1]):
        with pytest.raises(EngineError, match=f"{len(wrong)} bytes, expected {len(good.hidden)}"):
            engine.sample(wrong, [state(prompt)])
    assert engine.sample(good.hidden, [state(prompt)]) == good.tokens


def test_prompts_have_hidden_states_of_their_own(rig: Rig) -> None:
    """Of one that differs in its last token alone, as well; on the fake engine a wrong one gives a wrong token."""
    engine, prompt = rig.engine(), rig.prompt(20)
    wanted = [state(prompt)]
    right = computed(engine, prompt, wanted)
    others = ([*prompt[:-1], (prompt[-1] + 1) % rig.vocab], [(prompt[0] + 1) % rig.vocab, *prompt[1:]], prompt[:-1])
    for other in others:
        hidden = computed(engine, other, [state(other)]).hidden
        assert hidden != right.hidden
        if rig.exact:
            assert engine.sample(hidden, wanted) != right.tokens


def test_sampling_disturbs_no_sequence_that_runs(rig: Rig) -> None:
    engine, prompt = rig.engine(), rig.prompt(30)
    result = computed(engine, prompt, [state(prompt)])
    running = state(rig.prompt(25, seed=2), GREEDY)
    alone, _ = start(engine, "a/1", running)
    expected = [step(engine)[alone] for _ in range(6)]
    engine.free(alone)
    engine.step()
    handle, _ = start(engine, "a/2", running)
    tokens = []
    for _ in range(6):
        assert engine.sample(result.hidden, [state(prompt)]) == result.tokens
        tokens.append(step(engine)[handle])
    assert tokens == expected
