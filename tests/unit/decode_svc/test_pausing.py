"""Generation that outgrows the pool: sequences pause, come back, and all end with the right tokens."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.contract import KvHandle
from baton.lifecycle import State
from baton.request import SamplingParams, SequenceState
from baton.worker.health import Progress
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.messages import FailureKind
from decode_svc.sequence import RollingBlockHasher, Sequence
from tests.decoding import LoggingEngine, alone, digests, prefill

PAGE = 4
TOKEN_BYTES = LoggingEngine().spec.kv_format.token_bytes


class Rig:
    """A loop over a fake engine with pages of 4 tokens; sequences reserve `first` outputs."""

    def __init__(
        self, pages: int, slots: int = 4, host_tokens: int = 1000, first: int = 4, steps_ahead: int = 0
    ) -> None:
        self.engine = LoggingEngine(
            page_size=PAGE,
            pages=pages,
            slots=slots,
            max_model_len=400,
            host_kv_memory=host_tokens * TOKEN_BYTES,
            steps_ahead=steps_ahead,
        )
        self.reports: list[StepReport] = []
        self.progress = Progress()
        self.spare: KvHandle | None = None
        self.loop = DecodeLoop(self.engine, self.progress, self.take, reclaim=self.give_back)
        self.engine.watch_pages(self.loop.wake)
        self.first = first
        self.tokens: dict[int, list[int]] = {}
        self.expected: dict[int, list[int]] = {}
        self.live: dict[int, Sequence] = {}
        self.failed: dict[int, FailureKind] = {}
        self.states: list[tuple[int, State]] = []
        self.over = threading.Event()

    def take(self, report: StepReport) -> None:
        self.reports.append(report)
        self.states += report.states
        for output in report.outputs:
            assert output.output_index == len(self.tokens[output.id])
            self.tokens[output.id] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                del self.live[output.id]
        for lost in report.failures:
            self.failed[lost.id] = lost.kind
            del self.live[lost.id]
        if not self.live:
            self.over.set()

    def give_back(self) -> bool:
        """Free the pages that are held for no request."""
        spare, self.spare = self.spare, None
        if spare is not None:
            self.engine.free(spare)
        return spare is not None

    def make(self, number: int, prompt: list[int], max_tokens: int, seed: int | None = None) -> Sequence:
        """A sequence whose KV is there, in pages for its first outputs."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
        ready = prefill(prompt, params, page_size=PAGE)
        handle = self.engine.reserve(f"s{number}", len(prompt) + min(max_tokens, self.first))
        ready.write(self.engine, handle)
        first = ready.handoff.first_tokens[0].token.token_id
        self.tokens[number], self.expected[number] = [first], alone(prompt, params)
        state = SequenceState(params, prompt, (first,))
        self.live[number] = Sequence(number, handle, state, [first], 0.0, 0.0, age=(0, number))
        return self.live[number]

    def add(self, number: int, prompt: list[int], max_tokens: int, seed: int | None = None) -> Sequence:
        sequence = self.make(number, prompt, max_tokens, seed)
        self.loop.add([sequence])
        return sequence

    def turn(self) -> None:
        self.loop.drop([])
        assert self.loop.turn()

    def turn_until_over(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.live:
                return
            self.turn()
        pytest.fail(f"{sorted(self.live)} have not ended after {most} turns")

    def paused(self) -> list[int]:
        return [number for number, state in self.states if state is State.PAUSED]

    def check(self) -> None:
        """All tokens are right, and each but the first was computed once; with a step ahead, one more at each end."""
        for number, tokens in self.tokens.items():
            assert number in self.failed or tokens == self.expected[number]
        stepped = sum(map(len, self.engine.steps))
        wasted = stepped - sum(len(tokens) - 1 for tokens in self.tokens.values())
        assert 0 <= wasted <= self.engine.spec.steps_ahead * len(self.tokens)
        assert self.engine.audit() == {}
        assert self.engine.host_kv() == {}


def test_a_sequence_takes_pages_as_it_needs_them() -> None:
    rig = Rig(pages=30)
    sequence = rig.add(1, [1, 2, 3], 40)
    sizes = set()
    while rig.live:
        sizes.add((len(sequence.output_ids), rig.engine.audit()["s1"]))
        rig.turn()
    assert all(pages == max(2, -(-(3 + outputs - 1) // PAGE)) for outputs, pages in sizes)
    assert rig.paused() == []
    rig.check()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_youngest_makes_room_and_comes_back_without_recomputation(steps_ahead: int) -> None:
    rig = Rig(pages=20, steps_ahead=steps_ahead)
    for number in (1, 2, 3):
        rig.add(number, [number, 7, 9], 60)
    rig.turn_until_over()
    order = rig.paused()
    assert order[:2] == [3, 2]
    assert 1 not in order
    assert rig.states.count((2, State.DECODING)) == 1 + order.count(2)
    rig.check()


def test_pages_that_are_held_for_no_request_are_taken_before_anybody_is_paused() -> None:
    rig = Rig(pages=20)
    rig.spare = rig.engine.reserve("copy", 8 * PAGE)
    rig.add(1, [1, 7, 9], 60)
    rig.turn_until_over()
    assert rig.spare is None
    assert rig.paused() == []
    rig.check()


def test_a_preempted_sequence_leaves_what_it_has_for_its_replay() -> None:
    rig = Rig(pages=20, host_tokens=0)
    for number in (1, 2):
        sequence = rig.add(number, [number, 7, 9], 60)
        hasher = RollingBlockHasher(rig.engine.spec, b"", [], sequence.state.prompt_ids)
        sequence.hasher = hasher.fork(sequence.output_ids[0])
    while not rig.failed:
        rig.turn()
    assert rig.failed == {2: FailureKind.PREEMPTED}
    # At once, before the other one wants the pages.
    assert rig.engine.match_prefix(digests(rig.engine, [2, 7, 9, *rig.tokens[2]])) == 32
    rig.turn_until_over()
    rig.check()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_full_host_pool_gives_the_youngest_back_with_all_it_holds(steps_ahead: int) -> None:
    rig = Rig(pages=20, host_tokens=10, steps_ahead=steps_ahead)
    for number in (1, 2):
        rig.add(number, [number, 7, 9], 60)
    while not rig.failed:
        rig.turn()
    assert rig.failed == {2: FailureKind.PREEMPTED}
    (lost,) = [lost for report in rig.reports for lost in report.failures]
    assert "no page is left, and host memory is full: s2: needs" in lost.message
    assert set(rig.engine.audit()) == {"s1"}
    rig.turn_until_over()
    assert rig.paused() == []
    rig.check()


def test_what_was_given_back_is_not_replaced_before_the_rest_has_room() -> None:
    rig = Rig(pages=20, host_tokens=0)
    for number in (1, 2, 3):
        rig.add(number, [number, 7, 9], 60)
    while 3 not in rig.failed:
        assert not rig.loop.short_of_pages
        rig.turn()
    while 2 not in rig.failed:
        assert rig.loop.short_of_pages
        rig.turn()
    rig.turn()
    assert not rig.loop.short_of_pages
    rig.turn_until_over()
    rig.check()


def test_a_cancel_while_paused_gives_host_memory_back_before_the_next_step() -> None:
    rig = Rig(pages=20)
    for number in (1, 2):
        rig.add(number, [number, 7, 9], 60)
    while not rig.paused():
        rig.turn()
    assert set(rig.engine.host_kv()) == {"s2"}
    rig.engine.gate.clear()
    turning = threading.Thread(target=rig.turn, daemon=True)
    turning.start()
    # In the midst of a step.
    rig.engine.free(rig.live[2].handle)
    assert rig.engine.host_kv() == {}
    rig.engine.gate.set()
    turning.join(60)
    rig.loop.drop([2])
    del rig.live[2], rig.tokens[2]
    steps = len(rig.engine.steps)
    rig.turn_until_over()
    assert all(batch == ["s1"] for batch in rig.engine.steps[steps:])
    assert rig.engine.audit() == {}


def test_what_is_paused_sleeps_until_pages_return_from_elsewhere() -> None:
    rig = Rig(pages=20)
    taken = rig.engine.reserve("on its way", 14 * PAGE)
    rig.add(1, [1, 7, 9], 60)
    thread = threading.Thread(target=rig.loop.run, daemon=True)
    waiting = threading.Event()
    idle = rig.progress.set_idle

    def noticed() -> None:
        idle()
        if rig.loop.paused:
            waiting.set()

    rig.progress.set_idle = noticed  # type: ignore[method-assign]
    thread.start()
    assert waiting.wait(60)
    turns = len(rig.reports)
    assert rig.progress.stalled_s() == 0
    # Pages with a copy in flight return after the free, and nobody else says a word.
    with rig.engine._kv.pool.pin(taken):  # type: ignore[arg-type]
        rig.engine.free(taken)
        assert rig.engine.stats().free == 6
        assert len(rig.reports) == turns
    assert rig.over.wait(60)
    rig.loop.stop()
    thread.join(60)
    rig.check()
    assert rig.paused() == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 1, 2]))
def test_any_mix_of_requests_that_each_fit_alone_ends_exactly_and_nothing_is_computed_twice(
    seed: int, steps_ahead: int
) -> None:
    dice = random.Random(seed)
    pages = dice.randint(6, 40)
    rig = Rig(pages, slots=dice.randint(1, 4), first=dice.choice([1, 5, 20]), steps_ahead=steps_ahead)
    coming, idle = [], 0
    for number in range(dice.randint(2, 9)):
        context = dice.randint(1, pages * PAGE - 2)
        tokens = dice.randint(2, pages * PAGE - context)
        coming.append((number, [dice.randrange(1000) for _ in range(context)], tokens, dice.choice([None, 3])))
    while coming or rig.live:
        number, prompt, tokens, sampled = coming[0] if coming else (0, [], 0, None)
        need = -(-(len(prompt) + min(tokens, rig.first)) // PAGE)
        # As the service does: not while the batch lacks pages, and only with pages.
        if coming and not rig.loop.short_of_pages and need <= rig.engine.stats().free and dice.random() < 0.5:
            rig.add(number, prompt, tokens, sampled)
            coming.pop(0)
        elif rig.live:
            before = {each: len(tokens) for each, tokens in rig.tokens.items()}
            rig.turn()
            idle = 0 if any(len(rig.tokens[each]) > count for each, count in before.items()) else idle + 1
            assert idle < 2 + steps_ahead
    assert not rig.failed
    rig.check()
