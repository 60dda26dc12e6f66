"""The decode loop with a step in flight: what it emits is the same, one turn later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.errors import EngineError
from baton.request import FinishReason
from decode_svc.attempts import FailureKind
from decode_svc.loop import FailedSequence, StepReport
from tests.contract.engines import ExecutorStub
from tests.decoding import alone, greedy
from tests.unit.decode_svc.test_loop import Turns


class Ahead(Turns):
    """Turns of a loop whose engine takes a step ahead; a turn's reports are one."""

    def __init__(self, **settings: int) -> None:
        super().__init__(steps_ahead=1, **settings)

    def turn(self) -> StepReport:
        """One turn, with all that it told as one report."""
        self.loop.drop([])
        told = len(self.reports)
        assert self.loop.turn()
        whole = StepReport()
        for each in self.reports[told:]:
            whole.joined += each.joined
            whole.failures += each.failures
            whole.outputs += each.outputs
            whole.batch = max(whole.batch, each.batch)
        for output in whole.outputs:
            assert output.output_index == len(self.tokens[output.id])
            self.tokens[output.id] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                self.finished[output.id] = output.finish
        return whole


def test_each_step_is_launched_before_the_one_before_it_is_emitted() -> None:
    turns = Ahead()
    turns.add(1, [3, 1, 4], 4)
    emitted = [len(turns.turn().outputs) for _ in range(4)]
    # The last turn finds the end in the third step, and has launched a fourth: it is read at once.
    assert emitted == [0, 1, 1, 1]
    assert turns.engine.steps == [["s1"]] * 4
    assert turns.tokens[1] == alone([3, 1, 4], greedy(4))
    assert turns.engine.audit() == {}


def test_tokens_and_ends_are_those_of_single_steps() -> None:
    turns = Ahead(slots=2, eos_token_ids=frozenset(range(0, 1000, 9)))  # type: ignore[arg-type]
    single = Turns(slots=2, eos_token_ids=frozenset(range(0, 1000, 9)))  # type: ignore[arg-type]
    for number in range(1, 9):
        for each in (turns, single):
            each.add(number, [number, 5, 9], 3 + 5 * (number % 3))
    turns.until_finished(*range(1, 9))
    single.until_finished(*range(1, 9))
    assert turns.tokens == single.tokens
    assert turns.finished == single.finished
    assert set(turns.finished.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert turns.engine.audit() == {}


def test_a_freed_slot_is_filled_in_the_next_step_launched_after_its_end_is_known() -> None:
    turns = Ahead(slots=1)
    turns.add(1, [1], 3)
    turns.add(2, [2], 3)
    turns.until_finished(1, 2)
    # Two steps for two tokens, and one that was launched before the end was known.
    assert turns.engine.steps == [["s1"]] * 3 + [["s2"]] * 3
    assert turns.tokens[2] == alone([2], greedy(3))


def test_a_cancelled_sequence_drops_the_token_in_flight_and_its_pages_return() -> None:
    turns = Ahead()
    turns.add(1, [1], 8)
    turns.add(2, [2], 8)
    turns.turn()
    turns.loop.drop([1])
    report = turns.turn()
    assert [output.id for output in report.outputs] == [2]
    assert set(turns.engine.audit()) == {"s2"}
    turns.loop.drop([2])
    # The batch is empty: nothing stays unread, and nothing is held.
    assert turns.turn().outputs == []
    assert turns.engine.audit() == {}


def test_the_loop_does_not_sleep_on_an_unread_step() -> None:
    turns = Ahead()
    turns.add(1, [1], 8)
    turns.turn()
    turns.loop._free([1])
    # Without a command in the inbox.
    assert turns.loop.turn()
    assert turns.engine.audit() == {}


def test_a_step_that_cant_be_launched_comes_after_the_one_in_flight() -> None:
    turns = Ahead()
    for number in (1, 2, 3):
        turns.add(number, [number], 2 if number == 1 else 4)
    turns.turn()
    turns.engine.fail_next = "out of memory"
    report = turns.turn()
    # The first one had come to its end.
    assert [output.id for output in report.outputs] == [1, 2]
    assert turns.finished == {1: FinishReason.LENGTH}
    assert report.failures == [FailedSequence(2, FailureKind.ENGINE, "EngineError: out of memory")]
    turns.until_finished(3)
    assert turns.tokens[3] == alone([3], greedy(4))
    assert turns.engine.audit() == {}


def test_a_step_that_fails_when_it_is_read_fails_its_batch_and_the_next_one() -> None:
    turns = Ahead(slots=2)
    for number in (1, 2, 3):
        turns.add(number, [number], 4)

    def failing(*plan: Any) -> Any:
        stub.next.launch(*plan)
        turns.engine.executor = stub.next

        def wait() -> Any:
            raise EngineError("not finite")

        return wait

    stub = ExecutorStub(turns.engine, failing)
    assert turns.turn().failures == []
    report = turns.turn()
    assert report.failures == [FailedSequence(each, FailureKind.ENGINE, "EngineError: not finite") for each in (1, 2)]
    assert report.outputs == []
    assert set(turns.engine.audit()) == {"s3"}
    turns.until_finished(3)
    assert turns.tokens[3] == alone([3], greedy(4))
    assert turns.engine.audit() == {}


def test_a_sequence_that_is_as_long_as_the_model_allows_ends_there() -> None:
    turns = Ahead(max_model_len=8)
    sequence = turns.add(1, [1, 2, 3], 40)
    sequence.state = replace(sequence.state, params=greedy(40))
    turns.until_finished(1)
    assert len(turns.tokens[1]) == 5
    assert turns.engine.audit() == {}


def test_stopping_waits_for_what_is_in_flight() -> None:
    turns = Ahead()
    turns.add(1, [1], 8)
    turns.turn()
    turns.loop.stop()
    turns.loop.run()
    assert turns.engine.audit() == {}


def test_what_the_engine_has_read_by_itself_is_reported_in_order() -> None:
    turns = Ahead()
    turns.engine._spec = replace(turns.engine.spec, steps_ahead=2)
    turns.add(1, [3, 1, 4], 9)
    assert [len(turns.turn().outputs) for _ in range(3)] == [0, 0, 1]
    # Its steps depend on all tokens before them, so the engine reads two steps before it launches the next one.
    penalised = turns.add(2, [1, 5], 4)
    penalised.state = replace(penalised.state, params=replace(greedy(4), presence_penalty=0.5))
    turns.until_finished(1, 2)
    assert turns.tokens == {1: alone([3, 1, 4], greedy(9)), 2: alone([1, 5], greedy(4))}
    assert turns.engine.audit() == {}
