"""Slots and pages in turn: forks of many choices beside reservations, on few slots and in a small pool.

Claims of large reservations and the number of sequences that are admitted are computed by hand.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import abc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest, Overloaded
from baton.request import SamplingParams
from baton.worker.health import Watchdog
from decode_svc.admission import (
    CLAIM_S,
    FORK_HEADROOM_DIVISOR,
    FORKS,
    MAX_RETRY_S,
    MIN_RETRY_S,
    REFUSED_PRIORITY_S,
    SPAN_S,
    USUAL_RETRY_S,
    Admission,
    Claimant,
    Claims,
    SlotForecast,
)
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.messages import AttemptKey, FailureKind, Reserve
from decode_svc.scheduler import BatchPages
from tests.decoding import LoggingEngine, alone, prefill

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
        batch_pages = BatchPages()
        self.loop = DecodeLoop(self.engine, Watchdog(), self.reports.append, batch_pages=batch_pages)
        self.attempts = Attempts(self.engine)
        forecast = SlotForecast(slots, 0.0)
        self.admission = Admission(self.engine, self.attempts, reserve_tokens, forecast, batch_pages, lambda: False)
        self.asked: dict[str, Asked] = {}
        self.now = 0.0

    def ask(self, name: str, prompt: list[int], max_tokens: int, n: int) -> bool:
        params = SamplingParams(max_tokens=max_tokens, seed=7, n=n)
        return self.try_again(name, Asked(prompt, params))

    def try_again(self, name: str, asked: Asked) -> bool:
        """Reserve, and at once bring the KV; False when it is refused."""
        if granted := self.reserve(name, asked):
            self.bring(name)
        return granted

    def reserve(self, name: str, asked: Asked) -> bool:
        """Ask for a slot; False when it is refused."""
        try:
            attempt = self.admission.admit(1, asked.reserve(name), self.now)
        except Overloaded:
            return False
        self.asked[name], asked.attempt = asked, attempt
        self.fork()
        return True

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
        self.fork()

    def fork(self) -> None:
        forked = self.admission.start_forks(self.now)
        assert not forked.failed
        self.loop.add(forked.started)

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
        self.fork()

    def finish_with_replays(self) -> None:
        """Turn until all is over, and what is preempted is replayed, one choice after the other."""
        waiting: list[tuple[str, Asked]] = []
        numbers, still = itertools.count(), 0
        while waiting or not all(asked.over for asked in self.asked.values()):
            moved = self.run_once()
            for name in [name for name, asked in self.asked.items() if asked.failed]:
                waiting += [(f"{name}.{next(numbers)}", replay) for replay in self.asked.pop(name).replays()]
            # As a router does: the head of the queue first.
            while waiting and self.try_again(*waiting[0]):
                waiting.pop(0)
                moved = True
            if not moved:
                self.now += REFUSED_PRIORITY_S
                self.fork()
            still = 0 if moved else still + 1
            # The claims of those who don't ask again end too.
            assert still < 3 + CLAIM_S / REFUSED_PRIORITY_S, "it never ends"
        self.finish()

    def progress(self) -> list[object]:
        counts = [(each.failed, sum(map(len, each.tokens.values()))) for each in self.asked.values()]
        return [counts, self.attempts.pending_choices]

    def finish(self) -> None:
        """Turn until all is over; nothing may stand still for longer than a slot is kept."""
        still = 0
        while not all(asked.over for asked in self.asked.values()):
            if self.run_once():
                still = 0
                continue
            self.now += REFUSED_PRIORITY_S
            self.fork()
            still += 1
            assert still < 3, "it never ends"
        for asked in self.asked.values():
            for choice, tokens in asked.tokens.items():
                assert tokens == alone(asked.prompt, asked.params, choice)[: len(tokens)]
                assert asked.failed or choice in asked.finished
        assert (self.engine.audit(), len(self.attempts)) == ({}, 0)


@pytest.mark.parametrize("slots", [1, 3, 32])
def test_more_choices_than_slots_all_end_with_the_tokens_that_each_has_alone(slots: int) -> None:
    worker = Worker(slots)
    assert worker.ask("many", [3, 1, 4, 1, 5], 9, 64)
    worker.finish()
    assert worker.asked["many"].failed is None
    assert max(map(len, worker.engine.steps)) == slots - slots // FORK_HEADROOM_DIVISOR


def test_a_request_that_comes_while_more_choices_than_slots_run_starts_at_once() -> None:
    worker = Worker(32)
    assert worker.ask("many", [3, 1, 4], 40, 33)
    worker.run_once()
    assert worker.attempts.pending_choices == 33 - 28
    assert worker.ask("one", [2, 7], 5, 1)
    worker.run_once()
    assert "one/0" in worker.engine.steps[-1]
    worker.finish()


def test_many_choices_start_on_a_worker_that_is_nearly_full_and_nobody_waits_for_it_to_drain() -> None:
    worker = Worker(32)
    for number in range(20):
        assert worker.ask(f"r{number}", [number + 2], 30, 1)
    # They came long ago: where many come in a second, forks leave more slots free.
    worker.now += 10 * SPAN_S
    assert worker.ask("many", [3, 1, 4], 30, 16)
    worker.run_once()
    assert len(worker.engine.steps[-1]) == 28
    assert worker.attempts.pending_choices == 36 - 28
    assert worker.ask("other", [5], 30, 1)
    worker.finish()


def test_after_a_preemption_a_request_is_granted_that_leaves_the_batch_its_next_pages() -> None:
    worker = Worker(8, pages=20)
    for name in ("old", "young"):
        assert worker.ask(name, [1, 2, 3], 60, 1)
    while not worker.asked["young"].failed:
        worker.run_once()
    # The other one has 11 pages, and needs 16 at its end.
    with pytest.raises(Overloaded, match="needs 5 pages, 9 of 20 are free, 5 are kept for sequences that run"):
        worker.admission.admit(1, Reserve(AttemptKey("large", 0), 16, 4, 1), worker.now)
    worker.admission.cancel_claim((1, AttemptKey("large", 0)))
    assert worker.ask("small", [5] * 12, 4, 1)
    worker.finish()
    assert [name for name, asked in worker.asked.items() if asked.failed] == ["young"]


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_others_and_the_choices_of_one_request_get_slots_in_turn(slots: int) -> None:
    worker = Worker(slots)
    assert worker.ask("many", [3, 1, 4], 4, 64)
    granted, numbers = 0, itertools.count()
    other = Asked([2, 7], SamplingParams(max_tokens=4, seed=7))
    while worker.attempts.pending_choices:
        forks = worker.attempts.pending_choices
        worker.run_once()
        started = forks - worker.attempts.pending_choices
        while worker.try_again(f"other{next(numbers)}", other):
            granted += 1
            other = Asked([2, 7], other.params)
        assert started <= slots
    # As many as there were forks to wait for, but for those of the first moment and of the last.
    assert 64 - 3 * slots <= granted <= 64 + 2 * slots
    worker.finish()


def test_a_live_key_is_not_given_twice_but_each_session_has_its_own() -> None:
    worker, asked = Worker(4), Reserve(AttemptKey("r", 0), 4, 4, 1)
    first = worker.admission.admit(1, asked, 0.0)
    with pytest.raises(InvalidRequest, match=r"reserve\.key: attempt r/0 is reserved already"):
        worker.admission.admit(1, asked, 0.0)
    assert worker.admission.admit(2, asked, 0.0) is not first
    worker.attempts.end(first, 0.0)
    worker.admission.admit(1, asked, 0.0)
    assert len(worker.attempts) == 2


def test_the_oldest_attempt_and_the_one_with_the_fewest_pending_choices_lead_alternately() -> None:
    worker = Worker(64)
    for name, n in (("a", 6), ("b", 4), ("c", 2)):
        attempt = worker.admission.admit(1, Reserve(AttemptKey(name, 0), 5, 4, n), 0.0)
        worker.attempts.start(attempt, 0.0)
        params = SamplingParams(max_tokens=4, seed=1, n=n)
        ready = prefill([1, 2, 3, 4, 5], params, request_id=name, choices=range(n), page_size=PAGE)
        worker.attempts.commit(attempt, ready.handoff, 0.0, 0.0)
    forked = worker.admission.start_forks(0.0)
    assert [sequence.request_id for sequence in forked.started] == ["a", "c", "a", "a", "a", "a", "b", "b", "b"]


def test_an_attempt_whose_forks_lack_pages_lets_the_forks_of_others_go_on() -> None:
    worker = Worker(2, pages=36, reserve_tokens=20)
    other = worker.engine.reserve("other", 18 * PAGE)
    # Nothing is forked before all is set up.
    worker.admission.forecast.forks_wait_until = 1.0
    for name, length, max_tokens in (("large", 33, 20), ("small", 29, 2)):
        assert worker.ask(name, list(range(2, 2 + length)), max_tokens, 4)
        while worker.attempts.held_sequences:
            worker.run_once()
    # Beside both contexts there is one page, and a choice of the first needs six.
    assert (worker.attempts.pending_choices, worker.engine.stats().free) == (6, 1)
    worker.now = 1.0
    worker.fork()
    assert {attempt.key.request_id for attempt in worker.attempts if attempt.held_sequences} == {"small"}
    worker.engine.free(other)
    worker.finish()
    assert not any(asked.failed for asked in worker.asked.values())


def test_choices_that_alone_hold_pages_are_forked_whatever_claims_set_aside() -> None:
    worker = Worker(4, pages=10, reserve_tokens=8)
    assert worker.ask("many", list(range(2, 23)), 8, 4)
    large = Asked(list(range(2, 40)), SamplingParams(max_tokens=2, seed=7))
    while not worker.try_again("large", large):
        # It asks again and again, so that its claim lasts: two of the four free pages, and a fork needs three.
        worker.run_once()
        worker.now += 0.5
        assert worker.now < 60
        worker.fork()
    worker.finish()
    assert not any(asked.failed for asked in worker.asked.values())


def test_requests_with_many_choices_leave_half_of_the_pages_to_others() -> None:
    worker = Worker(8, pages=100)
    many = (Asked(list(range(2, 42)), SamplingParams(max_tokens=8, seed=7, n=64)) for _ in itertools.count())
    names, granted = (f"many{number}" for number in itertools.count()), 0
    asked = next(many)
    for _ in range(100):
        if worker.try_again(next(names), asked):
            asked, granted = next(many), granted + 1
        worker.run_once()
        assert worker.attempts.pending_context_pages <= 50
    assert granted >= 5
    # Half of the pages are free, but for those of eight sequences: 200 tokens are 50 pages.
    while not worker.try_again("other", Asked(list(range(2, 122)), SamplingParams(max_tokens=8, seed=7))):
        assert worker.run_once()
        assert not worker.asked["many0"].over
    worker.finish()


def test_a_context_that_has_more_than_the_share_of_kept_ones_is_kept_alone_and_waits_for_its_turn() -> None:
    worker = Worker(4, pages=40)
    large = Asked(list(range(2, 90)), SamplingParams(max_tokens=4, seed=7, n=8))
    small = [Asked(list(range(2, 22)), SamplingParams(max_tokens=4, seed=7, n=8)) for _ in range(99)]
    assert worker.try_again("small", small.pop())
    for turn in range(300):
        if worker.try_again("large", large):
            break
        # Others take all that they may.
        if worker.try_again(f"small{turn}", small[-1]):
            small.pop()
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
        if worker.try_again(*coming[0]):
            coming.pop(0)
        elif not worker.run_once():
            worker.now += REFUSED_PRIORITY_S
        if all(asked.over for asked in worker.asked.values()) or dice.random() < 0.1:
            worker.finish_with_replays()
    worker.finish_with_replays()


def claimant(session: int, name: str = "large") -> Claimant:
    return session, AttemptKey(name, 0)


def set_aside(claims: Claims, free: int, now: float, asking: Claimant | None = None) -> int:
    """Pages that are set aside for others when `free` are free."""
    claims.record_free(free, now)
    return claims.pages_set_aside(asking)


def generations(pages: int, need: int) -> list[int]:
    """A full pool in which others take all that they may: what they get in each generation until the claim is met."""
    claims, large = Claims(), claimant(0)
    free, others, got = 0, pages, []
    claims.add(large, need, 0.0)
    assert set_aside(claims, free, 0.0) == 0
    while free < need:
        # All that runs ends, page by page, and each time others come.
        ending, others = others, 0
        for _ in range(ending):
            free += 1
            claims.renew(large, 0.0)
            took = max(free - set_aside(claims, free, 0.0), 0)
            free, others = free - took, others + took
            claims.remove_granted(claimant(1), free)
        got.append(others)
        assert len(got) < 100
    assert set_aside(claims, free, 0.0, large) == 0
    return got


@pytest.mark.parametrize("pages", [1, 2, 10, 1000])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.9, 1.0])
def test_a_claim_of_a_share_of_all_pages_waits_for_a_bounded_number_of_generations(pages: int, share: float) -> None:
    need = max(int(pages * share), 1)
    got = generations(pages, need)
    rest = (pages - need) / pages
    assert len(got) <= 1 + math.ceil(min(-math.log2(rest) if rest else math.inf, math.log2(pages)))
    # Of what came free, others got half at least, and all that the claim does not need.
    for before, now in zip([pages, *got], got, strict=False):
        assert now >= before // 2


def test_growth_takes_from_both_halves_and_what_it_gives_back_counts_once() -> None:
    claims = Claims()
    claims.add(claimant(0), 50, 0.0)
    assert set_aside(claims, 20, 0.0) == 10
    assert set_aside(claims, 10, 0.0) == 5
    assert set_aside(claims, 20, 0.0) == 10
    assert set_aside(claims, 0, 0.0) == 0
    assert set_aside(claims, 200, 0.0) == 50


def test_a_claim_that_nobody_renews_lapses() -> None:
    claims = Claims()
    claims.add(claimant(0), 50, 0.0)
    assert set_aside(claims, 20, 0.0) == 10
    claims.renew(claimant(0), CLAIM_S / 2)
    claims.renew(claimant(0, "another"), CLAIM_S)
    assert set_aside(claims, 20, CLAIM_S) == 10
    assert set_aside(claims, 20, 1.5 * CLAIM_S) == 0
    claims.renew(claimant(0), 1.6 * CLAIM_S)
    assert set_aside(claims, 20, 1.6 * CLAIM_S) == 0


def test_sessions_and_forks_have_one_claim_each_and_the_oldest_is_met_first() -> None:
    claims, now = Claims(), 0.0
    for each in (claimant(1, "a"), claimant(1, "b"), claimant(2, "c"), FORKS):
        claims.add(each, 10, now)
    met = []
    for wanted in (claimant(1, "a"), claimant(1, "d"), claimant(2, "c"), FORKS, claimant(1, "d")):
        assert set_aside(claims, 20, now) == 10
        if set_aside(claims, 20, now, wanted) == 0:
            met.append(wanted)
            claims.remove_granted(wanted, 20)
        claims.add(claimant(1, "d"), 10, now)
    # The next one of session 1 is behind those of the others.
    assert met == [claimant(1, "a"), claimant(2, "c"), FORKS, claimant(1, "d")]
    claims.drop_session(1)
    assert set_aside(claims, 20, now) == 0


def busy(slots: int, rate: float, lead_s: float, until: float = 10 * SPAN_S) -> SlotForecast:
    """SlotForecast that has seen `rate` completions a second for long, and readiness `lead_s` after reservation."""
    admission = SlotForecast(slots, 0.0)
    admission.record_ready(lead_s)
    for n in range(int(until * rate)):
        admission.record_end((n + 1) / rate)
    return admission


def test_without_measurements_the_slots_are_the_limit() -> None:
    admission = SlotForecast(8, 0.0)
    admission.check(7, 0.0)
    with pytest.raises(
        Overloaded, match=r"8 sequences are held for 8 slots, of which 0 .* one more would wait"
    ) as refused:
        admission.check(8, 0.0)
    assert refused.value.retry_after == USUAL_RETRY_S


def test_admission_allows_for_the_slots_that_become_free_in_time() -> None:
    admission, now = busy(32, rate=10.0, lead_s=0.5), 10 * SPAN_S
    assert admission.rate(now) == pytest.approx(10.0, rel=0.02)
    assert admission.lookahead(now) == 5
    admission.check(36, now)
    with pytest.raises(Overloaded, match="of which 5 will be free in time") as refused:
        admission.check(38, now)
    # Two too many, and ten end in a second.
    assert refused.value.retry_after == pytest.approx(0.2, rel=0.02)


def test_no_more_than_a_quarter_of_the_slots_is_ahead_whatever_was_measured() -> None:
    assert busy(32, rate=10.0, lead_s=60.0).lookahead(10 * SPAN_S) == 8
    assert busy(3, rate=10.0, lead_s=60.0).lookahead(10 * SPAN_S) == 0


def test_a_rate_is_of_late_and_right_from_the_first_second_on() -> None:
    admission = busy(32, rate=10.0, lead_s=0.5, until=2.0)
    assert admission.rate(2.0) == pytest.approx(10.0, rel=0.1)
    assert admission.rate(2.0 + 3 * SPAN_S) < 1.0
    assert admission.lookahead(2.0 + 3 * SPAN_S) == 0
    eager = SlotForecast(32, 0.0)
    eager.record_end(0.001, 4)
    assert eager.rate(0.001) < 5.0


def test_the_lead_follows_what_is_measured() -> None:
    admission, now = busy(64, rate=10.0, lead_s=0.2), 10 * SPAN_S
    assert admission.lookahead(now) == 2
    for _ in range(60):
        admission.record_ready(1.0)
    assert admission.lookahead(now) == 10


class SlotWorker:
    """A worker that is never empty of either side: which side gets each slot that comes free."""

    def __init__(self, slots: int) -> None:
        self.admission, self.now, self.held = SlotForecast(slots, 0.0), 0.0, 0

    def fork(self) -> bool:
        if not self.admission.may_fork(self.held, self.now):
            return False
        self.admission.record_fork()
        self.held += 1
        return True

    def reserve(self, *, pending: bool = True) -> bool:
        try:
            self.admission.check(self.held, self.now)
        except Overloaded:
            return False
        self.admission.record_grant(self.now, pending=pending)
        self.held += 1
        return True


@pytest.mark.parametrize("slots", [1, 2, 7, 8, 32])
def test_forks_and_reservations_take_turns_where_both_want_every_slot(slots: int) -> None:
    worker = SlotWorker(slots)
    while worker.fork() or worker.reserve():
        pass
    assert worker.held == slots
    got = []
    for _ in range(40):
        worker.held -= 1
        # Forks are always there first; a router comes when it hears of the slot.
        got.append("fork" if worker.fork() else "other" if worker.reserve() else "nobody")
        assert not worker.fork()
        assert not worker.reserve()
    assert got in (["fork", "other"] * 20, ["other", "fork"] * 20)


@pytest.mark.parametrize("slots", [8, 32])
def test_forks_leave_a_share_of_the_slots_to_a_request_that_comes_now(slots: int) -> None:
    worker = SlotWorker(slots)
    while worker.fork():
        pass
    assert worker.held == slots - slots // FORK_HEADROOM_DIVISOR
    assert worker.reserve()


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 4), (12.0, 5), (1000.0, 16)])
def test_forks_leave_more_slots_where_reservations_come_often(rate: float, kept: int) -> None:
    worker = SlotWorker(32)
    worker.now = 10 * SPAN_S
    for n in range(int(4 * SPAN_S * rate)):
        worker.admission.record_grant(6 * SPAN_S + n / rate, pending=False)
    assert worker.admission.fork_headroom(worker.now) == kept
    while worker.fork():
        pass
    assert worker.held == 32 - kept
    while kept > 32 // FORK_HEADROOM_DIVISOR and (at := worker.admission.wake_at(worker.held, worker.now)) < math.inf:
        assert at > worker.now, "they are tried again"
        worker.now = at
        while worker.fork():
            pass
    assert worker.held == 32 - 32 // FORK_HEADROOM_DIVISOR


def test_slots_are_left_only_for_whoever_was_refused_and_only_for_a_while() -> None:
    worker = SlotWorker(7)
    while worker.fork():
        pass
    assert worker.held == 7
    assert not worker.reserve()
    worker.held = 0
    assert not worker.fork()
    worker.now = REFUSED_PRIORITY_S
    assert worker.fork()


@pytest.mark.parametrize("slots", [2, 7, 32])
def test_slots_that_come_free_all_at_once_are_shared_as_well(slots: int) -> None:
    worker = SlotWorker(slots)
    while worker.fork() or worker.reserve():
        pass
    for _ in range(2):
        worker.held, got = 0, []
        while len(got) < slots:
            got.append("fork" if worker.fork() else "other" if worker.reserve() else "nobody")
        assert abs(got.count("fork") - got.count("other")) <= 1
        assert not worker.reserve()
    # Nobody comes behind the last one.
    worker.held = 1
    while worker.fork():
        pass
    assert worker.held == 1 + worker.admission._fork_owed
    worker.now += REFUSED_PRIORITY_S
    assert worker.fork() or slots == 2


def test_a_fork_that_cant_take_its_turn_keeps_nobody_from_the_slot() -> None:
    worker = SlotWorker(1)
    assert worker.reserve()
    worker.held -= 1
    assert not worker.reserve()
    worker.admission.record_fork()
    assert worker.reserve(pending=False)


def test_the_time_to_retry_is_bounded() -> None:
    assert busy(32, rate=1000.0, lead_s=0.1, until=20.0).retry_after(20.0) == MIN_RETRY_S
    assert busy(32, rate=10.0, lead_s=0.1).retry_after(20 * SPAN_S, 9) == MAX_RETRY_S
