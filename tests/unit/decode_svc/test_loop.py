"""The engine thread's bench, taken one by one on the test's own thread, without and with a step in flight."""

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


class Bench:
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
            self.run_once()
        pytest.fail(f"{numbers} have not finished, but {self.finished}")

    def run_once(self) -> StepReport:
        """One iteration, with all that it told as one report; a drop of nothing keeps it from waiting."""
        self.loop.drop([])
        told = len(self.reports)
        assert self.loop.run_once()
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
    bench = Bench()
    prompts = {1: [3, 1, 4], 2: [1, 5], 3: [9, 2, 6, 5], 4: [3, 5]}
    for number, length in ((1, 3), (2, 6), (3, 4), (4, 3)):
        bench.add(number, prompts[number], length)
    bench.until_finished(1, 2, 3, 4)
    assert bench.engine.steps == [["s1", "s2"], ["s1", "s2"], ["s2", "s3"], ["s2", "s3"], ["s2", "s3"], ["s4"], ["s4"]]
    for number, length in ((1, 3), (2, 6), (3, 4), (4, 3)):
        assert bench.tokens[number] == alone(prompts[number], greedy(length))
    assert bench.engine.audit() == {}


def test_each_turn_reports_the_changes_of_the_batch_then_its_step_and_the_load_after_it() -> None:
    bench = Bench()
    bench.add(1, [1, 2], 2)
    bench.add(2, [3], 3)
    bench.add(3, [4], 3)
    report = bench.run_once()
    assert [each.running for each in bench.reports] == [2, 1]
    assert report.joined == [1, 2]
    assert [output.id for output in report.outputs] == [1, 2]
    assert report.batch == 2
    bench.run_once()
    bench.run_once()
    assert len(bench.reports) == 2 + 2 + 1


def test_a_step_that_raises_fails_its_batch_and_no_other() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.add(number, [number], 4)
    names, idle = digests(bench.engine, range(32)), bench.engine.reserve("idle", 32)
    bench.engine.publish(idle, names)
    bench.engine.free(idle)
    assert bench.engine.match_prefix(names) == 32
    bench.engine.fail_next = "out of memory"
    report = bench.run_once()
    assert bench.engine.match_prefix(names) == 0
    assert report.failures == [
        FailedSequence(each, FailureKind.ENGINE, "EngineError: out of memory") for each in (1, 2)
    ]
    assert set(bench.engine.audit()) == {"s3"}
    bench.until_finished(3)
    assert bench.tokens[3] == alone([3], greedy(4))
    assert bench.engine.audit() == {}


def test_a_sequence_without_a_token_fails_alone_and_its_mates_get_theirs() -> None:
    bench = Bench(slots=3)
    names, idle = digests(bench.engine, range(32)), bench.engine.reserve("idle", 32)
    bench.engine.publish(idle, names)
    bench.engine.free(idle)
    for number in (1, 2, 3):
        sequence = bench.add(number, [number, 5, 6], 4)
        if number == 2:
            spoil(bench.engine, sequence.handle, 1)
    report = bench.run_once()
    message = "NoToken: s2: logits are not finite"
    assert report.failures == [FailedSequence(2, FailureKind.ENGINE, message)]
    assert [output.id for output in report.outputs] == [1, 3]
    bench.until_finished(1, 3)
    for number in (1, 3):
        assert bench.tokens[number] == alone([number, 5, 6], greedy(4))
    assert bench.engine.match_prefix(names) == 32, "what others have cached stays"
    assert bench.engine.audit() == {}


def fail_alone(bench: Bench, *requests: str, first: int = 1) -> None:
    """Add a sequence of each request, one after the other; none of them gets a token."""
    for number, request in enumerate(requests, first):
        sequence = bench.add(number, [number, 5, 6], 4)
        sequence.request_id = request
        spoil(bench.engine, sequence.handle, 1)
        told = len(bench.reports)
        while not any(report.failures for report in bench.reports[told:]):
            assert bench.loop.run_once()


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_without_tokens_are_no_fault_of_a_worker_that_computes_its_own_prompt(ahead: int) -> None:
    bench = Bench(steps_ahead=ahead)
    fail_alone(bench, "a", "a", "a", "b")
    assert ["self-test"] not in bench.engine.steps
    fail_alone(bench, "c", first=5)
    assert bench.engine.steps[-1] == ["self-test"]
    assert bench.engine.audit() == {}
    fail_alone(bench, "d", "e", first=6)
    assert bench.engine.steps.count(["self-test"]) == 1, "they are counted anew"
    bench.add(100, [7], 2)
    while not (outputs := [output for report in bench.reports for output in report.outputs]):
        assert bench.loop.run_once()
    assert [token.token_id for token in outputs[0].tokens] == alone([7], greedy(2))[1:]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_worker_that_computes_tokens_for_nobody_ends(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, insert = Bench(steps_ahead=ahead), LoggingEngine.insert

    def spoiled(engine: LoggingEngine, sequence: EngineSequence) -> None:
        insert(engine, sequence)
        spoil(engine, sequence.handle, 1)

    monkeypatch.setattr(LoggingEngine, "insert", spoiled)

    def keep_busy() -> None:
        # With another one in each iteration, the batch would never be empty.
        for number in range(1, 50):
            bench.add(number, [number, 5, 6], 4).request_id = str(number)
            bench.loop.run_once()

    with pytest.raises(EngineError, match=r"different requests got no token.*not finite"):
        keep_busy()
    assert bench.engine.steps[-1] == ["self-test"]
    assert "self-test" not in bench.engine.audit()


def test_a_worker_without_a_free_page_cant_be_tested_and_goes_on() -> None:
    bench = Bench(pages=8)
    fail_alone(bench, "a", "b")
    other = bench.engine.reserve("other", 4 * 6)
    fail_alone(bench, "c", first=3)
    assert ["self-test"] not in bench.engine.steps
    bench.engine.free(other)
    bench.add(100, [7], 2)
    bench.until_finished(100)


def test_a_sequence_that_cant_be_inserted_fails_alone() -> None:
    bench = Bench()
    bad = bench.add(1, [1, 2, 3], 4)
    bad.state = replace(bad.state, prompt_ids=[1] * 500)
    bench.add(2, [2], 2)
    report = bench.run_once()
    assert [(lost.id, lost.kind) for lost in report.failures] == [(1, FailureKind.ENGINE)]
    assert bench.finished == {2: FinishReason.LENGTH}
    assert bench.engine.audit() == {}


def test_a_sequence_whose_handle_was_freed_meanwhile_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(slots=3)
    ended, running = bench.add(1, [1, 2, 3], 4), bench.add(2, [4, 5, 6], 20)
    bench.add(3, [2], 2)
    bench.engine.free(ended.handle)
    assert bench.run_once().failures == []
    bench.engine.free(running.handle)
    assert bench.run_once().failures == []
    assert bench.finished == {3: FinishReason.LENGTH}
    bench.loop.drop([1, 2])
    bench.run_once()
    assert not caplog.records
    assert bench.engine.audit() == {}


def test_pages_that_dont_audit_clean_after_a_fault_end_the_loop_and_free_everything() -> None:
    bench = Bench()
    bench.add(1, [1], 4)
    bench.add(2, [2], 4)
    bench.add(3, [3], 4)
    bench.engine.fail_next, bench.engine.broken = "NaN", True
    with pytest.raises(EngineError, match="page audit failed"):
        bench.loop.run()
    assert bench.engine.stats().used == 0
    assert bench.watchdog.stalled_s() == 0


def test_the_loop_sleeps_without_work_and_stops_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asleep = Bench(), threading.Semaphore(0)
    inbox = bench.loop._inbox

    def get(*, block: bool) -> object:
        if block:
            asleep.release()
        return inbox.get(block=block)

    monkeypatch.setattr(bench.loop, "_inbox", SimpleNamespace(put=inbox.put, get=get))
    thread = threading.Thread(target=bench.loop.run)
    thread.start()
    for number in (1, 2):
        assert asleep.acquire(timeout=60)
        bench.add(number, [number], 2)
        assert bench.engine.entered.acquire(timeout=60)
    assert asleep.acquire(timeout=60)
    bench.loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert not asleep.acquire(blocking=False)
    assert bench.engine.audit() == {}


def test_each_step_is_launched_before_the_one_before_it_is_emitted() -> None:
    bench = Bench(steps_ahead=1)
    bench.add(1, [3, 1, 4], 4)
    emitted = [len(bench.run_once().outputs) for _ in range(4)]
    # The last iteration finds the end in the third step, and has launched a fourth: it is read at once.
    assert emitted == [0, 1, 1, 1]
    assert bench.engine.steps == [["s1"]] * 4
    assert bench.tokens[1] == alone([3, 1, 4], greedy(4))
    assert bench.engine.audit() == {}


def test_tokens_and_ends_are_those_of_single_steps() -> None:
    bench = Bench(steps_ahead=1, slots=2, eos_token_ids=frozenset(range(0, 1000, 9)))  # type: ignore[arg-type]
    single = Bench(slots=2, eos_token_ids=frozenset(range(0, 1000, 9)))  # type: ignore[arg-type]
    for number in range(1, 9):
        for each in (bench, single):
            each.add(number, [number, 5, 9], 3 + 5 * (number % 3))
    bench.until_finished(*range(1, 9))
    single.until_finished(*range(1, 9))
    assert bench.tokens == single.tokens
    assert bench.finished == single.finished
    assert set(bench.finished.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert bench.engine.audit() == {}


def test_a_freed_slot_is_filled_in_the_next_step_launched_after_its_end_is_known() -> None:
    bench = Bench(steps_ahead=1, slots=1)
    bench.add(1, [1], 3)
    bench.add(2, [2], 3)
    bench.until_finished(1, 2)
    # Two steps for two tokens, and one that was launched before the end was known.
    assert bench.engine.steps == [["s1"]] * 3 + [["s2"]] * 3
    assert bench.tokens[2] == alone([2], greedy(3))


def test_a_cancelled_sequence_drops_the_token_in_flight_and_its_pages_return() -> None:
    bench = Bench(steps_ahead=1)
    bench.add(1, [1], 8)
    bench.add(2, [2], 8)
    bench.run_once()
    bench.loop.drop([1])
    report = bench.run_once()
    assert [output.id for output in report.outputs] == [2]
    assert set(bench.engine.audit()) == {"s2"}
    bench.loop.drop([2])
    # The batch is empty: nothing stays unread, and nothing is held.
    assert bench.run_once().outputs == []
    assert bench.engine.audit() == {}


def test_the_loop_does_not_sleep_on_an_unread_step() -> None:
    bench = Bench(steps_ahead=1)
    bench.add(1, [1], 8)
    bench.run_once()
    bench.loop._free([1])
    # Without a command in the inbox.
    assert bench.loop.run_once()
    assert bench.engine.audit() == {}


def test_a_step_that_cant_be_launched_comes_after_the_one_in_flight() -> None:
    bench = Bench(steps_ahead=1)
    for number in (1, 2, 3):
        bench.add(number, [number], 2 if number == 1 else 4)
    bench.run_once()
    bench.engine.fail_next = "out of memory"
    report = bench.run_once()
    # The first one had come to its end.
    assert [output.id for output in report.outputs] == [1, 2]
    assert bench.finished == {1: FinishReason.LENGTH}
    assert report.failures == [FailedSequence(2, FailureKind.ENGINE, "EngineError: out of memory")]
    bench.until_finished(3)
    assert bench.tokens[3] == alone([3], greedy(4))
    assert bench.engine.audit() == {}


def test_a_step_that_fails_when_it_is_read_fails_its_batch_and_the_next_one() -> None:
    bench = Bench(steps_ahead=1, slots=2)
    for number in (1, 2, 3):
        bench.add(number, [number], 4)

    def failing(*plan: Any) -> Any:
        stub.next.launch(*plan)
        bench.engine.executor = stub.next

        def wait() -> Any:
            raise EngineError("not finite")

        return wait

    stub = ExecutorStub(bench.engine, failing)
    assert bench.run_once().failures == []
    report = bench.run_once()
    assert report.failures == [FailedSequence(each, FailureKind.ENGINE, "EngineError: not finite") for each in (1, 2)]
    assert report.outputs == []
    assert set(bench.engine.audit()) == {"s3"}
    bench.until_finished(3)
    assert bench.tokens[3] == alone([3], greedy(4))
    assert bench.engine.audit() == {}


def test_a_sequence_that_is_as_long_as_the_model_allows_ends_there() -> None:
    bench = Bench(steps_ahead=1, max_model_len=8)
    sequence = bench.add(1, [1, 2, 3], 40)
    sequence.state = replace(sequence.state, params=greedy(40))
    bench.until_finished(1)
    assert len(bench.tokens[1]) == 5
    assert bench.engine.audit() == {}


def test_stopping_waits_for_what_is_in_flight() -> None:
    bench = Bench(steps_ahead=1)
    bench.add(1, [1], 8)
    bench.run_once()
    bench.loop.stop()
    bench.loop.run()
    assert bench.engine.audit() == {}


def test_steps_that_the_engine_reads_are_reported_in_order() -> None:
    bench = Bench(steps_ahead=1)
    bench.engine._spec = replace(bench.engine.spec, steps_ahead=2)
    bench.add(1, [3, 1, 4], 9)
    assert [len(bench.run_once().outputs) for _ in range(3)] == [0, 0, 1]
    # Its steps depend on all tokens before them, so the engine reads two steps before it launches the next one.
    penalised = bench.add(2, [1, 5], 4)
    penalised.state = replace(penalised.state, params=replace(greedy(4), presence_penalty=0.5))
    bench.until_finished(1, 2)
    assert bench.tokens == {1: alone([3, 1, 4], greedy(9)), 2: alone([1, 5], greedy(4))}
    assert bench.engine.audit() == {}
