"""One forward pass over chunks of prompts and a step of the batch: each row is as if it were computed alone."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.engine.contract import ChunkResult, Engine, KvHandle, PassResult, PromptChunk
from baton.engine.core import EngineCore
from baton.errors import BatonError, EngineError, NoToken
from baton.request import SequenceState
from tests.contract.engines import (
    MIXED,
    ExecutorStub,
    Rig,
    advance,
    generate,
    ignore,
    prefill,
    spoil,
    start,
    state,
    step,
    whole_kv,
)
from tests.engine_calls import found, insert, prefill_chunk


class Stop(BatonError):
    """Exception that a caller raises to end its chunk."""


def tokens_of(result: PassResult) -> dict[KvHandle, int]:
    return {handle: infos[0].token_id for handle, infos in found(result) if not isinstance(infos, NoToken)}


def running(rig: Rig, engine: Engine) -> tuple[list[tuple[KvHandle, list[int]]], list[list[int]]]:
    """Sequences with different parameters, and the tokens that they will have."""
    wanted = [state(rig.prompt(9 + 5 * i, seed=i), params) for i, params in enumerate(MIXED)]
    expected = [generate(rig.engine(), each, 8) for each in wanted]
    return [start(engine, f"run/{i}", each) for i, each in enumerate(wanted)], expected


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("on_layer", [ignore, None])
def test_chunks_and_a_step_in_one_pass_are_as_each_alone(rig: Rig, ahead: int, on_layer: Any) -> None:
    engine, alone = rig.engine(steps_ahead=ahead), rig.engine()
    sequences, expected = running(rig, engine)
    prompts = [
        state(rig.prompt(60, seed=31), MIXED[1]),
        state(rig.prompt(45, seed=32), MIXED[3]),
        state(rig.prompt(33, seed=33)),
    ]
    reports = [None, 2, None]
    handles = [engine.reserve(f"new/{i}", each.length) for i, each in enumerate(prompts)]
    firsts = dict[KvHandle, ChunkResult]()
    for begin in range(0, 60, 20):
        chunks = [
            PromptChunk(handle, each.prompt_ids, begin, end, on_layer, [each] * (end == each.length), report)
            for handle, each, report in zip(handles, prompts, reports, strict=True)
            if begin < (end := min(begin + 20, each.length))
        ]
        result = engine.launch(chunks).result()
        for chunk, computed in zip(chunks, result.chunks, strict=True):
            assert isinstance(computed, ChunkResult)
            if chunk.sample:
                firsts[chunk.handle] = computed
        for handle, outputs in sequences:
            outputs.append(tokens_of(result)[handle])
    for _ in range(4):
        advance(engine, sequences)
    assert [outputs for _, outputs in sequences] == expected
    for each, handle, report in zip(prompts, handles, reports, strict=True):
        found = firsts[handle]
        home = alone.reserve("alone", each.length)
        whole = prefill_chunk(
            alone, home, each.prompt_ids, 0, each.length, on_layer=ignore, sample=[each], prompt_logprobs=report
        )
        assert [info.token_id for info in found.tokens] == [info.token_id for info in whole.tokens]
        for seen, other in zip(found.prompt_logprobs, whole.prompt_logprobs[40:], strict=True):
            assert (seen.token_id, seen.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))
        if rig.exact:
            assert whole_kv(engine, handle, each.length) == whole_kv(alone, home, each.length)
        alone.free(home)


def test_a_chunk_that_its_caller_ends_ends_alone(engine: EngineCore, rig: Rig) -> None:
    sequences, expected = running(rig, engine)
    stopped, other = (state(rig.prompt(40, seed=seed)) for seed in (41, 42))
    layers = dict[str, list[int]]()

    def called(name: str, *, stop: bool) -> Callable[[int], None]:
        def on_layer(layer: int) -> None:
            layers.setdefault(name, []).append(layer)
            if stop:
                raise Stop(name)

        return on_layer

    def chunk_of(name: str, each: SequenceState, *, stop: bool) -> PromptChunk:
        return PromptChunk(engine.reserve(f"{name}/1", 40), each.prompt_ids, 0, 40, called(name, stop=stop), [each])

    result = engine.launch([chunk_of("stopped", stopped, stop=True), chunk_of("other", other, stop=False)]).result()
    assert layers == {"stopped": [0], "other": list(range(engine.spec.kv_format.layers))}
    ended, found = result.chunks
    assert isinstance(ended, Stop)
    assert isinstance(found, ChunkResult)
    assert [info.token_id for info in found.tokens] == generate(rig.engine(), other, 1)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]
    # Nothing else waits for this pass, so it ends with its chunks.
    layers.clear()
    chunks = [chunk_of(name, each, stop=True) for name, each in (("stopped", stopped), ("other", other))]
    result = engine.launch(chunks, step=False).result()
    assert list(map(type, result.chunks)) == [Stop, Stop]
    assert layers == {"stopped": [0], "other": [0]}
    tokens = step(engine)
    assert [tokens[handle] for handle, _ in sequences] == [each[2] for each in expected]


def test_a_chunk_without_a_token_fails_alone(engine: EngineCore, rig: Rig) -> None:
    sequences, expected = running(rig, engine)
    bad, good = (state(rig.prompt(40, seed=seed)) for seed in (51, 52))
    handles = [engine.reserve(f"{name}/1", 40) for name in ("bad", "good")]
    for handle, each in zip(handles, (bad, good), strict=True):
        prefill_chunk(engine, handle, each.prompt_ids, 0, 16, on_layer=ignore)
    spoil(engine, handles[0], 1)
    chunks = [
        PromptChunk(handle, each.prompt_ids, 16, 40, ignore, [each])
        for handle, each in zip(handles, (bad, good), strict=True)
    ]
    result = engine.launch(chunks).result()
    lost, found = result.chunks
    assert isinstance(lost, NoToken)
    assert "bad/1" in str(lost)
    assert isinstance(found, ChunkResult)
    assert [info.token_id for info in found.tokens] == generate(rig.engine(), good, 1)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]


def test_a_sequence_that_cant_join_leaves_the_chunks_of_its_pass_alone(rig: Rig) -> None:
    engine = rig.engine(slots=6)
    sequences, expected = running(rig, engine)
    bad = engine.reserve("bad/1", 40)
    insert(engine, bad, SequenceState(MIXED[3], cast(list[int], [None] * 12), [1]))
    prompt, calls = state(rig.prompt(40, seed=61)), list[int]()
    chunk = PromptChunk(engine.reserve("new/1", 40), prompt.prompt_ids, 0, 40, calls.append, [prompt])
    result = engine.launch([chunk]).result()
    assert calls == list(range(engine.spec.kv_format.layers)), "computed once"
    assert [handle for handle, got in found(result) if isinstance(got, NoToken)] == [bad]
    (computed,) = result.chunks
    assert isinstance(computed, ChunkResult)
    assert [info.token_id for info in computed.tokens] == generate(rig.engine(), prompt, 1)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]


@pytest.mark.parametrize("fault", ["freed", "token id", "sampling"])
def test_a_chunk_that_cant_be_computed_fails_alone(engine: EngineCore, rig: Rig, fault: str) -> None:
    sequences, expected = running(rig, engine)
    good = state(rig.prompt(40, seed=91))
    handles = [engine.reserve(f"{name}/1", 40) for name in ("bad", "good")]
    ids = list(good.prompt_ids)
    wanted = SequenceState(MIXED[3], cast(list[int], [None] * 40)) if fault == "sampling" else good
    if fault == "freed":
        engine.free(handles[0])
    elif fault == "token id":
        ids[39] = -1
    chunks = [
        PromptChunk(handles[0], ids, 0, 40, ignore, [wanted]),
        PromptChunk(handles[1], good.prompt_ids, 0, 40, ignore, [good]),
    ]
    result = engine.launch(chunks).result()
    lost, computed = result.chunks
    assert isinstance(lost, NoToken if fault == "sampling" else BatonError)
    assert isinstance(computed, ChunkResult)
    assert [info.token_id for info in computed.tokens] == generate(rig.engine(), good, 1)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]


def test_an_error_of_a_chunk_keeps_nothing_alive(engine: EngineCore, rig: Rig) -> None:
    """The prompt of a chunk that was called off may have a million tokens."""

    class Ids(list[int]):
        pass

    def stop(_layer: int) -> None:
        raise Stop

    ids = Ids(rig.prompt(20))
    alive = weakref.ref(ids)
    gc.disable()
    try:
        with pytest.raises(Stop):
            prefill_chunk(engine, engine.reserve("a/1", 20), ids, 0, 20, on_layer=stop)
        del ids
        assert alive() is None
    finally:
        gc.enable()


def test_a_failed_join_is_reported_although_an_earlier_pass_fails(rig: Rig) -> None:
    engine = rig.engine(slots=6, steps_ahead=1)
    sequences, _ = running(rig, engine)

    def failing(*plan: Any) -> Any:
        stub.next.launch(*plan)

        def wait() -> Any:
            engine.executor = stub.next
            raise EngineError("lost")

        return wait

    stub = ExecutorStub(engine, failing)
    engine.launch()
    engine.executor = stub.next
    bad = engine.reserve("bad/1", 40)
    insert(engine, bad, SequenceState(MIXED[3], cast(list[int], [None] * 12), [1]))
    with pytest.raises(EngineError, match="lost"):
        engine.launch()
    told = found(engine.launch().result())
    assert [handle for handle, got in told if isinstance(got, NoToken)] == [bad]
    assert len(told) == len(sequences) + 1


def test_no_pass_is_launched_between_the_layers_of_one_with_a_step(engine: EngineCore, rig: Rig) -> None:
    sequences, expected = running(rig, engine)
    outer, inner = state(rig.prompt(40, seed=71)), engine.reserve("inner/1", 20)

    def launch(_layer: int) -> None:
        prefill(engine, inner, state(rig.prompt(20)))

    chunk = PromptChunk(engine.reserve("outer/1", 40), outer.prompt_ids, 0, 40, launch, [outer])
    result = engine.launch([chunk]).result()
    (refused,) = result.chunks
    assert isinstance(refused, EngineError)
    assert "one that has a step was under way" in str(refused)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]
    (found,) = engine.launch([chunk], step=False).result().chunks
    assert isinstance(found, ChunkResult)


def test_a_pass_that_fails_fails_its_chunks_and_its_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig.engine()
    sequences, expected = running(rig, engine)
    prompt = state(rig.prompt(40, seed=81))
    chunk = PromptChunk(engine.reserve("new/1", 40), prompt.prompt_ids, 0, 40, ignore, [prompt])

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner, "sample", fail)  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="no memory"):
            engine.launch([chunk]).result()
    result = engine.launch([chunk]).result()
    (found,) = result.chunks
    assert isinstance(found, ChunkResult)
    assert [info.token_id for info in found.tokens] == generate(rig.engine(), prompt, 1)
    assert [tokens_of(result)[handle] for handle, _ in sequences] == [each[1] for each in expected]
