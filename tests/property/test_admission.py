"""Waiting reservations and forks at a real Admission, in virtual time: what is free is used, and all of them end.

A granted attempt holds its pages for a second, or as long as a test says. Nothing is computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.request import SamplingParams
from decode_svc.admission import FORK_HEADROOM_DIVISOR, FORKS, Admission
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.scheduler import BatchPages
from tests.decoding import prefill
from tests.effort import effort

PAGE, HOLD_S = 4, 1.0


class Worker:
    """A worker with `pages` pages; `granted` are times of grants by the name of the request, in order."""

    def __init__(self, slots: int, pages: int) -> None:
        self.engine = FakeEngine(page_size=PAGE, pages=pages, slots=slots, max_model_len=pages * PAGE)
        self.attempts, self.batch_pages = Attempts(self.engine), BatchPages()
        self.admission = Admission(self.engine, self.attempts, 1, self.batch_pages, lambda: False)
        self.slots, self.now, self.numbers = slots, 0.0, itertools.count()
        self.came: dict[str, float] = {}
        self.granted: dict[str, float] = {}
        self.ends: list[tuple[float, int, DecodeAttempt]] = []

    def ask(self, session: int, name: str, pages: int, choices: int = 1, attempt: int = 0) -> None:
        """Register a reservation that needs so many pages."""
        self.came[name] = self.now
        reserve = Reserve(AttemptKey(name, attempt), pages * PAGE - 1, 1, choices)
        self.admission.register(session, reserve, self.now)
        self.advance()

    def advance(self) -> None:
        progress = self.admission.advance(self.now)
        assert not progress.failed
        for attempt in progress.granted:
            self.granted[attempt.key.request_id] = self.now
            heapq.heappush(self.ends, (self.now + HOLD_S, next(self.numbers), attempt))
        self.check_nothing_is_idle()

    def check_nothing_is_idle(self) -> None:
        """What is free, fits, and is not set aside for another is not left to lie."""
        if self.attempts.held_sequences >= self.slots:
            return
        stats, line = self.engine.stats(), self.admission._line
        free = max(stats.free + stats.cached - self.batch_pages.kept_pages, 0)
        for waiting in self.admission._in_turn():
            pages = waiting.size.pages
            context = self.engine.spec.pages_for(waiting.reservation.context_tokens)
            most, kept = self.engine.spec.pages // 2, self.attempts.expected_context_pages
            room = self.admission._context_line.room(waiting.party, max(most - kept, 0))
            fits = waiting.reservation.choices == 1 or min(context, most) <= room
            assert not fits or pages > line.room(waiting.party, free), f"{waiting.party} fits and waits"
        headroom = self.slots // FORK_HEADROOM_DIVISOR
        if self.attempts.held_sequences < self.slots - headroom:
            for attempt in self.attempts.pending:
                assert self.attempts.fork_pages(attempt) > line.room(FORKS, free), "a fork fits and waits"

    def end(self, attempt: DecodeAttempt) -> None:
        self.attempts.end(attempt, self.now)
        self.advance()

    def run(self, until: float, arrivals: Callable[[], Any] = lambda: None, every_s: float = 0.02) -> None:
        """Let time pass: attempts end after HOLD_S, and `arrivals` is called every so often."""
        while self.now < until:
            arrivals()
            self.now += every_s
            while self.ends and self.ends[0][0] <= self.now:
                self.end(heapq.heappop(self.ends)[2])

    def waited(self, name: str) -> float:
        return self.granted[name] - self.came[name]


@pytest.mark.parametrize("pages", [20, 100])
@pytest.mark.parametrize("sessions", [1, 2])
def test_large_ones_are_granted_within_the_bound_and_small_ones_go_on_meanwhile(pages: int, sessions: int) -> None:
    worker, numbers = Worker(pages, pages), itertools.count()

    def arrive() -> None:
        for session in range(sessions):
            if len(worker.admission.in_session(session)) < 20:
                number = next(numbers)
                worker.ask(session, f"small{number}", 1 + number % 3)

    worker.run(3.0, arrive)
    before = sum(at >= 2.0 for at in worker.granted.values())
    worker.ask(0, "nearly all", pages * 9 // 10)
    worker.ask(sessions - 1, "all", pages)
    worker.run(30.0, arrive)
    # A generation is HOLD_S, and a tick until it is seen. The second one's place in line is behind the first one's, and
    # both are behind small ones that came before them.
    generation, before_s = HOLD_S + 0.04, HOLD_S * (1 + 20 * sessions * 2 / pages)
    bounds = {"nearly all": 1 + math.ceil(math.log2(10)), "all": 1 + math.ceil(math.log2(pages))}
    first, second = sorted(bounds, key=lambda name: worker.granted[name])
    assert worker.waited(first) <= before_s + generation * bounds[first]
    assert worker.granted[second] - worker.granted[first] <= generation * (1 + bounds[second])
    small = sorted(at for name, at in worker.granted.items() if name.startswith("small"))
    gaps = [later - at for at, later in itertools.pairwise(small) if later <= worker.granted[first]]
    assert max(gaps) <= HOLD_S, "the small ones stood still"
    # In the first generation half of the pages at least went on to small ones.
    assert sum(3.0 <= at < 4.0 for at in small) >= 0.4 * before


def test_a_flood_of_large_ones_stops_no_small_ones_and_each_comes_in_bounded_time() -> None:
    worker, numbers, flood = Worker(100, 100), itertools.count(), 12

    def arrive() -> None:
        if len(worker.admission.in_session(1)) < 5:
            worker.ask(1, f"small{next(numbers)}", 2)

    worker.run(2.0, arrive)
    for number in range(flood):
        worker.ask(0, f"large{number}", 60)
    worker.run(90.0, arrive)
    large = [worker.granted[f"large{number}"] for number in range(flood)]
    assert large == sorted(large)
    bound = HOLD_S * (2 + math.ceil(math.log2(1 / 0.4)))
    assert all(later - at <= bound + 0.1 for at, later in itertools.pairwise([2.0, *large]))
    small = sorted(at for name, at in worker.granted.items() if name.startswith("small"))
    assert max(later - at for at, later in itertools.pairwise(small)) <= 2 * HOLD_S
    during = [at for at in small if 2.0 <= at <= large[-1]]
    # They have a fifth of the pages or more: 40 are free beside a large one, of which half is set aside for the next.
    assert len(during) * 2 >= 100 / 5 * (large[-1] - 2.0) / HOLD_S


def test_prompts_for_other_decode_workers_delay_a_large_one_for_no_longer_than_the_bound() -> None:
    worker, prompts = Worker(40, 40), deque[tuple[float, KvHandle]]()

    def arrive() -> None:
        while prompts and prompts[0][0] <= worker.now:
            worker.engine.free(prompts.popleft()[1])
            worker.advance()
        if worker.admission.may_take_for_prompt(2, 2):
            prompts.append((worker.now + HOLD_S, worker.engine.reserve("prompt", 2 * PAGE)))
            worker.admission.record_prompt()

    worker.run(3.0, arrive)
    worker.ask(0, "large", 36)
    worker.run(20.0, arrive)
    assert worker.waited("large") <= (HOLD_S + 0.04) * (1 + math.ceil(math.log2(10)))


@pytest.mark.parametrize(("slots", "pages"), [(4, 100), (100, 8)])
@pytest.mark.parametrize("many", [1, 2, 50])
def test_two_sessions_share_what_is_free_however_many_reservations_each_has(slots: int, pages: int, many: int) -> None:
    worker, numbers = Worker(slots, pages), itertools.count()
    shares = Counter[int]()

    def arrive() -> None:
        for session, count in ((0, many), (1, 2)):
            while len(worker.admission.in_session(session)) < count:
                worker.ask(session, f"{session}/{next(numbers)}", 2)

    worker.run(20.0, arrive)
    for name in worker.granted:
        shares[int(name.partition("/")[0])] += 1
    assert abs(shares[0] - shares[1]) <= slots + many
    assert shares[1] >= 0.45 * shares.total()
    order = [name.partition("/")[0] for name, at in worker.granted.items() if at > 2.0]
    assert max(len(list(same)) for _, same in itertools.groupby(order)) <= 2


def test_large_ones_of_two_sessions_get_pages_set_aside_in_turn() -> None:
    worker, numbers = Worker(100, 100), itertools.count()

    def arrive() -> None:
        if len(worker.admission.in_session(2)) < 5:
            worker.ask(2, f"small{next(numbers)}", 3)

    worker.run(2.0, arrive)
    for number in range(6):
        worker.ask(0, f"a{number}", 70)
    for number in range(2):
        worker.ask(1, f"b{number}", 70)
    worker.run(60.0, arrive)
    order = [name for name in worker.granted if name[0] in "ab"]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_replays_pass_all_first_attempts() -> None:
    worker = Worker(1, 10)
    worker.ask(0, "runs", 1)
    for session in (0, 1):
        for number in range(3):
            worker.ask(session, f"first{session}{number}", 1)
    for session in (1, 0):
        worker.ask(session, f"replay{session}", 1, attempt=1)
    worker.run(20.0)
    assert list(worker.granted)[1:3] == ["replay0", "replay1"]


def test_two_that_are_each_first_in_another_line_do_not_wait_for_each_other() -> None:
    worker = Worker(4, 6)
    worker.ask(0, "kept", 1, choices=2)
    held = worker.engine.reserve("held", 2 * PAGE)
    worker.ask(1, "lacks pages", 2, choices=2)
    worker.ask(2, "lacks room for its context", 5, choices=2)
    assert list(worker.granted) == ["kept"]
    (kept,) = worker.attempts
    worker.end(kept)
    worker.engine.free(held)
    worker.advance()
    assert list(worker.granted) == ["kept", "lacks room for its context"]
    finish(worker)


@effort(120)
@given(st.integers(0, 10**9))
def test_nothing_that_fits_waits_and_all_end(seed: int) -> None:
    dice = random.Random(seed)
    pages, slots = dice.randint(4, 40), dice.randint(1, 10)
    worker, names = Worker(slots, pages), itertools.count()
    for _ in range(dice.randint(1, 120)):
        worker.now += dice.choice([0.0, 0.01, 0.3])
        attempts = list(worker.attempts)
        match dice.choice(["ask", "ask", "ask", "end", "end", "commit", "cancel", "keep", "drop", "choice"]):
            case "ask":
                need = dice.choice([1, dice.randint(1, 3), dice.randint(1, pages)])
                choices, attempt = dice.choice([1, 1, 1, 2, 5]), dice.choice([0, 0, 0, 1])
                worker.ask(dice.randint(0, 2), f"r{next(names)}", need, choices, attempt)
            case "end" if attempts:
                worker.end(dice.choice(attempts))
            case "commit" if attempts:
                commit(worker, dice.choice(attempts))
            case "choice" if attempts:
                end_choice(worker, dice.choice(attempts))
            case "cancel":
                for waiting in list(worker.admission._in_turn())[:1]:
                    worker.admission.cancel(waiting.session_number, waiting.reservation.key)
            case "drop" if dice.random() < 0.2:
                worker.admission.clear(dice.randint(0, 2))
            case "keep" if any(attempt.choices for attempt in attempts):
                worker.batch_pages.kept_pages = dice.choice([0, 0, 1, pages // 2])
        if not any(attempt.choices for attempt in worker.attempts):
            # As the engine thread does when the batch is empty.
            worker.batch_pages.kept_pages = 0
        worker.advance()
    finish(worker)


def commit(worker: Worker, attempt: DecodeAttempt) -> None:
    """Its KV is there: its first choice is a sequence, and further ones become pending."""
    if attempt.committed:
        return
    length, n = attempt.reservation.context_tokens, attempt.reservation.choices
    params = SamplingParams(max_tokens=10**6, seed=1, n=n, ignore_eos=True)
    ready = prefill([7] * length, params, choices=range(n), page_size=PAGE)
    worker.attempts.start(attempt, worker.now)
    try:
        worker.attempts.commit(attempt, ready.handoff, 0.0, worker.now)
    except Exception:
        worker.attempts.end(attempt, worker.now)
    worker.advance()


def end_choice(worker: Worker, attempt: DecodeAttempt) -> None:
    for choice in list(attempt.choices)[:1]:
        worker.attempts.cancel_choice(attempt, choice, worker.now)
    if worker.attempts.is_finished(attempt):
        worker.attempts.end(attempt, worker.now)
    worker.advance()


def finish(worker: Worker) -> None:
    """All that is granted runs to its end, choice by choice: nothing waits for ever."""
    worker.batch_pages.kept_pages = 0
    worker.advance()
    left = math.inf
    for _ in range(5000):
        for attempt in worker.attempts:
            commit(worker, attempt)
        for attempt in worker.attempts:
            end_choice(worker, attempt)
        worker.now += 1.0
        worker.advance()
        if not len(worker.attempts):
            break
        left = len(worker.admission)
    assert (len(worker.attempts), len(worker.admission)) == (0, 0), f"{left} wait for ever"
    assert worker.engine.audit() == {}
