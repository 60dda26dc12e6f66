"""A decode worker in simulated time, its engine thread driven turn by turn.

There are requests with one choice and with more than there are slots, fetches that end well, badly or late, deadlines,
cancels, heartbeats that leave attempts out, faults of steps, lost sessions, and a pool so small that reservations wait
and sequences are preempted. Prompts share beginnings, one is the next turn of another, and routers name the blocks of
their prompts, of another's, or none.

Whatever happens: each reservation is granted or ends, each attempt ends once and in time, its tokens are those of its
prompt, nothing is told of what has ended, the pages in use are those of live attempts and of write-backs, and once all
is over there are none. What is left in the pool, what was written back, and what is exported is the KV of the tokens by
which it is named.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from baton.config.worker import DecodeConfig, WorkerConfig
from baton.engine.contract import KvHandle
from baton.errors import EngineError, IncompleteTransfer
from baton.lifecycle import PREFILL_TOKEN_S, State
from baton.request import CachePolicy, Handoff, RemoteExport, SamplingParams
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import ExportFetcher
from baton.worker.health import Watchdog, WorkerAudit
from baton.worker.prefix_cache import CacheAdmin
from baton.worker.start import WorkerParts
from baton.worker.status import WorkerRole, new_identity
from decode_svc.attempts import DecodeAttempt
from decode_svc.loop import StepReport
from decode_svc.messages import AttemptKey, Cancel, Heartbeat, Reserve, Start
from decode_svc.scheduler import DecodeScheduler
from decode_svc.session import RouterSession
from decode_svc.worker import DecodeWorker
from tests.decoding import LoggingEngine, alone, digests, prefill
from tests.effort import machine_test
from tests.prefix_cache import MemoryPrefixCache
from tests.property.attempts import Book, Try, check_left, check_tokens, goes_on, read_prefix, waits
from tests.property.virtual import Hung, VirtualLoop

SEED = 5
FIRST_TURN = tuple(range(3, 7))
NEXT_TURN = (*FIRST_TURN, *alone(FIRST_TURN, SamplingParams(max_tokens=17, seed=SEED))[:10], 8, 9)
PROMPTS = [*(tuple(range(3, 3 + length)) for length in (1, 4, 7, 9)), tuple(range(53, 62)), NEXT_TURN]
PAGES, PAGE, BLOCK = 9, 4, 2
RESERVE_TOKENS = 2
START_S, FETCH_S, COPY_S = 10.0, 20.0, 0.3
PROMPT = st.sampled_from(PROMPTS)
NAMED = st.sampled_from(["its own", "its own", "its own", "none", "another's"])
POLICY = st.sampled_from([CachePolicy.READ_WRITE, CachePolicy.READ_WRITE, CachePolicy.WRITE, CachePolicy.OFF])
CHOICES = st.sampled_from([1, 1, 1, 2, 2, 3, 5, 64])
PICK = st.integers(0, 99)
PATIENCE = st.sampled_from([None, None, 3.0, 30.0])


class DecodeWorkerMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    slots = 3

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(lambda: COPY_S)
        self.engine = LoggingEngine(page_size=PAGE, pages=PAGES, block_size=BLOCK, slots=self.slots, max_model_len=64)
        self.cache = MemoryPrefixCache()
        self.book = Book(self.loop)
        self.tries_of = self.book.tries_of
        self.numbers = itertools.count()
        # Reports on their way from one thread to the other: commands may overtake them.
        self.reports: list[StepReport] = []
        self.asleep = True
        self.open: set[int] = set()
        self.worker = self.loop.call(self._made)

    def _made(self) -> DecodeWorker:
        identity = new_identity(WorkerConfig(), WorkerRole.DECODE, self.engine.spec, "")
        config = DecodeConfig(start_timeout_s=START_S, fetch_timeout_s=FETCH_S, reserve_tokens=RESERVE_TOKENS)
        self.exports = ExportRegistry(self.engine, "ours", unknown_wait_s=0.0)
        parts = WorkerParts(
            self.engine,
            self.exports,
            self.cache,
            CacheAdmin(self.engine, self.cache),
            Watchdog(),
            WorkerAudit(identity, self.engine),
            lambda: None,
        )
        worker = DecodeWorker(config, parts, cast(ExportFetcher, SimpleNamespace(fetch=self._fetch)))
        loop = worker.decode_loop
        loop._emit, loop._preempt = self.reports.append, self._preempt_with(loop._preempt, loop._scheduler)
        worker.attempts.take_pages = self._checked(worker, worker.attempts.take_pages)  # type: ignore[method-assign]
        self.engine.watch_pages(worker.on_pages_returned)
        return worker

    def _checked(self, worker: DecodeWorker, take_pages: Callable[..., DecodeAttempt]) -> Callable[..., DecodeAttempt]:
        """Check that no reservation takes pages that are kept for the batch."""

        def checked(*args: Any) -> DecodeAttempt:
            kept, stats = worker.batch_pages.kept_pages, self.engine.stats()
            attempt = take_pages(*args)
            need = self.engine.spec.pages_for(attempt.handle.capacity)
            assert not kept or need <= stats.free + stats.cached - kept, "it took pages that are kept for the batch"
            return attempt

        return checked

    def _preempt_with(
        self, preempt: Callable[[StepReport], None], scheduler: DecodeScheduler
    ) -> Callable[[StepReport], None]:
        """Note which sequence is preempted, and the ranks of those that stay."""

        def noted(report: StepReport) -> None:
            before = {each.id: each.sort_key for each in scheduler.sequences}
            preempt(report)
            left = {each.id for each in scheduler.sequences}
            (gone,) = before.keys() - left
            assert all(before[gone] > before[each] for each in left)

        return noted

    async def _fetch(
        self, source: RemoteExport, handle: KvHandle, *, tokens: range, length: int, timeout_s: float
    ) -> Handoff:
        ours, engine = self.tries_of[source.transfer_id], self.engine
        assert tokens == range(ours.cached, length)
        try:
            await ours.fetched
        except BaseException:
            # A frame that was on its way when the attempt ended: if it landed anywhere, tokens would differ.
            if not handle.alive:
                with contextlib.suppress(EngineError):
                    ours.ready.write(engine, handle, tokens.start)
            raise
        ours.ready.write(engine, handle, tokens.start)
        return ours.ready.handoff

    @initialize(target=sessions)
    def first_session(self) -> RouterSession:
        return self.open_session()  # type: ignore[return-value]

    @rule(target=sessions)
    def open_session(self) -> RouterSession:
        session = self.loop.call(self.worker.open_session, "router")
        self.loop.spawn(self.book.listen(session))
        self.open.add(session.number)
        return session

    @rule(session=consumes(sessions))
    def lose_session(self, session: RouterSession) -> None:
        for ours in self.tries_of.values():
            ours.told_to_end |= ours.session is session
        self.open.discard(session.number)
        self.loop.call(self.worker.close_session, session)
        late = AttemptKey("late", 0)
        self.loop.call(self.worker.handle_command, session, Reserve(late, 1, 1, 1))
        assert self.worker.attempts.get(session.number, late) is None

    @rule(
        session=sessions,
        prompt=PROMPT,
        max_tokens=st.sampled_from([1, 2, 6, 17]),
        choices=CHOICES,
        patience=PATIENCE,
        named=NAMED,
        cache=POLICY,
    )
    def reserve_one(self, **reserve: Any) -> None:
        self.reserve(**reserve)

    def reserve(
        self,
        session: RouterSession,
        prompt: tuple[int, ...],
        max_tokens: int,
        choices: int,
        patience: float | None,
        named: str = "its own",
        cache: CachePolicy = CachePolicy.READ_WRITE,
    ) -> Try | None:
        key = AttemptKey(f"r{next(self.numbers)}", 0)
        params = SamplingParams(max_tokens=max_tokens, seed=SEED, n=choices)
        ready = prefill(prompt, params, request_id=key.request_id, choices=range(choices))
        now = self.loop.now
        ours = Try(session, key, ready, self.loop.create_future(), now + (patience or math.inf), now)
        others = PROMPTS[4] if prompt[0] == 3 else PROMPTS[3]
        ours.named = {"its own": prompt, "none": (), "another's": others[: len(prompt)]}[named]
        # Nothing with this salt is ever found: what leaves the cache alone is its only user.
        ours.salt = b"" if cache.writes else b"private"
        for first in ready.handoff.first_tokens:
            ours.tokens[first.choice_index] = [first.token.token_id]
            if first.finish is not None:
                ours.finished[first.choice_index] = first.finish
        self.tries_of[key.request_id] = ours
        names = b"".join(digests(self.engine, ours.named, ours.salt))
        request = Reserve(key, len(prompt), max_tokens, choices, patience, names, ours.salt, cache)
        self.loop.call(self.worker.handle_command, session, request)
        assert cache.reads or not ours.cached
        assert ours.granted or ours.waiting
        return ours if ours.granted else None

    def _picked(self, pick: int, *, started: bool | None = None) -> list[Try]:
        """One of those at the worker, if there is one, and if its fetch may begin or end where that is asked for."""
        found = [
            ours
            for ours in self.tries_of.values()
            if (started is None and waits(ours))
            or (
                goes_on(ours)
                and (started is None or (started, False) == (ours.started_at is not None, ours.fetched.done()))
            )
        ]
        return [found[pick % len(found)]] if found else []

    @rule(pick=PICK, patience=PATIENCE)
    def start_one(self, pick: int, patience: float | None) -> None:
        for ours in self._picked(pick, started=False):
            self.start(ours, patience)

    @rule(pick=PICK, good=st.sampled_from([True, True, True, False]))
    def end_one_fetch(self, pick: int, good: bool) -> None:
        for ours in self._picked(pick, started=True):
            self.end_fetch(ours, good)

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        for ours in self._picked(pick):
            ours.told_to_end = True
            self.loop.call(self.worker.handle_command, ours.session, Cancel(ours.key))

    @rule(pick=PICK, choice=st.integers(0, 4))
    def cancel_one_choice(self, pick: int, choice: int) -> None:
        for ours in self._picked(pick):
            self.cancel_choice(ours, choice)

    def start(self, ours: Try, patience: float | None) -> None:
        if ours.session.number in self.open and not ours.ended and ours.started_at is None:
            ours.started_at = self.loop.now
            ours.deadline = min(ours.deadline, self.loop.now + (patience or math.inf))
            start = Start(ours.key, RemoteExport(ours.key.request_id, "i", ()), patience, f"{ours.key}/prefix")
            self.loop.call(self.worker.handle_command, ours.session, start)

    def end_fetch(self, ours: Try, good: bool) -> None:
        if ours.started_at is not None and not ours.fetched.done():
            if good:
                ours.fetched.set_result(None)
            else:
                ours.fetched.set_exception(IncompleteTransfer("a range is missing"))
            self.loop.settle()
            assert ours.ended or (good and not ours.lies)

    @rule(pick=PICK)
    def read_pinned(self, pick: int) -> None:
        for ours in self._picked(pick):
            if ours.started_at is not None:
                self.loop.spawn(read_prefix(self.exports, self.engine, ours))

    @rule(session=sessions, prompt=PROMPT, choices=CHOICES)
    def reserve_start_and_fetch(self, session: RouterSession, prompt: tuple[int, ...], choices: int) -> None:
        ours = self.reserve(session, prompt, 17, choices, None)
        if ours is not None:
            self.start(ours, None)
            self.end_fetch(ours, True)

    @rule(session=sessions, named=st.sampled_from(["another's", "its own"]), choices=st.sampled_from([1, 2]))
    def follow(self, session: RouterSession, named: str, choices: int) -> None:
        """One attempt runs, and another has the same blocks, or says that it has."""
        self.reserve_start_and_fetch(session, PROMPTS[4], 1)
        prompt = PROMPTS[4] if named == "its own" else PROMPTS[3]
        other = self.reserve(session, prompt, 6, choices, None, named)
        if other is not None:
            self.start(other, None)
            self.end_fetch(other, True)

    @rule(session=sessions, cancelled=st.booleans(), then=st.sampled_from(["start", "expire", ""]))
    def squeeze(self, session: RouterSession, cancelled: bool, then: str) -> None:
        """One attempt runs, and another holds the pages into which it would grow."""
        self.reserve_start_and_fetch(session, PROMPTS[2], 1)
        self.turn("")
        other = self.reserve(session, PROMPTS[2], 17, 2, None, "none")
        self.turns(11)
        if other is not None:
            if cancelled:
                self.cancel_choice(other, 0)
            if then == "start":
                self.start(other, None)
                self.end_fetch(other, True)
            elif then == "expire":
                self.pass_time(START_S + 1)

    def cancel_choice(self, ours: Try, choice: int) -> None:
        if ours.session.number in self.open and choice in ours.tokens:
            ours.cancelled.add(choice)
            self.loop.call(self.worker.handle_command, ours.session, Cancel(ours.key, choice))

    @rule(session=sessions, forgotten=st.sets(st.integers(0, 5), max_size=1))
    def heartbeat(self, session: RouterSession, forgotten: set[int]) -> None:
        here = [each for each in self.tries_of.values() if each.session is session]
        going = [each for each in here if goes_on(each) or waits(each)]
        for index in forgotten & set(range(len(going))):
            going[index].told_to_end = True
        live = frozenset(each.key for each in going if not each.told_to_end)
        self.loop.call(self.worker.handle_command, session, Heartbeat(live))

    @rule(fails=st.sampled_from([""] * 6 + ["out of memory"]))
    def turn(self, fails: str) -> None:
        """One turn of the engine thread, unless it sleeps."""
        loop = self.worker.decode_loop
        if self.asleep and loop._inbox.empty():
            return
        self.engine.fail_next = fails
        if loop._inbox.empty() and self._idle():
            # It had looked, and gone on, before this became so.
            loop.drop([])
        self.loop.call(loop.run_once)
        self.asleep = loop._inbox.empty() and self._idle()
        self.engine.fail_next = ""

    def _idle(self) -> bool:
        return self.worker.decode_loop._scheduler.idle

    @rule(count=st.integers(2, 12))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn("")
        self.deliver()

    @rule()
    def deliver(self) -> None:
        while self.reports:
            self.loop.call(self.worker.on_step_report, self.reports.pop(0))

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.deliver()
        self.loop.advance(seconds)

    @invariant()
    def pages_belong_to_live_attempts(self) -> None:
        live = {str(attempt.key) for attempt in self.worker.attempts}
        copied = {entry.owner for entry in self.worker.write_backs.entries(self.loop.now)}
        owners = {owner.removesuffix(" (draining)") for owner in self.engine.audit()} - copied
        if self.worker.decode_loop._inbox.empty():
            assert {"/".join(owner.split("/")[:2]) for owner in owners} <= live

    @invariant()
    def attempts_are_those_that_go_on(self) -> None:
        live = {(attempt.session_number, attempt.key) for attempt in self.worker.attempts}
        assert live == {(ours.session.number, ours.key) for ours in self.tries_of.values() if goes_on(ours)}
        waiting = {(number, key) for number in self.open for key in self.worker.admission.in_session(number)}
        assert waiting == {(ours.session.number, ours.key) for ours in self.tries_of.values() if waits(ours)}
        assert len(self.worker.admission) == len(waiting)

    @invariant()
    def no_state_outlasts_its_deadline(self) -> None:
        for attempt in self.worker.attempts:
            ours, now = self.tries_of[attempt.key.request_id], self.loop.now
            assert now <= ours.deadline
            assert attempt.lifecycle.state is not State.RESERVED or now <= ours.reserved_at + START_S
            assert (
                attempt.lifecycle.state is not State.TRANSFERRING
                or now <= (ours.started_at or 0.0) + FETCH_S + PREFILL_TOKEN_S * attempt.reservation.context_tokens
            )

    @invariant()
    def tokens_are_those_of_the_prompt(self) -> None:
        check_tokens(self.tries_of.values())

    def _progress(self) -> list[Any]:
        tries = self.tries_of.values()
        return [(ours.ended, ours.waiting, sum(map(len, ours.tokens.values()))) for ours in tries]

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self.loop.close()

    def _finish(self) -> None:
        still = 0
        while still < 3 and (going := [ours for ours in self.tries_of.values() if goes_on(ours) or waits(ours)]):
            before = self._progress()
            for ours in going:
                if goes_on(ours):
                    self.start(ours, None)
                    self.end_fetch(ours, True)
            self.turn("")
            self.deliver()
            still = 0 if self._progress() != before else still + 1
        stuck = [ours for ours in self.tries_of.values() if goes_on(ours) or waits(ours)]
        if stuck:
            raise Hung(f"{[str(ours.key) for ours in stuck]} never end")
        for session in list(self.worker.sessions.values()):
            self.lose_session(session)
        for _ in range(3):
            self.turn("")
            self.deliver()
        self.loop.run_until_complete(self.worker.write_backs.wait_finished())
        # Reads of exports that have ended may still be under way.
        self.loop.advance(COPY_S)
        assert self.engine.audit() == {}
        assert len(self.worker.attempts) == 0
        assert not self.exports._open
        check_left(self.engine, self.cache, self.tries_of.values())
        assert self.worker._timer is None
        assert not len(self.worker._transfers)
        self.loop.run_until_complete(self.worker.close())
        self.loop.finish()


class OneSlotMachine(DecodeWorkerMachine):
    """The same with one slot, which all choices of all requests share."""

    slots = 1


TestDecodeWorker = machine_test(DecodeWorkerMachine, 80, 40)
TestOneSlot = machine_test(OneSlotMachine, 30, 40)
