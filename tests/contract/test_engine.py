"""Computation of every engine: chunks, batches, refills, forks, transfers."""

import dataclasses
import struct

import pytest

from baton.engine.core import EngineCore
from baton.errors import Cancelled, EngineError, InvalidRequest, Overloaded
from baton.request import SamplingParams, SequenceState
from tests.contract.engines import (
    GREEDY,
    MIXED,
    Rig,
    advance,
    chunks,
    compute_between_layers,
    generate,
    ignore,
    move,
    prefill,
    start,
    state,
    step,
    whole_kv,
)
from tests.engine_calls import insert, prefill_chunk


def test_on_layer_is_called_in_order_with_final_kv(engine: EngineCore, rig: Rig) -> None:
    prompt = rig.prompt(21)
    handle = engine.reserve("a/1", 21)
    heads = range(engine.spec.kv_format.heads)
    seen = []

    def on_layer(layer: int) -> None:
        seen.append((layer, [bytes(part.data) for part in engine.read_kv(handle, layer, range(7, 21), heads)]))

    prefill_chunk(engine, handle, prompt, 0, 7, on_layer=ignore)
    prefill_chunk(engine, handle, prompt, 7, 21, on_layer=on_layer)
    assert [layer for layer, _ in seen] == list(range(engine.spec.kv_format.layers))
    for layer, parts in seen:
        assert parts == [bytes(part.data) for part in engine.read_kv(handle, layer, range(7, 21), heads)]


def test_on_layer_is_called_once_more_when_the_prompt_is_scored(engine: EngineCore, rig: Rig) -> None:
    handle, prompt, last = engine.reserve("r/0", 20), rig.prompt(20), engine.spec.kv_format.layers - 1
    calls: list[int] = []

    def abort_while_scoring(layer: int) -> None:
        calls.append(layer)
        if calls.count(last) == 2:
            raise Cancelled("aborted")

    with pytest.raises(Cancelled):
        prefill_chunk(engine, handle, prompt, 0, 20, on_layer=abort_while_scoring, prompt_logprobs=0)
    assert calls == [*range(last + 1), last]
    engine.free(handle)


def test_an_error_of_on_layer_ends_its_chunk(engine: EngineCore, rig: Rig) -> None:
    prompt = rig.prompt(20)
    expected = generate(engine, state(prompt), 4)
    handle = engine.reserve("a/1", 40)
    calls = []

    def abort(layer: int) -> None:
        calls.append(layer)
        raise KeyError("deadline")

    with pytest.raises(KeyError, match="deadline"):
        prefill_chunk(engine, handle, prompt, 0, 20, on_layer=abort)
    assert calls == [0]
    assert engine.audit() == {"a/1": 3}
    assert prefill(engine, handle, state(prompt)).token_id == expected[0]


def test_chunks_may_be_computed_between_the_layers_of_another(rig: Rig) -> None:
    compute_between_layers(rig.engine(), rig.prompt(60), rig.prompt(45, 1))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_equal_the_whole(engine: EngineCore, rig: Rig, chunk: int) -> None:
    wanted = state(rig.prompt(45), MIXED[1])
    whole, parts = engine.reserve("whole", 45), engine.reserve("parts", 45)
    assert prefill(engine, whole, wanted) == prefill(engine, parts, wanted, chunk)
    for one, other in zip(whole_kv(engine, whole, 45), whole_kv(engine, parts, 45), strict=True):
        if rig.exact:
            assert bytes(one.data) == bytes(other.data)
        count = one.data.nbytes // 4 if isinstance(one.data, memoryview) else len(one.data) // 4
        numbers = struct.unpack(f"<{count}f", one.data)
        assert numbers == pytest.approx(struct.unpack(f"<{count}f", other.data), abs=1e-4)
        assert any(numbers)


@pytest.mark.parametrize("chunk", [1000, 9, 1])
def test_prompt_logprobs_name_each_known_successor(engine: EngineCore, rig: Rig, chunk: int) -> None:
    prompt = rig.prompt(23)
    handle = engine.reserve("a/1", 23)
    found = []
    for begin, end in chunks(23, chunk):
        result = prefill_chunk(engine, handle, prompt, begin, end, on_layer=ignore, prompt_logprobs=2)
        assert result.tokens == ()
        found += result.prompt_logprobs
    assert [info.token_id for info in found] == prompt[1:]
    again = engine.reserve("a/2", 23)
    whole = prefill_chunk(engine, again, prompt, 0, 23, on_layer=ignore, prompt_logprobs=2).prompt_logprobs
    for info, same in zip(found, whole, strict=True):
        assert info.logprob == pytest.approx(same.logprob, abs=1e-4)
        assert info.logprob is not None
        assert len(info.top) == 2
        assert info.top[0][1] >= max(info.top[1][1], info.logprob)


def test_one_prompt_yields_a_first_token_for_each_choice(engine: EngineCore, rig: Rig) -> None:
    prompt = rig.prompt(20)
    params = SamplingParams(seed=11, temperature=1.5, n=4, logprobs=1)
    states = [state(prompt, params, choice=choice) for choice in range(4)]
    handle = engine.reserve("a/1", 20)
    tokens = prefill_chunk(engine, handle, prompt, 0, 20, on_layer=ignore, sample=states).tokens
    alone = [prefill(engine, engine.reserve(f"b/{s.choice_index}", 20), s) for s in states]
    assert [info.token_id for info in tokens] == [info.token_id for info in alone]
    assert len({info.token_id for info in tokens}) > 1
    assert all(info.logprob is not None and len(info.top) == 1 for info in tokens)


def test_replay_through_prefill_samples_what_decode_would_have(engine: EngineCore, rig: Rig) -> None:
    for params in MIXED:
        prompt = rig.prompt(18)
        expected = generate(engine, state(prompt, params), 8)
        for done in (1, 5, 7):
            handle = engine.reserve("replay", 40)
            assert prefill(engine, handle, state(prompt, params, expected[:done])).token_id == expected[done]
            engine.free(handle)


@pytest.mark.parametrize(("sizes", "other"), [((16, 64), (5, 200)), ((7, 100), (16, 64)), ((32, 8), (32, 8))])
def test_decode_goes_on_between_page_sizes(rig: Rig, sizes: tuple[int, int], other: tuple[int, int]) -> None:
    source = rig.engine(page_size=sizes[0], pages=sizes[1])
    target = rig.engine(page_size=other[0], pages=other[1])
    wanted = state(rig.prompt(37), MIXED[1])
    expected = generate(rig.engine(), wanted, 10)
    origin, home = source.reserve("a/1", 37), target.reserve("a/1", 50)
    first = prefill(source, origin, wanted, 10).token_id
    move(source, origin, target, home, 37)
    source.free(origin)
    insert(target, home, state(wanted.prompt_ids, wanted.params, [first]))
    assert [first, *(step(target)[home] for _ in range(9))] == expected


@pytest.mark.parametrize(("there", "here"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_element_types_are_converted_on_write(rig: Rig, there: str, here: str) -> None:
    source, target = rig.engine(kv_dtype=there), rig.engine(kv_dtype=here)
    prompt = rig.prompt(20)
    origin, home = source.reserve("a/1", 20), target.reserve("a/1", 40)
    first = prefill(source, origin, state(prompt)).token_id
    move(source, origin, target, home, 20)
    assert all(part.dtype == here for part in whole_kv(target, home, 20))
    back = source.reserve("a/2", 20)
    move(target, home, source, back, 20)
    insert(target, home, state(prompt, outputs=[first]))
    tokens = [first, *(step(target)[home] for _ in range(3))]
    if rig.exact:
        assert tokens == generate(source, state(prompt), 4)
        assert whole_kv(source, back, 20) == whole_kv(source, origin, 20)


def test_batch_mates_change_no_token(engine: EngineCore, rig: Rig) -> None:
    wanted = [state(rig.prompt(5 + 9 * i, seed=i), params) for i, params in enumerate(MIXED)]
    expected = [generate(engine, one, 12) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted)]
    for _ in range(11):
        advance(engine, running)
    assert [outputs for _, outputs in running] == expected


def test_a_freed_slot_is_refilled_at_the_next_step(rig: Rig) -> None:
    engine = rig.engine(slots=2)
    wanted = [state(rig.prompt(6 + 5 * i, seed=i), MIXED[i % len(MIXED)]) for i in range(6)]
    lengths = [7, 3, 5, 4, 6, 3]
    expected = [generate(engine, one, length) for one, length in zip(wanted, lengths, strict=True)]
    waiting = list(range(6))
    running = {}
    done = {}
    while waiting or running:
        while waiting and len(running) < 2:
            i = waiting.pop(0)
            handle, outputs = start(engine, f"a/{i}", wanted[i])
            running[handle] = (i, outputs)
        if waiting:
            extra = engine.reserve("extra", 20)
            with pytest.raises(Overloaded, match="2 slots"):
                insert(engine, extra, state(rig.prompt(3), outputs=[1]))
            engine.free(extra)
        tokens = step(engine)
        assert set(tokens) == set(running)
        for handle, token in tokens.items():
            i, outputs = running[handle]
            outputs.append(token)
            if len(outputs) == lengths[i]:
                engine.free(handle)
                done[i] = outputs
                del running[handle]
    assert [done[i] for i in range(6)] == expected


def test_a_sequence_that_changed_rows_takes_in_the_pages_it_gains(rig: Rig) -> None:
    engine = rig.engine(page_size=8)
    long, short = state(rig.prompt(60)), state(rig.prompt(5, seed=1), MIXED[1])
    expected = generate(engine, short, 30)
    first, _ = start(engine, "a/1", long)
    handle, outputs = start(engine, "b/1", short, 0)
    engine.extend(handle, 6)
    outputs.append(step(engine)[handle])
    engine.free(first)
    while len(outputs) < 30:
        engine.extend(handle, 5 + len(outputs))
        outputs.append(step(engine)[handle])
    assert outputs == expected


def test_forks_share_full_pages_and_go_their_own_ways(engine: EngineCore, rig: Rig) -> None:
    prompt = rig.prompt(37)
    params = SamplingParams(seed=2, temperature=1.5, n=3)
    wanted = [state(prompt, params, choice=choice) for choice in range(3)]
    expected = [generate(engine, one, 8) for one in wanted]
    parent = engine.reserve("a/1", 37)
    firsts = prefill_chunk(engine, parent, prompt, 0, 37, on_layer=ignore, sample=wanted).tokens
    children = []
    for one, first in zip(wanted, firsts, strict=True):
        child = engine.fork(parent, f"a/1/{one.choice_index}", 37, 50)
        insert(engine, child, dataclasses.replace(one, output_ids=[first.token_id]))
        children.append((child, [first.token_id]))
    assert engine.stats().used == 3 + 3 * 2
    engine.free(parent)
    assert engine.stats().used == 2 + 3 * 2
    for _ in range(7):
        advance(engine, children)
    assert [outputs for _, outputs in children] == expected


def test_a_step_needs_room_for_a_token(engine: EngineCore, rig: Rig) -> None:
    expected = generate(engine, state(rig.prompt(31)), 4)
    handle, outputs = start(engine, "a/1", state(rig.prompt(31)), 0)
    other, _ = start(engine, "b/1", state(rig.prompt(9)))
    outputs.append(step(engine)[handle])
    with pytest.raises(EngineError, match="a/1"):
        engine.launch()
    engine.extend(handle, 34)
    tokens = step(engine)
    assert {handle, other} == set(tokens)
    outputs.append(tokens[handle])
    assert outputs == expected[:3]


def test_sequences_end_at_max_model_len(rig: Rig) -> None:
    engine = rig.engine(max_model_len=24)
    handle, outputs = start(engine, "a/1", state(rig.prompt(21)))
    outputs += [step(engine)[handle] for _ in range(2)]
    with pytest.raises(EngineError, match="max_model_len"):
        engine.launch()
    engine.free(handle)
    with pytest.raises(EngineError, match="max_model_len"):
        prefill_chunk(engine, engine.reserve("b/1", 25), rig.prompt(25), 0, 25, on_layer=ignore)
    full = engine.reserve("c/1", 24)
    with pytest.raises(EngineError, match="max_model_len"):
        insert(engine, full, state(rig.prompt(20), outputs=[1, 2, 3, 4]))


def test_token_ids_outside_the_vocabulary_are_named(engine: EngineCore) -> None:
    handle = engine.reserve("a/1", 20)
    for bad in (engine.spec.vocab_size, -1):
        with pytest.raises(InvalidRequest, match=r"token_ids\[2\]"):
            prefill_chunk(engine, handle, [1, 2, bad, 4], 0, 4, on_layer=ignore)
        with pytest.raises(InvalidRequest, match=r"token_ids\[2\]"):
            prefill_chunk(engine, handle, [1, 2, bad, 4], 1, 3, on_layer=ignore)
        # A successor is scored though it lies beyond the chunk.
        with pytest.raises(InvalidRequest, match=r"token_ids\[2\]"):
            prefill_chunk(engine, handle, [1, 2, bad, 4], 0, 2, on_layer=ignore, prompt_logprobs=0)


def test_the_engine_keeps_its_own_output_ids(engine: EngineCore, rig: Rig) -> None:
    outputs = [5]
    handle = engine.reserve("a/1", 30)
    prompt = rig.prompt(8)
    prefill(engine, handle, state(prompt))
    insert(engine, handle, SequenceState(GREEDY, prompt, outputs))
    step(engine)
    assert outputs == [5]
