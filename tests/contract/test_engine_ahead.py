"""Steps in flight: the next one launched before the tokens of the last one are read."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError
from baton.request import SamplingParams, SequenceState
from tests.contract.engines import MIXED, ExecutorStub, Rig, generate, prefill, start, state, step
from tests.engine_calls import found, insert

# Four tokens far above all others take turns by what was counted: a step that missed one would take another turn.
IN_TURNS = SamplingParams(
    temperature=0.0, frequency_penalty=2.0, logit_bias=tuple((token, 90.0) for token in (7, 8, 9, 10))
)
COUNTED = [*MIXED, IN_TURNS]
UNCOUNTED = [
    *[params for params in MIXED if params.repetition_penalty == 1.0],
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(seed=6, temperature=0.7, min_tokens=9, stop_token_ids=tuple(range(0, 256, 2))),
]


@pytest.fixture
def ahead(rig: Rig) -> Callable[..., Any]:
    """Makes engines with a step ahead."""
    return lambda **sizes: rig.engine(steps_ahead=1, **sizes)


class Driver:
    """Reads each step after the next one was launched, as the decode loop does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.unread: list[Any] = []
        self.tokens: dict[KvHandle, list[int]] = {}

    def launch(self) -> None:
        self.unread.append(self.engine.launch())

    def read(self) -> set[KvHandle]:
        results = found(self.unread.pop(0).result())
        for handle, infos in results:
            self.tokens.setdefault(handle, []).extend(info.token_id for info in infos)
        return {handle for handle, _ in results}

    def turn(self) -> set[KvHandle]:
        self.launch()
        return self.read() if len(self.unread) > 1 else set()


@pytest.mark.parametrize("params", [COUNTED, UNCOUNTED], ids=["with penalties", "without"])
def test_tokens_are_the_same_with_a_step_ahead(rig: Rig, ahead: Callable[..., Any], params: Any) -> None:
    wanted = [state(rig.prompt(10 + i, seed=i), one) for i, one in enumerate(params)]
    expected = [generate(rig.engine(), one, 20) for one in wanted]
    engine = ahead()
    driver = Driver(engine)
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted)]
    for _ in range(20):
        driver.turn()
    assert [[*first, *driver.tokens[handle]][:20] for handle, first in running] == expected


def test_a_step_is_launched_before_the_last_one_is_read(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    handle, _ = start(engine, "a/1", state(rig.prompt(10)))
    waits: list[int] = []
    launched: list[int] = []

    def counted(*plan: Any) -> Any:
        wait, number = stub.next.launch(*plan), len(launched)
        launched.append(number)
        return lambda: (waits.append(number), wait())[1]

    stub = ExecutorStub(engine, counted)
    first, second = engine.launch(), engine.launch()
    assert (launched, waits) == ([0, 1], [])
    # More than were agreed upon: the oldest is read first.
    third = engine.launch()
    assert (launched, waits) == ([0, 1, 2], [0])
    tokens = [one.result().sequences[0][1][0].token_id for one in (first, second, third)]
    assert waits == [0, 1, 2]
    assert tokens == generate(rig.engine(), state(rig.prompt(10)), 4)[1:]
    assert handle.alive


def test_results_may_be_read_in_any_order_and_again(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    start(engine, "a/1", state(rig.prompt(10)))
    first, second = engine.launch(), engine.launch()
    later, sooner = second.result().sequences, first.result().sequences
    assert (later, sooner) == (second.result().sequences, first.result().sequences)
    assert [sooner[0][1][0].token_id, later[0][1][0].token_id] == generate(rig.engine(), state(rig.prompt(10)), 3)[1:]


def test_passes_in_flight_are_listed_until_their_results_are_taken(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    handle, _ = start(engine, "a/1", state(rig.prompt(10)))
    passes = [engine.launch() for _ in range(3)]
    # The first was read when the third was launched.
    assert list(engine.in_flight) == passes
    assert [[each.handle for each in one.batch] for one in passes] == [[handle]] * 3
    passes[1].result()
    assert list(engine.in_flight) == [passes[0], passes[2]]
    for one in (passes[0], passes[2]):
        assert engine.in_flight[0] is one
        one.result()
    assert not engine.in_flight
    ((sequence, _),) = passes[2].result().sequences
    assert sequence.output_ids == generate(rig.engine(), state(rig.prompt(10)), 4)


def test_a_sequence_freed_in_an_unread_step_keeps_its_pages(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead(slots=2)
    wanted = [state(rig.prompt(10 + i, seed=i), MIXED[i]) for i in range(3)]
    expected = [generate(rig.engine(), one, 8) for one in wanted]
    driver = Driver(engine)
    (ending, _), (going, went) = (start(engine, f"a/{i}", wanted[i], 14) for i in range(2))
    waiting = engine.reserve("a/2", 30)
    first = prefill(engine, waiting, wanted[2]).token_id
    driver.turn()
    driver.launch()
    assert driver.read() == {ending, going}
    engine.free(ending)
    assert engine.audit() == {"a/0 (draining)": 2, "a/1": 2, "a/2": 2}
    # Its slot is free at once, its pages are not.
    insert(engine, waiting, SequenceState(wanted[2].params, wanted[2].prompt_ids, [first]))
    driver.launch()
    assert driver.read() == {going}
    assert engine.audit() == {"a/1": 2, "a/2": 2}
    for _ in range(5):
        driver.turn()
    assert [*went, *driver.tokens[going]][:8] == expected[1]
    assert [first, *driver.tokens[waiting]][:6] == expected[2][:6]


def test_a_step_ahead_needs_room_for_a_token_more(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    handle, outputs = start(engine, "a/1", state(rig.prompt(15)), 1)
    pending = engine.launch()
    with pytest.raises(EngineError, match="a/1"):
        engine.launch()
    engine.extend(handle, 17)
    after = engine.launch()
    outputs += [one.result().sequences[0][1][0].token_id for one in (pending, after)]
    assert outputs == generate(rig.engine(), state(rig.prompt(15)), 3)


def test_a_sequence_at_its_length_may_be_in_one_more_step(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead(max_model_len=32)
    handle, _ = start(engine, "a/1", state(rig.prompt(30)), 2)
    last = engine.launch()
    beyond = engine.launch()
    assert len(last.result().sequences) == 1
    engine.free(handle)
    assert beyond.result().sequences == []


def test_a_step_that_fails_when_it_is_read_undoes_the_later_ones(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    wanted = [state(rig.prompt(10 + i, seed=i), MIXED[i]) for i in range(3)]
    expected = [generate(rig.engine(), one, 6) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted)]
    tokens = step(engine)

    def failing(*plan: Any) -> Any:
        stub.next.launch(*plan)

        def wait() -> Any:
            raise EngineError("not finite")

        engine.executor = stub.next
        return wait

    stub = ExecutorStub(engine, failing)
    failed, undone = engine.launch(), engine.launch()
    with pytest.raises(EngineError, match="not finite"):
        failed.result()
    with pytest.raises(EngineError, match="undone, because a pass before it failed: not finite"):
        undone.result()
    assert set(engine.audit()) == {"a/0", "a/1", "a/2"}
    # Nobody has moved, so the same step may run.
    for _ in range(4):
        for handle, outputs in running:
            outputs.append(tokens[handle])
        tokens = step(engine)
    assert [outputs[:5] for _, outputs in running] == [each[:5] for each in expected]


def test_a_step_that_nobody_reads_gives_its_pages_back_on_close(rig: Rig, ahead: Callable[..., Any]) -> None:
    engine = ahead()
    handle, _ = start(engine, "a/1", state(rig.prompt(10)))
    pending = engine.launch()
    engine.free(handle)
    assert engine.audit() == {"a/1 (draining)": 4}
    engine.close()
    assert engine.audit() == {}
    with pytest.raises(EngineError, match="closed"):
        pending.result()
