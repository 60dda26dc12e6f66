"""Slots: who gets one, when it comes back, and what a step's tokens mean; names of a sequence's blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.engine.contract import EngineSpec
from baton.kv.format import KvFormat, KvPart
from baton.request import FinishReason, SamplingParams, SequenceState, TokenInfo
from decode_svc.scheduler import DecodeScheduler, DecodeSequence, StepOutput

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)),), layers=3, block_size=16)
SPEC = EngineSpec("print", FORMAT, 100, 64, frozenset({1}), 16, 8, slots=2)


@dataclass(eq=False)
class Handle:
    owner: str = "r/0"
    capacity: int = 64
    alive: bool = True


def sequence(
    number: int, *, max_tokens: int = 4, ready_at: float = 0.0, first: int = 50, age: int = 0, capacity: int = 64
) -> DecodeSequence:
    state = SequenceState(SamplingParams(max_tokens=max_tokens), (10, 11, 12), (first,))
    return DecodeSequence(number, Handle(capacity=capacity), state, fetch_ms=7.0, ready_at=ready_at, order_key=(0, age))


def ids(sequences: list[DecodeSequence]) -> list[int]:
    return [each.id for each in sequences]


def record(scheduler: DecodeScheduler, one: DecodeSequence, *tokens: int, now: float = 0.0) -> StepOutput | None:
    """A step with these tokens is read: the engine has appended them, and the scheduler takes them over."""
    one.output_ids += tokens
    return scheduler.record_tokens(one, [TokenInfo(token) for token in tokens], now)


def admitted(*sequences: DecodeSequence, spec: EngineSpec = SPEC, now: float = 0.0) -> DecodeScheduler:
    """A scheduler that has given slots to these, as far as there are any."""
    scheduler = DecodeScheduler(spec)
    scheduler.add(sequences)
    scheduler.admit(now)
    return scheduler


def test_slots_go_to_those_that_were_ready_first() -> None:
    scheduler = DecodeScheduler(SPEC)
    scheduler.add([sequence(5), sequence(2)])
    scheduler.add([sequence(9)])
    assert ids(scheduler.admit(0.0)) == [5, 2]
    assert scheduler.admit(0.0) == []
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_a_slot_is_free_for_the_next_as_soon_as_a_sequence_ends() -> None:
    last = sequence(1, max_tokens=2)
    scheduler = admitted(last, sequence(2), sequence(3))
    output = record(scheduler, last, 60)
    assert output is not None
    assert (output.output_index, output.finish) == (1, FinishReason.LENGTH)
    assert ids(scheduler.admit(0.0)) == [3]


def test_tokens_after_the_one_that_ends_a_sequence_are_left_out() -> None:
    one = sequence(1, max_tokens=9)
    scheduler = admitted(one)
    output = record(scheduler, one, 60, 1, 61)
    assert output is not None
    assert [token.token_id for token in output.tokens] == [60, 1]
    assert output.finish is FinishReason.STOP
    assert scheduler.running == 0


def test_steps_that_were_read_together_are_taken_over_one_after_the_other() -> None:
    one = sequence(1, max_tokens=4)
    scheduler = admitted(one)
    one.output_ids += [60, 61, 62, 63]
    outputs = [scheduler.record_tokens(one, [TokenInfo(token)], 0.0) for token in (60, 61, 62, 63)]
    assert outputs[3] is None, "it had ended"
    found = [(output.output_index, output.finish) for output in outputs if output is not None]
    assert found == [(1, None), (2, None), (3, FinishReason.LENGTH)]


def test_a_sequence_ends_at_the_models_length_whatever_it_may_generate() -> None:
    one = sequence(1, max_tokens=50)
    scheduler = admitted(one, spec=replace(SPEC, max_model_len=6))
    first = record(scheduler, one, 60)
    second = record(scheduler, one, 61)
    assert first is not None
    assert second is not None
    assert (first.finish, second.finish) == (None, FinishReason.LENGTH)


def test_timings_come_once_and_are_durations() -> None:
    one = sequence(1, ready_at=100.0)
    scheduler = admitted(one, now=100.25)
    first = record(scheduler, one, 60, now=100.75)
    second = record(scheduler, one, 61, now=101.0)
    assert first is not None
    assert second is not None
    assert first.timings is not None
    assert (first.timings.fetch_ms, first.timings.slot_wait_ms) == (7, 250)
    assert second.timings is None
    assert second.output_index == 2


def test_dropping_takes_a_sequence_out_wherever_it_is_and_only_once() -> None:
    running = sequence(1)
    scheduler = admitted(running, sequence(2), sequence(3))
    assert ids(scheduler.drop([3, 1, 77])) == [3, 1]
    assert scheduler.drop([3, 1]) == []
    assert (scheduler.running, scheduler.waiting) == (1, 0)
    assert record(scheduler, running, 60) is None


def test_no_tokens_are_nothing_to_tell() -> None:
    one = sequence(1)
    scheduler = admitted(one)
    assert record(scheduler, one) is None
    assert scheduler.running == 1


LONG = replace(SPEC, max_model_len=1000, slots=3)


def test_sequences_without_room_for_the_next_token_are_listed_oldest_first() -> None:
    full = {number: sequence(number, age=age, capacity=3) for number, age in ((1, 7), (2, 5), (3, 5))}
    scheduler = admitted(*full.values(), spec=LONG)
    assert ids(scheduler.sequences_to_extend()) == [2, 3, 1]
    full[2].handle.capacity = 4  # type: ignore[misc]
    assert ids(scheduler.sequences_to_extend()) == [3, 1]


def test_the_youngest_by_reservation_is_named_wherever_it_is() -> None:
    scheduler = admitted(sequence(1, age=7), sequence(2, age=5), sequence(3, age=6), spec=replace(LONG, slots=2))
    found = []
    while not scheduler.idle:
        youngest = scheduler.youngest()
        found += ids(scheduler.drop([youngest.id]))
    assert found == [1, 3, 2]
    assert scheduler.sequences == []


def test_missing_pages_are_what_the_batch_needs_to_go_on_for_a_while_or_to_its_end() -> None:
    # Pages of 16 tokens. A sequence has 4 tokens and goes on for 64: 68 tokens are 5 pages.
    first, second = sequence(1, max_tokens=500, capacity=16), sequence(2, max_tokens=500, capacity=16 * 9)
    third, fourth = sequence(3, max_tokens=20, capacity=16), sequence(4, max_tokens=500, capacity=0)
    scheduler = admitted(first, second, third, fourth, spec=LONG)
    # 4 for the first, none for the second, 1 to the end of the third; the fourth waits.
    assert scheduler.missing_pages() == 5
    short = admitted(sequence(1, max_tokens=500, capacity=16), spec=replace(LONG, max_model_len=30))
    assert short.missing_pages() == 1
