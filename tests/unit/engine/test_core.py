"""Slots, plans of them, and passes over them; no tensor anywhere."""

from collections.abc import Callable

import pytest

from baton.engine.contract import EngineSequence, EngineSpec
from baton.engine.core import EngineCore, KvManager
from baton.engine.plan import ForwardPlan, Growth, PlanResult, Row, RowResult
from baton.errors import EngineError, Overloaded
from baton.kv.format import KvFormat, KvPart
from baton.kv.pool import PageHandle
from baton.request import SamplingParams, SequenceState, TokenInfo

KV_FORMAT = KvFormat((KvPart("k", "float32", (1, 2)),), layers=1, block_size=4)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def kv() -> KvManager:
    """Pages of 4 tokens, three slots."""
    return KvManager(EngineSpec("f", KV_FORMAT, 100, 32, frozenset(), page_size=4, pages=12, slots=3))


def insert(kv: KvManager, handle: PageHandle, ids: list[int], params: SamplingParams = GREEDY) -> None:
    kv.insert(EngineSequence(handle, SequenceState(params, ids)), handle)


def join(kv: KvManager, owner: str, tokens: int, params: SamplingParams = GREEDY) -> PageHandle:
    handle = kv.pool.reserve(owner, tokens)
    insert(kv, handle, list(range(tokens)), params)
    return handle


def plan(kv: KvManager) -> ForwardPlan:
    with kv.pin_batch() as steps:
        return kv.plan((), steps)


def grow(kv: KvManager) -> list[EngineSequence]:
    """Each sequence of the batch got a token."""
    for sequence in kv.batch:
        sequence.output_ids.append(7)
        kv.pool.extend(kv._running[sequence], sequence.length)
    return kv.batch


def slots(found: ForwardPlan) -> tuple[list[int], list[int], list[int]]:
    return [each.slot for each in found.joined], list(found.left), [each.source for each in found.rows]


def test_a_plan_tells_what_has_changed_since_the_one_before(kv: KvManager) -> None:
    first, second = join(kv, "a", 3), join(kv, "b", 4)
    told = plan(kv)
    assert slots(told) == ([0, 1], [], [0, 1])
    assert [(each.pages, list(each.state.prompt_ids)) for each in told.joined] == [
        (first.pages, [0, 1, 2]),
        (second.pages, [0, 1, 2, 3]),
    ]
    assert told.rows == (Row(0, 2), Row(1, 3))
    grow(kv)
    told = plan(kv)
    assert (slots(told), told.reset) == (([], [], [0, 1]), False)
    assert told.grew == (Growth(1, second.pages[1:]),)
    kv.pool.free(first)
    third = join(kv, "c", 2)
    told = plan(kv)
    assert slots(told) == ([0], [0], [1, 0]), "the free slot is taken again, once it was left"
    kv.pool.free(third)
    assert slots(plan(kv)) == ([], [0], [1])


def test_a_sequence_that_no_plan_told_of_leaves_without_a_word(kv: KvManager) -> None:
    kv.pool.free(join(kv, "a", 3))
    join(kv, "b", 3)
    assert slots(plan(kv)) == ([0], [], [0])


def test_after_a_failed_plan_the_next_one_fills_every_slot_again(kv: KvManager) -> None:
    first, _ = join(kv, "a", 3), join(kv, "b", 4)
    plan(kv)
    grow(kv)
    kv.pool.free(first)
    plan(kv)
    kv.forget_plans()
    assert kv.must_read_first
    told = plan(kv)
    assert (told.reset, slots(told), told.grew) == (True, ([1], [], [1]), ())
    assert list(told.joined[0].state.output_ids) == [7]
    assert not plan(kv).reset
    assert not kv.must_read_first


def test_a_sequence_with_penalties_is_never_launched_ahead(kv: KvManager) -> None:
    join(kv, "a", 3)
    assert not kv.must_read_first
    penalised = join(kv, "b", 3, SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert kv.must_read_first
    kv.pool.free(penalised)
    plan(kv)
    assert not kv.must_read_first


def test_slots_and_lengths_are_checked_before_anything_changes(kv: KvManager) -> None:
    for owner in "abc":
        join(kv, owner, 3)
    waiting = kv.pool.reserve("d", 4)
    with pytest.raises(Overloaded, match="all 3 slots"):
        insert(kv, waiting, [1, 2])
    with pytest.raises(EngineError, match="d: 6 tokens in pages for 4"):
        insert(kv, waiting, [1] * 6)
    long = kv.pool.reserve("e", 32)
    with pytest.raises(EngineError, match="max_model_len is 32"):
        insert(kv, long, [1] * 32)
    assert slots(plan(kv))[0] == [0, 1, 2]
    # The step of a sequence without room is refused, and nobody's was planned.
    for _ in range(2):
        for sequence in kv.batch:
            sequence.output_ids.append(7)
    with pytest.raises(EngineError, match="lies beyond"), kv.pin_batch():
        pytest.fail("it has no room")


class Wide(EngineSequence):
    """A sequence whose steps have three new tokens."""

    @property
    def next_positions(self) -> range:
        begin = super().next_positions.start
        return range(begin, begin + 3)


class TwoTokens:
    """An executor that finds two tokens for each row."""

    memory = None

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def launch(self, plan: ForwardPlan, on_layer: object) -> Callable[[], PlanResult]:
        self.rows += plan.rows
        return lambda: PlanResult((RowResult((TokenInfo(5), TokenInfo(6))),) * len(plan.rows))


def test_a_step_may_write_several_tokens_and_yield_another_number() -> None:
    executor = TwoTokens()
    engine = EngineCore(EngineSpec("f", KV_FORMAT, 100, 32, frozenset(), page_size=4, pages=4, slots=1), executor)
    sequence = Wide(engine.reserve("a", 4), SequenceState(GREEDY, [1, 2, 3]))
    engine.insert(sequence)
    with pytest.raises(EngineError, match="token 4 lies beyond"):
        engine.launch()
    engine.extend(sequence.handle, 8)
    for length in (5, 7):
        ((found, tokens),) = engine.launch().result().sequences
        assert (found, len(tokens), sequence.length, sequence.in_flight_tokens) == (sequence, 2, length, 0)
    assert executor.rows == [Row(0, 2, 3, (0, 1, 2)), Row(0, 4, 3, (0, 1, 2))]
