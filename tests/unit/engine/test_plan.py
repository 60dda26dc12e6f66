"""Plans are all that a ModelRunner is given: copied, they make another one choose the same tokens."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from torch import Tensor

from baton.engine.contract import EngineSpec
from baton.engine.core import EngineCore
from baton.engine.executor import InProcessExecutor
from baton.engine.load import LoadedModel
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import ForwardPlan, Growth, Join, PlanResult, PromptInput, Row
from baton.errors import EngineError
from baton.model.attention.segments import Segment, SegmentViews
from baton.request import SequenceState
from tests.contract.engines import MIXED, ExecutorStub, start, state


@pytest.fixture
def runner(model: LoadedModel, spec: EngineSpec) -> Callable[[], ModelRunner]:
    return lambda: ModelRunner(model, model.new_kv_cache(60, 16), spec)


def pages(numbers: list[int]) -> array[int]:
    return array("q", numbers)


def test_another_runner_finds_the_same_tokens_in_the_plans(runner: Callable[[], ModelRunner], spec: EngineSpec) -> None:
    """Sequences join, grow, leave and fail meanwhile; the second runner is told nothing but the plans."""
    engine, second = EngineCore(spec, InProcessExecutor(runner())), InProcessExecutor(runner())
    results: list[tuple[PlanResult, PlanResult]] = []
    kinds = set()

    def both(plan: ForwardPlan, on_layer: Any = None) -> Callable[[], PlanResult]:
        kinds.update(key for key, value in asdict(plan).items() if value)
        first = stub.next.launch(plan, on_layer)()
        results.append((first, second.launch(pickle.loads(pickle.dumps(plan)))()))
        if len(results) == 9:
            raise EngineError("lost on its way")
        return lambda: first

    stub = ExecutorStub(engine, both)
    wanted = [state([(7 * i + p) % 256 for p in range(9 + 4 * i)], params) for i, params in enumerate(MIXED)]
    running = [start(engine, f"{i}", one, 1)[0] for i, one in enumerate(wanted[:4])]
    for turn in range(24):
        if turn == 8:
            engine.free(running[1])
            running.append(start(engine, "4", wanted[4], 1)[0])
        for each in engine.batch:
            engine.extend(each.handle, each.state.length)
        try:
            engine.launch()
        except EngineError:
            assert turn == 4
    assert kinds == {"reset", "left", "joined", "grew", "rows"}
    assert all(first == other for first, other in results)
    assert sum(len(first.rows) for first, _ in results) > 90


def test_rows_of_slots_must_be_all_that_are_taken(runner: Callable[[], ModelRunner]) -> None:
    executor = InProcessExecutor(runner())
    join, other = (Join(slot, pages([1 + slot]), SequenceState(MIXED[0], [1, 2])) for slot in range(2))
    with pytest.raises(EngineError, match="a row of 3 is among those of slots, but has no sequence"):
        executor.launch(ForwardPlan(joined=(join,), rows=(Row(0, 1), Row(3, 1))))
    with pytest.raises(EngineError, match="one of all 2 slots that are taken, got 1"):
        executor.launch(ForwardPlan(reset=True, joined=(join, other), rows=(Row(1, 1),)))


def test_kv_comes_from_host_memory_once_a_sequence_has_pages_there(model: LoadedModel, spec: EngineSpec) -> None:
    """A sequence of device pages, one in host memory from its start, and a first one that grows into host memory."""
    kv, opened = model.new_kv_cache(6, 16, host_pages=54), list[Segment]()

    class Watched(SegmentViews):
        def open(self, segment: Segment) -> tuple[Tensor, Tensor]:
            opened.append(segment)
            return super().open(segment)

    runner = ModelRunner(model, kv, replace(spec, host_pages=54), Watched(kv, 32))
    executor = InProcessExecutor(runner)
    params = MIXED[0]
    grows, device, hosted = (SequenceState(params, list(range(length))) for length in (15, 20, 40))
    for table, one in (([0], grows), ([1, 2], device), ([6, 7, 8], hosted)):
        ids = tuple(one.prompt_ids)
        executor.launch(
            ForwardPlan(rows=(Row(PromptInput(ids, pages(table), (one,)), 0, len(ids), (len(ids) - 1,)),))
        )()
    assert not opened, "each was one chunk, without a past"
    joined = (Join(0, pages([0]), grows), Join(1, pages([1, 2]), device), Join(2, pages([6, 7, 8]), hosted))
    executor.launch(ForwardPlan(joined=joined, rows=(Row(0, 14), Row(1, 19), Row(2, 39))))()
    assert {each.row for each in opened} == {2}
    opened.clear()
    executor.launch(ForwardPlan(rows=(Row(0, 15), Row(1, 20), Row(2, 40))))()
    assert {each.row for each in opened} == {2}
    opened.clear()
    grew = (Growth(0, pages([9])),)
    executor.launch(ForwardPlan(grew=grew, rows=(Row(0, 16), Row(1, 21), Row(2, 41))))()
    assert {each.row for each in opened} == {0, 2}
    assert [each.tokens for each in opened if each.layer == 0] == [range(16), range(32), range(32, 41)]


@pytest.mark.parametrize("other", ["prompt on the device", "prompt in host memory", "step"])
def test_rows_after_an_unsampled_one_in_host_memory_are_right(model: LoadedModel, spec: EngineSpec, other: str) -> None:
    ids = [tuple((factor * i + 1) % 200 for i in range(40)) for factor in (7, 11, 5)]
    hosted, second, short = pages([6, 7, 8]), pages([9, 10, 11]), pages([1, 2])

    def row(tokens: tuple[int, ...], table: array[int], start: int, end: int, *, sampled: bool = False) -> Row:
        states = (SequenceState(MIXED[0], tokens[:end]),) if sampled else ()
        return Row(
            PromptInput(tokens[start:end], table, states), start, end - start, (end - start - 1,) if sampled else ()
        )

    def tokens(runner: ModelRunner) -> list[int]:
        executor = InProcessExecutor(runner)
        for tokens, table, end in ((ids[0], hosted, 32), (ids[1], second, 32), (ids[2], short, 20)):
            executor.launch(ForwardPlan(rows=(row(tokens, table, 0, end),)))()
        middle, joined = row(ids[0], hosted, 32, 36), ()
        if other == "step":
            last, joined = Row(0, 19), (Join(0, short, SequenceState(MIXED[0], ids[2][:20])),)
        elif other == "prompt on the device":
            last = row(ids[2], short, 0, 20, sampled=True)
        else:
            last = row(ids[1], second, 32, 40, sampled=True)
        _, result = executor.launch(ForwardPlan(joined=joined, rows=(middle, last)))().rows
        return [info.token_id for info in result.tokens]

    kv = model.new_kv_cache(6, 16, host_pages=54)
    found = tokens(ModelRunner(model, kv, replace(spec, host_pages=54), SegmentViews(kv, 32)))
    assert found == tokens(ModelRunner(model, model.new_kv_cache(60, 16), spec))
