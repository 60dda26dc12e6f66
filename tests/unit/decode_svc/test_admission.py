"""Slots and pages in turn: reservations and forks of many choices wait for few slots and a small pool.

Pages set aside for large reservations and the number of sequences that are admitted are computed by hand.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import abc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import EngineError, InvalidRequest, Overloaded
from baton.request import ReserveResult, SamplingParams
from baton.worker.health import Watchdog
from decode_svc.admission import (
    FORK_HEADROOM_DIVISOR,
    FORKS,
    SPAN_S,
    Admission,
    PageLine,
    Progress,
    SlotForecast,
)
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.messages import AttemptKey, FailureKind, Reserve
from decode_svc.reservation import ReservationTooLarge
from decode_svc.scheduler import BatchPages
from tests.decoding import LoggingEngine, alone, digests, prefill

PAGE = 4


@dataclass
class Asked:
    """An attempt as its router sees it: at all choices or at `only` one, which has `outputs` already."""

    prompt: list[int]
    params: SamplingParams
    number: int = 0
    only: int | None = None
    outputs: list[int] = field(default_factory=list)
    attempt: DecodeAttempt | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    failed: FailureKind | None = None

    @property
    def over(self) -> bool:
        return self.failed is not None or (bool(self.tokens) and len(self.finished) == len(self.choices))

    @property
    def choices(self) -> abc.Sequence[int]:
        return range(self.params.n) if self.only is None else [self.only]

    def reserve(self, name: str) -> Reserve:
        left = (self.params.max_tokens or 0) - len(self.outputs)
        return Reserve(AttemptKey(name, self.number), len(self.prompt) + len(self.outputs), left, len(self.choices))

    def replays(self) -> list[Asked]:
        """The attempts that follow it, when it was preempted."""
        going = [choice for choice in self.choices if choice not in self.finished]
        return [Asked(self.prompt, self.params, self.number + 1, choice, self.tokens[choice]) for choice in going]


class Worker:
    """A decode worker without transfers, in turns: what the service does with its parts."""

    def __init__(self, slots: int, pages: int = 500, reserve_tokens: int = 4) -> None:
        self.engine = LoggingEngine(page_size=PAGE, pages=pages, slots=slots, max_model_len=400)
        self.reports: list[StepReport] = []
        self.batch_pages = BatchPages()
        self.loop = DecodeLoop(self.engine, Watchdog(), self.reports.append, batch_pages=self.batch_pages)
        self.attempts = Attempts(self.engine)
        self.admission = Admission(self.engine, self.attempts, reserve_tokens, self.batch_pages, lambda: False)
        self.asked: dict[str, Asked] = {}
        self.now = 0.0

    def ask(self, name: str, prompt: list[int], max_tokens: int, n: int = 1, session: int = 1) -> bool:
        return self.reserve(name, Asked(prompt, SamplingParams(max_tokens=max_tokens, seed=7, n=n)), session)

    def reserve(self, name: str, asked: Asked, session: int = 1) -> bool:
        """Ask for pages; False when it has to wait. Its KV comes as soon as it is granted."""
        self.asked[name] = asked
        self.admission.register(session, asked.reserve(name), self.now)
        self.advance()
        return asked.attempt is not None

    def cancel(self, name: str) -> None:
        """End a reservation that waits."""
        del self.asked[name]
        self.admission.cancel(1, AttemptKey(name, 0))

    def advance(self) -> None:
        progress = self.admission.advance(self.now)
        assert not progress.failed
        assert all(answer.waiting for _, answer in progress.answers)
        self.loop.add(progress.forked)
        for attempt in progress.granted:
            self.asked[attempt.key.request_id].attempt = attempt
            self.bring(attempt.key.request_id)

    def bring(self, name: str) -> None:
        """The KV of a reservation is there."""
        asked = self.asked[name]
        attempt = asked.attempt
        assert attempt is not None
        ready = prefill(
            asked.prompt,
            asked.params,
            request_id=name,
            attempt=asked.number,
            choices=asked.choices,
            outputs=asked.outputs,
            page_size=PAGE,
        )
        for first in ready.handoff.first_tokens:
            asked.tokens[first.choice_index] = [*asked.outputs, first.token.token_id]
            if first.finish is not None:
                asked.finished.add(first.choice_index)
        self.attempts.start(attempt, self.now)
        ready.write(self.engine, attempt.handle)
        try:
            sequence = self.attempts.commit(attempt, ready.handoff, 0.0, self.now)
        except Overloaded:
            self.fail(attempt, FailureKind.PREEMPTED)
        else:
            if sequence is None:
                self.attempts.end(attempt, self.now)
            else:
                self.loop.add([sequence])
        self.advance()

    def fail(self, attempt: DecodeAttempt, kind: FailureKind) -> None:
        self.asked[attempt.key.request_id].failed = kind
        self.loop.drop(self.attempts.end(attempt, self.now))

    def run_once(self) -> bool:
        """One iteration of the loop; False when nothing has moved."""
        before = self.progress()
        self.loop.drop([])
        assert self.loop.run_once()
        while self.reports:
            self.take(self.reports.pop(0))
        return self.progress() != before

    def take(self, report: StepReport) -> None:
        for sequence in report.joined:
            self.attempts.join(sequence, self.now)
        for output in report.outputs:
            if (owner := self.attempts.find_owner(output.id)) is None:
                continue
            attempt, choice = owner
            asked = self.asked[attempt.key.request_id]
            asked.tokens[choice] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                asked.finished.add(choice)
                self.attempts.end_sequence(output.id, self.now)
                if self.attempts.is_finished(attempt):
                    self.attempts.end(attempt, self.now)
        for lost in report.failures:
            if (owner := self.attempts.find_owner(lost.id)) is not None:
                self.fail(owner[0], lost.kind)
        self.advance()

    def progress(self) -> list[object]:
        counts = [(each.failed, sum(map(len, each.tokens.values()))) for each in self.asked.values()]
        return [counts, self.attempts.pending_choices, len(self.admission)]

    def finish(self, *, replay: bool = False) -> None:
        """Turn until all is over; something must move in each turn. If `replay`, preempted attempts are replayed."""
        numbers = itertools.count()
        while not all(asked.over for asked in self.asked.values()):
            moved = self.run_once()
            for name in [name for name, asked in self.asked.items() if replay and asked.failed]:
                for again in self.asked.pop(name).replays():
                    self.reserve(f"{name}.{next(numbers)}", again)
            assert moved, "it never ends"
        for asked in self.asked.values():
            for choice, tokens in asked.tokens.items():
                assert tokens == alone(asked.prompt, asked.params, choice)[: len(tokens)]
                assert asked.failed or choice in asked.finished
        assert (self.engine.audit(), len(self.attempts), len(self.admission)) == ({}, 0, 0)


@pytest.mark.parametrize("slots", [1, 3, 32])
def test_more_choices_than_slots_all_end_with_the_tokens_that_each_has_alone(slots: int) -> None:
    worker = Worker(slots)
    assert worker.ask("many", [3, 1, 4, 1, 5], 9, 64)
    worker.finish()
    assert worker.asked["many"].failed is None
    assert max(map(len, worker.engine.steps)) == slots - slots // FORK_HEADROOM_DIVISOR


def test_a_key_is_not_given_twice_but_each_session_has_its_own() -> None:
    worker, asked = Worker(2), Reserve(AttemptKey("r", 0), 4, 4, 1)
    admission = worker.admission
    admission.register(1, asked, 0.0)
    with pytest.raises(InvalidRequest, match=r"reserve\.key: attempt r/0 is waiting already"):
        admission.register(1, asked, 0.0)
    (first,) = admission.advance(0.0).granted
    with pytest.raises(InvalidRequest, match=r"reserve\.key: attempt r/0 is reserved already"):
        admission.register(1, asked, 0.0)
    admission.register(2, asked, 0.0)
    assert [attempt.session_number for attempt in admission.advance(0.0).granted] == [2]
    worker.attempts.end(first, 0.0)
    admission.register(1, asked, 0.0)
    assert len(admission.advance(0.0).granted) == 1


def test_the_oldest_attempt_and_the_one_with_the_fewest_pending_choices_lead_alternately() -> None:
    worker = Worker(64)
    choices = {"a": 6, "b": 4, "c": 2}
    for name, n in choices.items():
        worker.admission.register(1, Reserve(AttemptKey(name, 0), 5, 4, n), 0.0)
    for attempt in worker.admission.advance(0.0).granted:
        name, n = attempt.key.request_id, attempt.reservation.choices
        worker.attempts.start(attempt, 0.0)
        params = SamplingParams(max_tokens=4, seed=1, n=n)
        ready = prefill([1, 2, 3, 4, 5], params, request_id=name, choices=range(n), page_size=PAGE)
        worker.attempts.commit(attempt, ready.handoff, 0.0, 0.0)
    forked = worker.admission.advance(0.0).forked
    assert [sequence.request_id for sequence in forked] == ["a", "c", "a", "a", "a", "a", "b", "b", "b"]


def test_an_attempt_whose_forks_lack_pages_lets_the_forks_of_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(2, pages=36, reserve_tokens=20)
    other = worker.engine.reserve("other", 18 * PAGE)
    # Nothing is forked before all is set up.
    monkeypatch.setattr(worker.admission, "_fork_next", lambda *_: False)
    for name, length, max_tokens in (("large", 33, 20), ("small", 29, 2)):
        assert worker.ask(name, list(range(2, 2 + length)), max_tokens, 4)
        while worker.attempts.held_sequences:
            worker.run_once()
    # Beside both contexts there is one page, and a choice of the first needs six.
    assert (worker.attempts.pending_choices, worker.engine.stats().free) == (6, 1)
    monkeypatch.undo()
    worker.advance()
    assert {attempt.key.request_id for attempt in worker.attempts if attempt.choices} == {"small"}
    worker.engine.free(other)
    worker.finish()
    assert not any(asked.failed for asked in worker.asked.values())


def test_choices_that_alone_hold_pages_are_forked_whatever_is_set_aside_for_others() -> None:
    worker = Worker(4, pages=10, reserve_tokens=8)
    assert worker.ask("many", list(range(2, 23)), 8, 4)
    # Two of the four free pages are set aside for it, and a fork needs three.
    assert not worker.ask("large", list(range(2, 40)), 2)
    worker.finish()
    assert not any(asked.failed for asked in worker.asked.values())


def test_a_fork_leaves_the_pages_that_the_batch_needs_while_a_sequence_runs() -> None:
    worker = Worker(4, pages=20, reserve_tokens=8)
    worker.batch_pages.kept_pages = 10
    # Nine pages, and a fork needs two more; one is free beside those of the batch.
    assert worker.ask("many", list(range(2, 23)), 8, 2)
    assert worker.attempts.pending_choices == 1
    assert not worker.admission.may_take_for_prompt(1, 1), "forks are the first in line"
    worker.batch_pages.kept_pages = 9
    worker.advance()
    assert worker.attempts.pending_choices == 0
    worker.batch_pages.kept_pages = 0
    worker.finish()


def test_requests_with_many_choices_leave_half_of_the_pages_to_others() -> None:
    worker = Worker(8, pages=100)
    names = [f"many{number}" for number in range(40)]
    for name in names:
        worker.ask(name, list(range(2, 42)), 8, 64)
    for _ in range(100):
        worker.run_once()
        assert worker.attempts.pending_context_pages <= 50
    assert sum(worker.asked[name].attempt is not None for name in names) >= 5
    for name in names:
        if worker.asked[name].attempt is None:
            worker.cancel(name)
    # Half of the pages are free, but for those of eight sequences: 200 tokens are 50 pages.
    worker.ask("other", list(range(2, 122)), 8)
    while worker.asked["other"].attempt is None:
        assert worker.run_once()
        assert not all(asked.over for name, asked in worker.asked.items() if name != "other")
    worker.finish()


def test_a_context_that_has_more_than_the_share_of_kept_ones_is_kept_alone_and_waits_for_its_turn() -> None:
    worker = Worker(4, pages=40)
    assert worker.ask("small", list(range(2, 22)), 4, 8)
    worker.ask("large", list(range(2, 90)), 4, 8)
    for number in range(300):
        if worker.asked["large"].attempt is not None:
            break
        # Others take all that they may; those of other sessions too.
        worker.ask(f"small{number}", list(range(2, 22)), 4, 8, session=number % 2)
        worker.run_once()
        worker.now += 0.01
    assert worker.attempts.expected_context_pages == 22
    worker.finish()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_any_mix_of_requests_ends_in_any_pool_that_holds_each_alone_and_every_attempt_brings_tokens(seed: int) -> None:
    dice = random.Random(seed)
    pages, slots = dice.randint(6, 30), dice.randint(1, 6)
    worker = Worker(slots, pages=pages, reserve_tokens=dice.choice([1, 4, 20]))
    coming = []
    for number in range(dice.randint(1, 6)):
        context = dice.randint(1, pages * PAGE - 3)
        params = SamplingParams(max_tokens=dice.randint(2, pages * PAGE - context), seed=7, n=dice.choice([1, 1, 2, 5]))
        coming.append((f"r{number}", Asked([dice.randrange(1000) for _ in range(context)], params)))
    while coming:
        worker.reserve(*coming.pop(0), session=dice.randint(1, 2))
        for _ in range(dice.choice([0, 1, 3])):
            worker.run_once()
        if dice.random() < 0.1:
            worker.finish(replay=True)
    worker.finish(replay=True)


def set_aside(line: PageLine, free: int) -> int:
    """Pages that are set aside for others when `free` are free."""
    return free - line.room(None, free)


def test_half_of_what_comes_free_is_set_aside_and_no_more_than_the_first_in_line_needs_now() -> None:
    line = PageLine()
    line.add(FORKS, 50)
    # Growth takes from both halves, and what it gives back counts once.
    assert [set_aside(line, free) for free in (20, 10, 20, 0, 200)] == [10, 5, 10, 0, 50]
    line.add(FORKS, 4)
    assert set_aside(line, 200) == 4


def test_what_others_take_is_not_taken_from_the_first_in_line() -> None:
    line = PageLine()
    line.add(FORKS, 50)
    assert set_aside(line, 20) == 10
    line.record_grant(12)
    assert set_aside(line, 12) == 10


def test_sessions_and_all_forks_together_take_turns_in_the_line() -> None:
    line = PageLine()
    a, again, b = ((session, AttemptKey(name, 0)) for session, name in ((1, "a"), (1, "again"), (2, "b")))
    for party in (a, FORKS, again, b):
        line.add(party, 50)
    line.remove(again)
    assert (line.first, set_aside(line, 20)) == (a, 10)
    line.remove(a)
    assert (line.first, set_aside(line, 12)) == (FORKS, 6), "half of what is free when it comes to the front"
    line.add(again, 50)
    line.remove(FORKS)
    assert line.first == b
    line.remove(b)
    assert line.first == again


def busy(slots: int, rate: float, lead_s: float) -> SlotForecast:
    """SlotForecast that has seen `rate` completions a second for long, and readiness `lead_s` after reservation."""
    forecast = SlotForecast(slots)
    forecast.record_ready(lead_s)
    for n in range(int(10 * SPAN_S * rate)):
        forecast.record_end((n + 1) / rate)
    return forecast


@pytest.mark.parametrize(
    ("slots", "lead_s", "ahead"),
    [(32, 0.5, 5), (32, 60.0, 8), (3, 60.0, 0)],
    ids=["measured", "a quarter", "few slots"],
)
def test_as_many_are_held_beyond_the_slots_as_become_free_in_time(slots: int, lead_s: float, ahead: int) -> None:
    forecast, now = busy(slots, 10.0, lead_s), 10 * SPAN_S
    assert forecast.lookahead(now) == ahead
    assert forecast.lookahead(now + 9 * SPAN_S) == 0
    for _ in range(200):
        forecast.record_ready(0.2)
    assert forecast.lookahead(now) == min(ahead, 2)


class CountedAttempts(Attempts):
    """Attempts without pages or KV: `held` sequences, and `forks` pending choices; `log` tells who got each slot."""

    def __init__(self, engine: FakeEngine, forks: int) -> None:
        super().__init__(engine)
        self.held, self.forks, self.log = 0, forks, list[str]()
        self.lacks_pages = False

    @property
    def held_sequences(self) -> int:
        return self.held

    @property
    def pending(self) -> abc.Sequence[DecodeAttempt]:
        return [cast(DecodeAttempt, SimpleNamespace(pending_choices=1))] if self.forks else []

    @property
    def pending_context_pages(self) -> int:
        return 0

    def fork_pages(self, attempt: DecodeAttempt) -> int:
        return 10**6 if self.lacks_pages else 0

    def fork(self, attempt: DecodeAttempt) -> Any:
        if self.lacks_pages:
            raise Overloaded("no page")
        self.forks -= 1
        self.held += 1
        self.log.append("fork")

    def take_pages(self, *args: Any) -> Any:
        self.held += 1
        self.log.append("other")
        return SimpleNamespace(cancelled=set())


class SlotWorker:
    """Which side gets each slot, where there is no end to pages; `asking` reservations wait."""

    def __init__(self, slots: int, forks: int = 1000, asking: int = 0) -> None:
        engine = FakeEngine(slots=slots)
        self.attempts, self.now, self.numbers = CountedAttempts(engine, forks), 0.0, itertools.count()
        self.admission = Admission(engine, self.attempts, 1, BatchPages(), lambda: False)
        self.ask(asking)

    def ask(self, count: int = 1) -> None:
        for _ in range(count):
            self.admission.register(1, Reserve(AttemptKey(f"r{next(self.numbers)}", 0), 1, 1, 1), self.now)

    def advance(self, ended: int = 0) -> list[str]:
        """`ended` sequences have ended: who gets their slots."""
        self.attempts.log.clear()
        self.attempts.held -= ended
        self.admission.advance(self.now)
        return list(self.attempts.log)


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (2, 0), (7, 0), (32, 0), (4, 1), (8, 2), (32, 8)])
def test_forks_and_reservations_take_turns_where_both_want_every_slot(slots: int, ahead: int) -> None:
    worker = SlotWorker(slots, asking=1000)
    if ahead:
        worker.admission.forecast, worker.now = busy(slots, 10.0, 60.0), 10 * SPAN_S
    worker.advance()
    assert worker.attempts.held == slots + ahead
    got = list(itertools.chain.from_iterable(worker.advance(1) for _ in range(40)))
    assert got in (["fork", "other"] * 20, ["other", "fork"] * 20)


@pytest.mark.parametrize("slots", [8, 32])
def test_forks_leave_a_share_of_the_slots_to_a_request_that_comes_now(slots: int) -> None:
    worker = SlotWorker(slots)
    worker.advance()
    assert worker.attempts.held == slots - slots // FORK_HEADROOM_DIVISOR
    worker.ask()
    assert worker.advance()[0] == "other"


def test_forks_leave_the_slot_of_a_reservation_for_which_blocks_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = iter([True, True, False])
    monkeypatch.setattr("decode_svc.admission.SLICE_NODES", 0)
    monkeypatch.setattr(FakeEngine, "evict_for", lambda *_: next(evicted))
    worker = SlotWorker(4, asking=1)
    assert [worker.advance() for _ in range(3)] == [["fork"] * 3, [], ["other"]]


def test_a_fork_that_cant_take_its_turn_keeps_nobody_from_the_slot() -> None:
    worker = SlotWorker(1, asking=3)
    worker.attempts.lacks_pages = True
    assert worker.advance() == ["other"]
    assert worker.advance(1) == ["other"]
    worker.attempts.lacks_pages = False
    assert worker.advance(1) == ["fork"]
    assert worker.advance(1) == ["other"]


def test_replays_go_first_sessions_take_turns_and_the_oldest_of_a_session_leads() -> None:
    worker = Worker(1)
    for session, name, attempt in zip((1, 1, 1, 2, 2, 1, 3), "abcdefg", (0, 0, 0, 0, 1, 2, 0), strict=True):
        worker.admission.register(session, Reserve(AttemptKey(name, attempt), 4, 4, 1), 0.0)
    order = ""
    while len(worker.admission):
        (granted,) = worker.admission.advance(0.0).granted
        order += granted.key.request_id
        worker.attempts.end(granted, 0.0)
    assert order == "fegadbc"


def test_a_reservation_ends_at_its_deadline_by_a_cancel_with_its_session_or_in_a_drain() -> None:
    worker = Worker(1)
    worker.admission.register(1, Reserve(AttemptKey("runs", 0), 4, 4, 1), 0.0)
    worker.admission.advance(0.0)
    for session, name in ((1, "late"), (1, "cancelled"), (1, "choices"), (2, "lost"), (3, "kept")):
        choices = 2 if name == "choices" else 1
        deadline_s = 5.0 if name == "late" else None
        worker.admission.register(session, Reserve(AttemptKey(name, 0), 4, 4, choices, deadline_s), 1.0)
    told = worker.admission.advance(1.0).answers
    assert [(each.reservation.key.request_id, answer.waiting) for each, answer in told] == [
        (name, True) for name in ("late", "cancelled", "choices", "lost", "kept")
    ]
    assert worker.admission.deadline == 6.0
    assert worker.admission.advance(5.9).answers == []
    ((late, answer),) = worker.admission.advance(6.0).answers
    assert (late.reservation.key.request_id, answer) == ("late", ReserveResult(False, "its deadline has passed"))
    assert worker.admission.deadline == math.inf
    for _ in range(2):
        worker.admission.cancel(1, AttemptKey("cancelled", 0))
        assert set(worker.admission.in_session(1)) == {AttemptKey("choices", 0)}
    assert [each.reservation.key.request_id for each in worker.admission.clear(2)] == ["lost"]
    worker.admission.cancel(1, AttemptKey("choices", 0), 1)
    assert set(worker.admission.in_session(1)) == {AttemptKey("choices", 0)}
    worker.admission.cancel(1, AttemptKey("choices", 0), 0)
    assert [each.reservation.key.request_id for each in worker.admission.clear()] == ["kept"]
    assert len(worker.admission) == 0


def test_the_time_of_waiting_counts_for_the_deadline_of_an_attempt() -> None:
    worker = Worker(1)
    for name, deadline_s in (("runs", None), ("waits", 5.0)):
        worker.admission.register(1, Reserve(AttemptKey(name, 0), 4, 4, 1, deadline_s), 1.0)
    (first,) = worker.admission.advance(1.0).granted
    worker.attempts.end(first, 3.0)
    (attempt,) = worker.admission.advance(3.0).granted
    assert attempt.lifecycle.deadline == 6.0


def test_a_choice_that_is_cancelled_while_its_reservation_waits_never_starts() -> None:
    worker = SlotWorker(1, forks=0, asking=1)
    worker.advance()
    worker.admission.register(1, Reserve(AttemptKey("two", 0), 1, 1, 2), 0.0)
    worker.admission.cancel(1, AttemptKey("two", 0), 0)
    worker.attempts.held = 0
    (granted,) = worker.admission.advance(0.0).granted
    assert granted.cancelled == {0}


def test_a_reservation_that_is_too_large_never_waits() -> None:
    worker = Worker(1, pages=4)
    with pytest.raises(ReservationTooLarge):
        worker.admission.register(1, Reserve(AttemptKey("large", 0), 17, 4, 1), 0.0)
    assert len(worker.admission) == 0


def test_a_reservation_that_the_engine_refuses_blocks_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(4)
    take_pages = worker.attempts.take_pages

    def fail(session: int, reservation: Reserve, *more: Any) -> DecodeAttempt:
        if reservation.key.request_id == "bad":
            raise EngineError("broken")
        return take_pages(session, reservation, *more)

    monkeypatch.setattr(worker.attempts, "take_pages", fail)
    for name in ("bad", "good"):
        worker.admission.register(1, Reserve(AttemptKey(name, 0), 4, 4, 1), 0.0)
    progress: Progress = worker.admission.advance(0.0)
    assert [attempt.key.request_id for attempt in progress.granted] == ["good"]
    assert [answer for _, answer in progress.answers] == [ReserveResult(False, "EngineError: broken")]


def test_a_reservation_that_shares_pages_is_granted_when_the_blocks_are_there() -> None:
    """Its pages beside the shared ones were free all the time."""
    worker, ids = Worker(4, pages=20), list(range(2, 42))
    names = b"".join(digests(worker.engine, ids))
    first = worker.engine.reserve("first", 48)
    worker.admission.register(1, Reserve(AttemptKey("second", 0), 40, 4, 1, prefix_digests=names), 0.0)
    assert not worker.admission.advance(0.0).granted
    ready = prefill([1, 2], SamplingParams(max_tokens=4), request_id="other", page_size=PAGE)
    worker.admission.register(1, Reserve(AttemptKey("other", 0), 2, 4, 1), 0.0)
    (other,) = worker.admission.advance(0.0).granted
    worker.attempts.start(other, 0.0)
    worker.engine.publish(first, digests(worker.engine, ids))
    # A commit tells that there may be new blocks.
    assert worker.attempts.commit(other, ready.handoff, 0.0, 0.0) is not None
    (second,) = worker.admission.advance(0.0).granted
    assert second.handle.cached_tokens >= 32


def test_a_reservation_is_granted_when_it_shares_pages_of_one_that_came_while_no_slot_was_free() -> None:
    worker, ids = Worker(2, pages=24), list(range(2, 42))
    names = digests(worker.engine, ids)
    worker.engine.reserve("held", 12 * PAGE)

    def ask(name: str, context: int, prefix: abc.Sequence[bytes] = (), session: int = 1) -> list[DecodeAttempt]:
        reserve = Reserve(AttemptKey(name, 0), context, 4, 1, prefix_digests=b"".join(prefix))
        worker.admission.register(session, reserve, 0.0)
        return worker.admission.advance(0.0).granted

    def commit(attempt: DecodeAttempt, prompt: list[int]) -> None:
        ready = prefill(prompt, SamplingParams(max_tokens=4), request_id=attempt.key.request_id, page_size=PAGE)
        worker.attempts.start(attempt, 0.0)
        worker.attempts.commit(attempt, ready.handoff, 0.0, 0.0)
        assert not worker.admission.advance(0.0).granted

    (first,) = ask("first", 1)
    commit(first, [1])
    assert not ask("waits", 40, names), "it needs 11 pages, and 10 are free"
    (second,) = ask("second", 16, names[:1], session=2)
    worker.engine.publish(second.handle, names[:1])
    commit(second, ids[:16])
    worker.attempts.end(first, 0.0)
    # Four pages are shared, and seven are free. One attempt has its KV, as when it was tried before.
    (granted,) = worker.admission.advance(0.0).granted
    assert (granted.key.request_id, granted.handle.cached_tokens) == ("waits", 16)


def test_a_reservation_is_granted_when_it_shares_pages_that_another_one_has_pinned() -> None:
    worker, ids = Worker(4, pages=24), list(range(2, 42))
    names = digests(worker.engine, ids)
    worker.engine.free(worker.engine.reserve("cached", 16), names[:1])
    held = [worker.engine.reserve("held", pages * PAGE) for pages in (12, 2)]
    for name, context, blocks in (("waits", 40, 2), ("pins", 16, 1)):
        prefix = b"".join(names[:blocks])
        worker.admission.register(1, Reserve(AttemptKey(name, 0), context, 4, 1, prefix_digests=prefix), 0.0)
    (attempt,) = worker.admission.advance(0.0).granted
    assert (attempt.key.request_id, attempt.handle.cached_tokens, worker.engine.stats().free) == ("pins", 16, 5)
    worker.engine.free(held.pop())
    # It needs eleven pages, of which it shares four; ten were free when it was tried first.
    assert len(worker.admission.advance(0.0).granted) == 1


def test_pages_that_no_request_holds_are_freed_for_a_reservation() -> None:
    worker = Worker(4, pages=8)
    copies = [worker.engine.reserve("copy", 4 * PAGE)]

    def reclaim() -> bool:
        for copy in copies:
            worker.engine.free(copy)
        return bool(copies) and not copies.clear()

    admission = Admission(worker.engine, worker.attempts, 4, BatchPages(), reclaim)
    admission.register(1, Reserve(AttemptKey("r", 0), 20, 4, 1), 0.0)
    assert len(admission.advance(0.0).granted) == 1


def test_pages_that_no_request_holds_are_freed_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(3, pages=10)
    copies = [worker.engine.reserve("copy", 5 * PAGE)]

    def reclaim() -> bool:
        for copy in copies:
            worker.engine.free(copy)
        return bool(copies) and not copies.clear()

    monkeypatch.setattr(worker.admission, "_reclaim", reclaim)
    assert worker.ask("three", list(range(2, 11)), 4, 3)
    assert worker.attempts.pending_choices == 0
    worker.finish()


def test_copies_that_begin_while_a_reservation_waits_go_on_until_more_pages_are_free() -> None:
    worker, reclaimed = Worker(4, pages=8), list[int]()

    def reclaim() -> bool:
        reclaimed.append(worker.engine.stats().free)
        return False

    admission = Admission(worker.engine, worker.attempts, 4, BatchPages(), reclaim)
    ids = list(range(2, 30))
    names = b"".join(digests(worker.engine, ids))
    held = [worker.engine.reserve("held", pages * PAGE) for pages in (5, 1, 1)]
    admission.register(1, Reserve(AttemptKey("small", 0), 1, 1, 1), 0.0)
    (small,) = admission.advance(0.0).granted
    admission.register(1, Reserve(AttemptKey("large", 0), 28, 4, 1, prefix_digests=names), 0.0)
    for _ in range(3):
        admission.advance(0.0)
    assert reclaimed == [0]
    worker.engine.free(held.pop())
    admission.advance(0.0)
    worker.attempts.start(small, 0.0)
    ready = prefill([1], SamplingParams(max_tokens=4), request_id="small", page_size=PAGE)
    assert worker.attempts.commit(small, ready.handoff, 0.0, 0.0) is not None
    # The engine is asked again, as blocks may be cached now.
    admission.advance(0.0)
    assert reclaimed == [0, 1]


def test_a_reservation_does_not_wait_for_copies_if_nothing_else_holds_pages() -> None:
    worker, copies = Worker(4, pages=8), list[KvHandle]()

    def reclaim() -> bool:
        ended = [copies.pop() for _ in list(copies)]
        for copy in ended:
            worker.engine.free(copy)
        return bool(ended)

    admission = Admission(worker.engine, worker.attempts, 4, BatchPages(), reclaim)
    for name, tokens in (("first", 20), ("second", 24)):
        admission.register(1, Reserve(AttemptKey(name, 0), tokens, 4, 1), 0.0)
    (first,) = admission.advance(0.0).granted
    # All pages that its end frees are copied.
    worker.attempts.end(first, 0.0)
    copies.append(worker.engine.reserve("copy", 6 * PAGE))
    assert len(admission.advance(0.0).granted) == 1


def test_the_token_that_prefill_computes_here_is_not_pinned() -> None:
    worker, ids = Worker(4, pages=20), list(range(2, 34))
    names = digests(worker.engine, ids)
    worker.engine.free(worker.engine.reserve("cached", 32), names)
    for computed in (0, 1):
        admission = Admission(worker.engine, worker.attempts, 4, BatchPages(), lambda: False, computed_tokens=computed)
        key = AttemptKey(f"r{computed}", 0)
        admission.register(1, Reserve(key, 32, 4, 1, prefix_digests=b"".join(names)), 0.0)
        (attempt,) = admission.advance(0.0).granted
        assert (attempt.handle.cached_tokens == 32) == (computed == 0)
        assert 0 < attempt.handle.cached_tokens <= 32 - computed
        worker.attempts.end(attempt, 0.0)
