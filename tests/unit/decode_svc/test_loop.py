"""The engine thread's turns, taken one by one on the test's own thread, without and with a step in flight."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.contract import EngineSequence
from baton.errors import EngineError
from baton.request import FinishReason, SequenceState
from baton.worker.health import Watchdog
from decode_svc.loop import DecodeLoop, FailedSequence, StepReport
from decode_svc.messages import FailureKind
from decode_svc.scheduler import DecodeSequence
from tests.contract.engines import ExecutorStub, spoil
from tests.decoding import LoggingEngine, alone, digests, greedy, prefill


class Turns:
    """A loop over a fake engine, and what it reported."""

    def __init__(self, **settings: int) -> None:
        self.engine = LoggingEngine(**{"page_size": 4, "pages": 64, "slots": 2, **settings})
        self.reports: list[StepReport] = []
        self.watchdog = Watchdog()
        self.loop = DecodeLoop(self.engine, self.watchdog, self.reports.append)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}

    def add(self, number: int, prompt: list[int], max_tokens: int) -> DecodeSequence:
        ready = prefill(prompt, greedy(max_tokens))
        handle = self.engine.reserve(f"s{number}", len(prompt) + max_tokens)
        ready.write(self.engine, handle)
        first = ready.handoff.first_tokens[0].token.token_id
        state = SequenceState(ready.handoff.params, prompt, (first,))
        self.tokens[number] = [first]
        sequence = DecodeSequence(number, handle, state)
        self.loop.add([sequence])
        return sequence

    def until_finished(self, *numbers: int) -> None:
        for _ in range(50):
            if set(numbers) <= set(self.finished):
                return
            self.turn()
        pytest.fail(f"{numbers} have not finished, but {self.finished}")

    def turn(self) -> StepReport:
        """One turn, with all that it told as one report; a drop of nothing keeps it from waiting."""
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


def test_a_freed_slot_is_filled_in_the_very_next_step() -> None:
    turns = Turns()
    prompts = {1: [3, 1, 4], 2: [1, 5], 3: [9, 2, 6, 5], 4: [3, 5]}
    for number, length in ((1, 3), (2, 6), (3, 4), (4, 3)):
        turns.add(number, prompts[number], length)
    turns.until_finished(1, 2, 3, 4)
    assert turns.engine.steps == [["s1", "s2"], ["s1", "s2"], ["s2", "s3"], ["s2", "s3"], ["s2", "s3"], ["s4"], ["s4"]]
    for number, length in ((1, 3), (2, 6), (3, 4), (4, 3)):
        assert turns.tokens[number] == alone(prompts[number], greedy(length))
    assert turns.engine.audit() == {}


def test_each_turn_reports_the_changes_of_the_batch_then_its_step_and_the_load_after_it() -> None:
    turns = Turns()
    turns.add(1, [1, 2], 2)
    turns.add(2, [3], 3)
    turns.add(3, [4], 3)
    report = turns.turn()
    assert [each.running for each in turns.reports] == [2, 1]
    assert report.joined == [1, 2]
    assert [output.id for output in report.outputs] == [1, 2]
    assert report.batch == 2
    turns.turn()
    turns.turn()
    assert len(turns.reports) == 2 + 2 + 1


def test_a_step_that_raises_fails_its_batch_and_no_other() -> None:
    turns = Turns()
    for number in (1, 2, 3):
        turns.add(number, [number], 4)
    names, idle = digests(turns.engine, range(32)), turns.engine.reserve("idle", 32)
    turns.engine.publish(idle, names)
    turns.engine.free(idle)
    assert turns.engine.match_prefix(names) == 32
    turns.engine.fail_next = "out of memory"
    report = turns.turn()
    assert turns.engine.match_prefix(names) == 0
    assert report.failures == [
        FailedSequence(each, FailureKind.ENGINE, "EngineError: out of memory") for each in (1, 2)
    ]
    assert set(turns.engine.audit()) == {"s3"}
    turns.until_finished(3)
    assert turns.tokens[3] == alone([3], greedy(4))
    assert turns.engine.audit() == {}


def test_a_sequence_without_a_token_fails_alone_and_its_mates_get_theirs() -> None:
    turns = Turns(slots=3)
    names, idle = digests(turns.engine, range(32)), turns.engine.reserve("idle", 32)
    turns.engine.publish(idle, names)
    turns.engine.free(idle)
    for number in (1, 2, 3):
        sequence = turns.add(number, [number, 5, 6], 4)
        if number == 2:
            spoil(turns.engine, sequence.handle, 1)
    report = turns.turn()
    message = "NoToken: s2: logits are not finite"
    assert report.failures == [FailedSequence(2, FailureKind.ENGINE, message)]
    assert [output.id for output in report.outputs] == [1, 3]
    turns.until_finished(1, 3)
    for number in (1, 3):
        assert turns.tokens[number] == alone([number, 5, 6], greedy(4))
    assert turns.engine.match_prefix(names) == 32, "what others have cached stays"
    assert turns.engine.audit() == {}


def fail_alone(turns: Turns, *requests: str, first: int = 1) -> None:
    """Add a sequence of each request, one after the other; none of them gets a token."""
    for number, request in enumerate(requests, first):
        sequence = turns.add(number, [number, 5, 6], 4)
        sequence.request_id = request
        spoil(turns.engine, sequence.handle, 1)
        told = len(turns.reports)
        while not any(report.failures for report in turns.reports[told:]):
            assert turns.loop.turn()


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_without_tokens_are_no_fault_of_a_worker_that_computes_its_own_prompt(ahead: int) -> None:
    turns = Turns(steps_ahead=ahead)
    fail_alone(turns, "a", "a", "a", "b")
    assert ["self-test"] not in turns.engine.steps
    fail_alone(turns, "c", first=5)
    assert turns.engine.steps[-1] == ["self-test"]
    assert turns.engine.audit() == {}
    fail_alone(turns, "d", "e", first=6)
    assert turns.engine.steps.count(["self-test"]) == 1, "they are counted anew"
    turns.add(100, [7], 2)
    while not (outputs := [output for report in turns.reports for output in report.outputs]):
        assert turns.loop.turn()
    assert [token.token_id for token in outputs[0].tokens] == alone([7], greedy(2))[1:]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_worker_that_computes_tokens_for_nobody_ends(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, insert = Turns(steps_ahead=ahead), LoggingEngine.insert

    def spoiled(engine: LoggingEngine, sequence: EngineSequence) -> None:
        insert(engine, sequence)
        spoil(engine, sequence.handle, 1)

    monkeypatch.setattr(LoggingEngine, "insert", spoiled)

    def keep_busy() -> None:
        # With another one in each turn, the batch would never be empty.
        for number in range(1, 50):
            turns.add(number, [number, 5, 6], 4).request_id = str(number)
            turns.loop.turn()

    with pytest.raises(EngineError, match=r"different requests got no token.*not finite"):
        keep_busy()
    assert turns.engine.steps[-1] == ["self-test"]
    assert "self-test" not in turns.engine.audit()


def test_a_worker_without_a_free_page_cant_be_tested_and_goes_on() -> None:
    turns = Turns(pages=8)
    fail_alone(turns, "a", "b")
    other = turns.engine.reserve("other", 4 * 6)
    fail_alone(turns, "c", first=3)
    assert ["self-test"] not in turns.engine.steps
    turns.engine.free(other)
    turns.add(100, [7], 2)
    turns.until_finished(100)


def test_a_sequence_that_cant_be_inserted_fails_alone() -> None:
    turns = Turns()
    bad = turns.add(1, [1, 2, 3], 4)
    bad.state = replace(bad.state, prompt_ids=[1] * 500)
    turns.add(2, [2], 2)
    report = turns.turn()
    assert [(lost.id, lost.kind) for lost in report.failures] == [(1, FailureKind.ENGINE)]
    assert turns.finished == {2: FinishReason.LENGTH}
    assert turns.engine.audit() == {}


def test_a_sequence_whose_handle_was_freed_meanwhile_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns(slots=3)
    ended, running = turns.add(1, [1, 2, 3], 4), turns.add(2, [4, 5, 6], 20)
    turns.add(3, [2], 2)
    turns.engine.free(ended.handle)
    assert turns.turn().failures == []
    turns.engine.free(running.handle)
    assert turns.turn().failures == []
    assert turns.finished == {3: FinishReason.LENGTH}
    turns.loop.drop([1, 2])
    turns.turn()
    assert not caplog.records
    assert turns.engine.audit() == {}


def test_pages_that_dont_audit_clean_after_a_fault_end_the_loop_and_free_everything() -> None:
    turns = Turns()
    turns.add(1, [1], 4)
    turns.add(2, [2], 4)
    turns.add(3, [3], 4)
    turns.engine.fail_next, turns.engine.broken = "NaN", True
    with pytest.raises(EngineError, match="page audit failed"):
        turns.loop.run()
    assert turns.engine.stats().used == 0
    assert turns.watchdog.stalled_s() == 0


def test_the_loop_sleeps_without_work_and_stops_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, asleep = Turns(), threading.Semaphore(0)
    inbox = turns.loop._inbox

    def get(*, block: bool) -> object:
        if block:
            asleep.release()
        return inbox.get(block=block)

    monkeypatch.setattr(turns.loop, "_inbox", SimpleNamespace(put=inbox.put, get=get))
    thread = threading.Thread(target=turns.loop.run)
    thread.start()
    for number in (1, 2):
        assert asleep.acquire(timeout=60)
        turns.add(number, [number], 2)
        assert turns.engine.entered.acquire(timeout=60)
    assert asleep.acquire(timeout=60)
    turns.loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert not asleep.acquire(blocking=False)
    assert turns.engine.audit() == {}


def test_each_step_is_launched_before_the_one_before_it_is_emitted() -> None:
    turns = Turns(steps_ahead=1)
    turns.add(1, [3, 1, 4], 4)
    emitted = [len(turns.turn().outputs) for _ in range(4)]
    # The last turn finds the end in the third step, and has launched a fourth: it is read at once.
    assert emitted == [0, 1, 1, 1]
    assert turns.engine.steps == [["s1"]] * 4
    assert turns.tokens[1] == alone([3, 1, 4], greedy(4))
    assert turns.engine.audit() == {}


def test_tokens_and_ends_are_those_of_single_steps() -> None:
    turns = Turns(steps_ahead=1, slots=2, eos_token_ids=frozenset(range(0, 1000, 9)))  # type: ignore[arg-type]
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
    turns = Turns(steps_ahead=1, slots=1)
    turns.add(1, [1], 3)
    turns.add(2, [2], 3)
    turns.until_finished(1, 2)
    # Two steps for two tokens, and one that was launched before the end was known.
    assert turns.engine.steps == [["s1"]] * 3 + [["s2"]] * 3
    assert turns.tokens[2] == alone([2], greedy(3))


def test_a_cancelled_sequence_drops_the_token_in_flight_and_its_pages_return() -> None:
    turns = Turns(steps_ahead=1)
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
    turns = Turns(steps_ahead=1)
    turns.add(1, [1], 8)
    turns.turn()
    turns.loop._free([1])
    # Without a command in the inbox.
    assert turns.loop.turn()
    assert turns.engine.audit() == {}


def test_a_step_that_cant_be_launched_comes_after_the_one_in_flight() -> None:
    turns = Turns(steps_ahead=1)
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
    turns = Turns(steps_ahead=1, slots=2)
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
    turns = Turns(steps_ahead=1, max_model_len=8)
    sequence = turns.add(1, [1, 2, 3], 40)
    sequence.state = replace(sequence.state, params=greedy(40))
    turns.until_finished(1)
    assert len(turns.tokens[1]) == 5
    assert turns.engine.audit() == {}


def test_stopping_waits_for_what_is_in_flight() -> None:
    turns = Turns(steps_ahead=1)
    turns.add(1, [1], 8)
    turns.turn()
    turns.loop.stop()
    turns.loop.run()
    assert turns.engine.audit() == {}


def test_steps_that_the_engine_reads_are_reported_in_order() -> None:
    turns = Turns(steps_ahead=1)
    turns.engine._spec = replace(turns.engine.spec, steps_ahead=2)
    turns.add(1, [3, 1, 4], 9)
    assert [len(turns.turn().outputs) for _ in range(3)] == [0, 0, 1]
    # Its steps depend on all tokens before them, so the engine reads two steps before it launches the next one.
    penalised = turns.add(2, [1, 5], 4)
    penalised.state = replace(penalised.state, params=replace(greedy(4), presence_penalty=0.5))
    turns.until_finished(1, 2)
    assert turns.tokens == {1: alone([3, 1, 4], greedy(9)), 2: alone([1, 5], greedy(4))}
    assert turns.engine.audit() == {}
