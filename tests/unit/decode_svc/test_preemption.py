"""Generation that outgrows the pool: the preempted sequence, the time of its replay, and the tokens of all."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.contract import KvHandle
from baton.kv.hashing import RollingBlockHasher, chain_root
from baton.request import SamplingParams, SequenceState
from baton.worker.health import Watchdog
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.messages import FailureKind
from decode_svc.scheduler import BatchPages, DecodeSequence
from tests.decoding import LoggingEngine, alone, digests, prefill

PAGE = 4


@dataclass
class Request:
    """A request as its router sees it; `attempts` have been made."""

    number: int
    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    attempts: int = 0


class Bench:
    """A loop over a fake engine with pages of 4 tokens, and a router that replays; attempts reserve `first` outputs."""

    def __init__(self, pages: int, slots: int = 4, first: int = 4, steps_ahead: int = 0) -> None:
        self.engine = LoggingEngine(
            page_size=PAGE, pages=pages, slots=slots, max_model_len=400, steps_ahead=steps_ahead
        )
        self.reports: list[StepReport] = []
        self.spare: KvHandle | None = None
        self.batch_pages = BatchPages()
        self.loop = DecodeLoop(self.engine, Watchdog(), self.take, reclaim=self.give_back, batch_pages=self.batch_pages)
        self.first = first
        self.asked: dict[int, Request] = {}
        self.live: dict[int, tuple[Request, DecodeSequence]] = {}
        self.preempted: list[int] = []
        self.to_replay: list[Request] = []

    def take(self, report: StepReport) -> None:
        self.reports.append(report)
        for output in report.outputs:
            request, _ = self.live[output.id]
            assert output.output_index == len(request.tokens)
            request.tokens += [token.token_id for token in output.tokens]
            if output.finish is not None:
                del self.live[output.id]
        for lost in report.failures:
            assert lost.kind is FailureKind.PREEMPTED
            request, sequence = self.live.pop(lost.id)
            assert not sequence.handle.alive
            others = [other.sort_key for _, other in self.live.values()]
            assert not others or sequence.sort_key > max(others), "only the youngest makes room"
            self.preempted.append(request.number)
            self.to_replay.append(request)

    def give_back(self) -> bool:
        """Free the pages that are held for no request."""
        spare, self.spare = self.spare, None
        if spare is not None:
            self.engine.free(spare)
        return spare is not None

    def pages(self, request: Request) -> int:
        """Pages of its next attempt."""
        left = (request.params.max_tokens or 0) - len(request.tokens)
        return -(-(len(request.prompt) + len(request.tokens) + min(left, self.first)) // PAGE)

    def ask(self, number: int, prompt: list[int], max_tokens: int, seed: int | None = None) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
        request = self.asked[number] = Request(number, prompt, params, alone(prompt, params))
        return request

    def start(self, request: Request) -> DecodeSequence | None:
        """A new attempt, whose KV is there at once; None if prefill samples the last token."""
        ready = prefill(request.prompt, request.params, outputs=request.tokens, page_size=PAGE)
        pages, attempt = self.pages(request), request.attempts
        (first,) = ready.handoff.first_tokens
        request.attempts += 1
        request.tokens.append(first.token.token_id)
        if first.finish is not None:
            return None
        handle = self.engine.reserve(f"s{request.number}", pages * PAGE)
        ready.write(self.engine, handle)
        state = SequenceState(request.params, request.prompt, tuple(request.tokens))
        identity = len(self.live) + 1000 * sum(each.attempts for each in self.asked.values())
        order_key = (-attempt, identity)
        sequence = DecodeSequence(identity, handle, state, order_key=order_key)
        self.live[identity] = request, sequence
        self.loop.add([sequence])
        return sequence

    def add(self, number: int, prompt: list[int], max_tokens: int) -> DecodeSequence:
        sequence = self.start(self.ask(number, prompt, max_tokens))
        assert sequence is not None
        return sequence

    def run_once(self) -> None:
        self.loop.drop([])
        assert self.loop.run_once()

    def replay(self) -> None:
        """Make the attempts that the worker would grant now."""
        while self.to_replay and self.fits(self.to_replay[0]):
            self.start(self.to_replay.pop(0))

    def fits(self, request: Request) -> bool:
        """Whether its pages are free beside those that are kept for the batch."""
        stats = self.engine.stats()
        return self.pages(request) <= stats.free + stats.cached - self.batch_pages.kept_pages

    def finish(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.live and not self.to_replay:
                break
            self.run_once()
            self.replay()
        for request in self.asked.values():
            assert request.tokens == request.expected
        assert self.engine.audit() == {}


def test_a_sequence_takes_pages_as_it_needs_them() -> None:
    bench = Bench(pages=30)
    sequence = bench.add(1, [1, 2, 3], 40)
    sizes = set()
    while bench.live:
        sizes.add((len(sequence.output_ids), bench.engine.audit()["s1"]))
        bench.run_once()
    assert all(pages == max(2, -(-(3 + outputs - 1) // PAGE)) for outputs, pages in sizes)
    assert bench.preempted == []
    bench.finish()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_youngest_makes_room_and_is_replayed_when_the_batch_and_it_have_room(steps_ahead: int) -> None:
    bench = Bench(pages=20, steps_ahead=steps_ahead)
    for number in (1, 2, 3):
        bench.add(number, [number, 7, 9], 60)
    bench.finish()
    # Both come back once the first one has ended, and not sooner. Then the one that was replayed first is the older.
    assert bench.preempted == [3, 2, 2]
    assert [request.attempts for request in bench.asked.values()] == [1, 3, 2]


def test_pages_that_are_held_for_no_request_are_taken_before_anybody_is_preempted() -> None:
    bench = Bench(pages=20)
    bench.spare = bench.engine.reserve("copy", 8 * PAGE)
    bench.add(1, [1, 7, 9], 60)
    bench.finish()
    assert bench.spare is None
    assert bench.preempted == []


def test_a_preempted_sequence_leaves_what_it_has_for_its_replay() -> None:
    bench = Bench(pages=20)
    for number in (1, 2):
        sequence = bench.add(number, [number, 7, 9], 60)
        root = chain_root(bench.engine.spec.fingerprint, bench.engine.spec.kv_format.digest)
        hasher = RollingBlockHasher(root, bench.engine.spec.kv_format.block_size, [], sequence.state.prompt_ids)
        sequence.hasher = hasher.fork(sequence.output_ids[0])
    while not bench.preempted:
        bench.run_once()
    assert bench.preempted == [2]
    (lost,) = [lost for report in bench.reports for lost in report.failures]
    assert lost.message == "s2 is preempted and frees 10 of 20 pages: the batch needs pages and none is free"
    # At once, before the other one wants the pages.
    assert bench.engine.match_prefix(digests(bench.engine, [2, 7, 9, *bench.asked[2].tokens])) == 32
    assert set(bench.engine.audit()) == {"s1"}
    bench.finish()


def test_one_that_is_alone_is_replayed_when_others_hold_the_pages_and_gets_all_that_it_needs() -> None:
    bench = Bench(pages=20)
    taken = bench.engine.reserve("on its way", 14 * PAGE)
    bench.add(1, [1, 7, 9], 60)
    (_, sequence), *_ = bench.live.values()
    with bench.engine._kv.pool.pin(sequence.handle):  # type: ignore[arg-type]
        while not bench.preempted:
            bench.run_once()
        # Nobody else is there for whom pages would be kept, though its own are still being read.
        assert bench.engine.stats().free == 0
        assert bench.batch_pages.kept_pages == 0
    assert set(bench.engine.audit()) == {"on its way"}
    bench.replay()
    assert bench.to_replay, "it needs a page more than are free"
    bench.engine.free(taken)
    bench.replay()
    bench.finish()
    assert bench.preempted == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 1, 2]))
def test_any_mix_of_requests_that_each_fit_alone_ends_and_every_try_brings_tokens(seed: int, steps_ahead: int) -> None:
    dice = random.Random(seed)
    pages = dice.randint(6, 40)
    bench = Bench(pages, slots=dice.randint(1, 4), first=dice.choice([1, 5, 20]), steps_ahead=steps_ahead)
    coming, idle = [], 0
    for number in range(dice.randint(2, 9)):
        context = dice.randint(1, pages * PAGE - 2)
        tokens = dice.randint(2, pages * PAGE - context)
        prompt = [dice.randrange(1000) for _ in range(context)]
        coming.append(bench.ask(number, prompt, tokens, dice.choice([None, 3])))
    while coming or bench.live or bench.to_replay:
        count = sum(len(request.tokens) for request in bench.asked.values())
        bench.replay()
        granted = not bench.to_replay and dice.random() < 0.5
        if coming and granted and bench.fits(coming[0]):
            bench.start(coming.pop(0))
        if bench.live:
            bench.run_once()
        moved = sum(len(request.tokens) for request in bench.asked.values()) > count
        idle = 0 if moved or not bench.live else idle + 1
        assert idle < 2 + steps_ahead
    bench.finish()
    for request in bench.asked.values():
        assert request.attempts <= len(request.tokens)
