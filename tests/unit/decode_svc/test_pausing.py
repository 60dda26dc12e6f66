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
from baton.worker.progress import Progress
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.messages import FailureKind
from decode_svc.sequence import RollingBlockHasher, Sequence
from tests.decoding import LoggingEngine, alone, digests, prefill

PAGE = 4
TOKEN_BYTES = LoggingEngine().spec.kv_format.token_bytes


class Bench:
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
    bench = Bench(pages=30)
    sequence = bench.add(1, [1, 2, 3], 40)
    sizes = set()
    while bench.live:
        sizes.add((len(sequence.output_ids), bench.engine.audit()["s1"]))
        bench.turn()
    assert all(pages == max(2, -(-(3 + outputs - 1) // PAGE)) for outputs, pages in sizes)
    assert bench.paused() == []
    bench.check()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_youngest_makes_room_and_comes_back_without_recomputation(steps_ahead: int) -> None:
    bench = Bench(pages=20, steps_ahead=steps_ahead)
    for number in (1, 2, 3):
        bench.add(number, [number, 7, 9], 60)
    bench.turn_until_over()
    order = bench.paused()
    assert order[:2] == [3, 2]
    assert 1 not in order
    assert bench.states.count((2, State.DECODING)) == 1 + order.count(2)
    bench.check()


def test_pages_that_are_held_for_no_request_are_taken_before_anybody_is_paused() -> None:
    bench = Bench(pages=20)
    bench.spare = bench.engine.reserve("copy", 8 * PAGE)
    bench.add(1, [1, 7, 9], 60)
    bench.turn_until_over()
    assert bench.spare is None
    assert bench.paused() == []
    bench.check()


def test_a_preempted_sequence_leaves_what_it_has_for_its_replay() -> None:
    bench = Bench(pages=20, host_tokens=0)
    for number in (1, 2):
        sequence = bench.add(number, [number, 7, 9], 60)
        hasher = RollingBlockHasher(bench.engine.spec, b"", [], sequence.state.prompt_ids)
        sequence.hasher = hasher.fork(sequence.output_ids[0])
    while not bench.failed:
        bench.turn()
    assert bench.failed == {2: FailureKind.PREEMPTED}
    # At once, before the other one wants the pages.
    assert bench.engine.match_prefix(digests(bench.engine, [2, 7, 9, *bench.tokens[2]])) == 32
    bench.turn_until_over()
    bench.check()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_full_host_pool_gives_the_youngest_back_with_all_it_holds(steps_ahead: int) -> None:
    bench = Bench(pages=20, host_tokens=10, steps_ahead=steps_ahead)
    for number in (1, 2):
        bench.add(number, [number, 7, 9], 60)
    while not bench.failed:
        bench.turn()
    assert bench.failed == {2: FailureKind.PREEMPTED}
    (lost,) = [lost for report in bench.reports for lost in report.failures]
    assert "no page is left, and host memory is full: s2: needs" in lost.message
    assert set(bench.engine.audit()) == {"s1"}
    bench.turn_until_over()
    assert bench.paused() == []
    bench.check()


def test_what_was_given_back_is_not_replaced_before_the_rest_has_room() -> None:
    bench = Bench(pages=20, host_tokens=0)
    for number in (1, 2, 3):
        bench.add(number, [number, 7, 9], 60)
    while 3 not in bench.failed:
        assert not bench.loop.short_of_pages
        bench.turn()
    while 2 not in bench.failed:
        assert bench.loop.short_of_pages
        bench.turn()
    bench.turn()
    assert not bench.loop.short_of_pages
    bench.turn_until_over()
    bench.check()


def test_a_cancel_while_paused_gives_host_memory_back_before_the_next_step() -> None:
    bench = Bench(pages=20)
    for number in (1, 2):
        bench.add(number, [number, 7, 9], 60)
    while not bench.paused():
        bench.turn()
    assert set(bench.engine.host_kv()) == {"s2"}
    bench.engine.gate.clear()
    turning = threading.Thread(target=bench.turn, daemon=True)
    turning.start()
    # In the midst of a step.
    bench.engine.free(bench.live[2].handle)
    assert bench.engine.host_kv() == {}
    bench.engine.gate.set()
    turning.join(60)
    bench.loop.drop([2])
    del bench.live[2], bench.tokens[2]
    steps = len(bench.engine.steps)
    bench.turn_until_over()
    assert all(batch == ["s1"] for batch in bench.engine.steps[steps:])
    assert bench.engine.audit() == {}


def test_what_is_paused_sleeps_until_pages_return_from_elsewhere() -> None:
    bench = Bench(pages=20)
    taken = bench.engine.reserve("on its way", 14 * PAGE)
    bench.add(1, [1, 7, 9], 60)
    thread = threading.Thread(target=bench.loop.run, daemon=True)
    waiting = threading.Event()
    idle = bench.progress.set_idle

    def noticed() -> None:
        idle()
        if bench.loop.paused:
            waiting.set()

    bench.progress.set_idle = noticed  # type: ignore[method-assign]
    thread.start()
    assert waiting.wait(60)
    turns = len(bench.reports)
    assert bench.progress.stalled_s() == 0
    # Pages with a copy in flight return after the free, and nobody else says a word.
    with bench.engine._kv.pool.pin(taken):  # type: ignore[arg-type]
        bench.engine.free(taken)
        assert bench.engine.stats().free == 6
        assert len(bench.reports) == turns
    assert bench.over.wait(60)
    bench.loop.stop()
    thread.join(60)
    bench.check()
    assert bench.paused() == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 1, 2]))
def test_any_mix_of_requests_that_each_fit_alone_ends_exactly_and_nothing_is_computed_twice(
    seed: int, steps_ahead: int
) -> None:
    dice = random.Random(seed)
    pages = dice.randint(6, 40)
    bench = Bench(pages, slots=dice.randint(1, 4), first=dice.choice([1, 5, 20]), steps_ahead=steps_ahead)
    coming, idle = [], 0
    for number in range(dice.randint(2, 9)):
        context = dice.randint(1, pages * PAGE - 2)
        tokens = dice.randint(2, pages * PAGE - context)
        coming.append((number, [dice.randrange(1000) for _ in range(context)], tokens, dice.choice([None, 3])))
    while coming or bench.live:
        number, prompt, tokens, sampled = coming[0] if coming else (0, [], 0, None)
        need = -(-(len(prompt) + min(tokens, bench.first)) // PAGE)
        # As the service does: not while the batch lacks pages, and only with pages.
        if coming and not bench.loop.short_of_pages and need <= bench.engine.stats().free and dice.random() < 0.5:
            bench.add(number, prompt, tokens, sampled)
            coming.pop(0)
        elif bench.live:
            before = {each: len(tokens) for each, tokens in bench.tokens.items()}
            bench.turn()
            idle = 0 if any(len(bench.tokens[each]) > count for each, count in before.items()) else idle + 1
            assert idle < 2 + steps_ahead
    assert not bench.failed
    bench.check()
