"""Arbitrary interleavings of reservations, fetches, cancels, deadlines, steps, faults and lost sessions.

Whatever happens, each attempt ends exactly once, its tokens are those of its prompt, nothing is told of an attempt
that ended, and the pages and the host memory in use are those of live attempts; once all is over, none is. Pool and
host memory are small, so that sequences are paused, come back, and are given back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from baton.engine.contract import Engine, KvHandle
from baton.errors import IncompleteTransfer
from baton.request import FinishReason, Handoff, SamplingParams
from baton.worker.config import WorkerConfig
from baton.worker.status import WorkerRole, new_identity
from decode_svc.admission import Admission
from decode_svc.config import DecodeConfig
from decode_svc.loop import Report
from decode_svc.messages import AttemptKey, Cancel, Down, Reserve, Start
from decode_svc.service import DecodeService
from decode_svc.session import Session
from tests.decoding import LoggingEngine, Prefilled, alone, prefill

PROMPTS = {length: list(range(3, 3 + length)) for length in (1, 4, 7)}
SEQUENTIAL = asyncio.new_event_loop()


@dataclass(eq=False)
class Try:
    """An attempt as its router sees it."""

    session: Session
    key: AttemptKey
    ready: Prefilled
    fetched: asyncio.Future[None]
    granted: bool = False
    started: bool = False
    told_to_end: bool = False
    failed: bool = False
    cancelled: set[int] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether nothing may be told of it any more."""
        choices = set(self.tokens)
        return self.failed or self.told_to_end or choices <= set(self.finished) | self.cancelled


class DecodeMachine(RuleBasedStateMachine):
    """Drives the service and, turn by turn, its engine loop."""

    sessions = Bundle("sessions")
    tries = Bundle("tries")

    def __init__(self) -> None:
        super().__init__()
        self.loop = SEQUENTIAL
        self.engine = LoggingEngine(page_size=4, pages=24, slots=3, max_model_len=64, host_kv_memory=64 * 64)
        self.by_transfer: dict[str, Try] = {}
        self.numbers = itertools.count()
        self.tasks: list[asyncio.Task[None]] = []
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        identity = new_identity(WorkerConfig(), WorkerRole.DECODE, self.engine.spec, "")
        config = DecodeConfig(start_timeout_s=1000, reserve_tokens=2)
        self.service = DecodeService(config, self.engine, identity, self._fetch)
        self.service._admission = Admission(8, 0.0)
        # Reports on their way from one thread to the other: commands may overtake them.
        self.reports: list[Report] = []
        self.service.loop._emit = self.reports.append

    async def _fetch(
        self, channel: object, engine: Engine, handle: KvHandle, *, transfer_id: str, **rest: object
    ) -> Handoff:
        ours = self.by_transfer[transfer_id]
        await ours.fetched
        ours.ready.write(engine, handle)
        return ours.ready.handoff

    def _settle(self) -> None:
        async def settle() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    def _call(self, function: Callable[..., object], *args: object) -> None:
        async def call() -> None:
            function(*args)

        self.loop.run_until_complete(call())
        self._settle()

    async def _listen(self, session: Session) -> None:
        async for down in session.messages():
            self._told(session, down)

    def _told(self, session: Session, down: Down) -> None:
        for result in down.reserved:
            self._of(session, result.key).granted = result.granted
        for failure in down.failures:
            ours = self._of(session, failure.key)
            assert ours.granted
            assert not ours.ended
            ours.failed = True
        for output in down.outputs:
            ours, choice = self._of(session, output.key), output.choice_index
            assert not ours.ended
            assert choice not in ours.cancelled
            assert choice not in ours.finished
            assert output.output_index == len(ours.tokens[choice])
            ours.tokens[choice] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                ours.finished[choice] = output.finish

    def _of(self, session: Session, key: AttemptKey) -> Try:
        (ours,) = (each for each in self.by_transfer.values() if each.session is session and each.key == key)
        return ours

    @initialize(target=sessions)
    def first_session(self) -> Session:
        return self.open_session()

    @rule(target=sessions)
    def open_session(self) -> Session:
        async def opened() -> Session:
            session = self.service.open_session("router")
            self.tasks.append(asyncio.create_task(self._listen(session)))
            return session

        return self.loop.run_until_complete(opened())

    @rule(session=consumes(sessions))
    def lose_session(self, session: Session) -> None:
        for ours in self.by_transfer.values():
            ours.told_to_end |= ours.session is session
        self._call(self.service.close_session, session)
        late = AttemptKey("late", 0)
        self._call(self.service.handle, session, Reserve(late, 1, 1, 1))
        assert self.service.attempts.get(session.number, late) is None

    @rule(
        target=tries,
        session=sessions,
        length=st.sampled_from(sorted(PROMPTS)),
        max_tokens=st.sampled_from([1, 2, 5, 12, 40]),
        choices=st.integers(1, 3),
    )
    def reserve(self, session: Session, length: int, max_tokens: int, choices: int) -> object:
        key = AttemptKey(f"r{next(self.numbers)}", 0)
        params = SamplingParams(max_tokens=max_tokens, seed=5, n=choices)
        ready = prefill(PROMPTS[length], params, request_id=key.request_id, choices=range(choices))
        ours = Try(session, key, ready, self.loop.create_future())
        for first in ready.handoff.first_tokens:
            ours.tokens[first.choice_index] = [first.token.token_id]
            if first.finish is not None:
                ours.finished[first.choice_index] = first.finish
        self.by_transfer[key.request_id] = ours
        paused = self.service.loop.paused
        self._call(self.service.handle, session, Reserve(key, length, max_tokens, choices))
        assert not (paused and ours.granted)
        return ours if ours.granted else multiple()

    @rule(ours=tries, expired=st.sampled_from([False, False, True]))
    def start(self, ours: Try, expired: bool) -> None:
        if ours.session.number in self._open_sessions() and not ours.ended and not ours.started:
            ours.started = True
            deadline = 0.0 if expired else None
            self._call(
                self.service.handle, ours.session, Start(ours.key, ours.key.request_id, "127.0.0.1:1", "i", deadline)
            )
            assert ours.failed or not expired

    @rule(ours=tries, good=st.sampled_from([True, True, False]))
    def end_fetch(self, ours: Try, good: bool) -> None:
        if ours.started and not ours.fetched.done():
            if good:
                ours.fetched.set_result(None)
            else:
                ours.fetched.set_exception(IncompleteTransfer("a range is missing"))
            self._settle()

    @rule(
        session=sessions,
        length=st.sampled_from(sorted(PROMPTS)),
        max_tokens=st.sampled_from([5, 40]),
        choices=st.integers(1, 3),
    )
    def reserve_start_and_fetch(self, session: Session, length: int, max_tokens: int, choices: int) -> None:
        ours = self.reserve(session, length, max_tokens, choices)
        if isinstance(ours, Try):
            self.start(ours, False)
            self.end_fetch(ours, True)

    @rule(ours=tries)
    def cancel(self, ours: Try) -> None:
        if ours.session.number in self._open_sessions():
            ours.told_to_end = True
            self._call(self.service.handle, ours.session, Cancel(ours.key))

    @rule(ours=tries, choice=st.integers(0, 2))
    def cancel_choice(self, ours: Try, choice: int) -> None:
        if ours.session.number in self._open_sessions() and choice in ours.tokens:
            ours.cancelled.add(choice)
            self._call(self.service.handle, ours.session, Cancel(ours.key, choice))

    @rule(fails=st.sampled_from(["", "", "", "out of memory"]))
    def turn(self, fails: str) -> None:
        self.engine.fail_next = fails
        self.service.loop.drop([])
        self.service.loop.turn()
        self.engine.fail_next = ""

    @rule(turns=st.integers(5, 40))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn("")
            self.deliver()

    @rule()
    def deliver(self) -> None:
        while self.reports:
            self._call(self.service._reported, self.reports.pop(0))

    def _open_sessions(self) -> set[int]:
        return set(self.service._sessions)

    @invariant()
    def pages_belong_to_live_attempts(self) -> None:
        live = {str(attempt.key) for attempt in self.service.attempts}
        owners = {"/".join(owner.split("/")[:2]) for owner in (*self.engine.audit(), *self.engine.host_kv())}
        if not self.service.loop._inbox.qsize():
            assert owners <= live

    @invariant()
    def tokens_are_those_of_the_prompt(self) -> None:
        for ours in self.by_transfer.values():
            handoff = ours.ready.handoff
            for choice, tokens in ours.tokens.items():
                expected = alone(handoff.prompt_ids, handoff.params, choice)
                assert tokens == expected[: len(tokens)]
                assert choice not in ours.finished or tokens == expected

    def teardown(self) -> None:
        started = [ours for ours in self.by_transfer.values() if ours.started and not ours.ended]
        for ours in started:
            self.end_fetch(ours, True)
        for _ in range(1000):
            if all(ours.ended for ours in started):
                break
            self.turn("")
            self.deliver()
        assert all(ours.ended for ours in started)
        for session in list(self.service._sessions.values()):
            self.lose_session(session)
        # Without a turn: what ended has given everything back at once.
        assert self.engine.audit() == {}
        assert len(self.service.attempts) == 0
        assert not len(self.service._deadlines)
        assert not len(self.service._fetches)
        assert self.engine.host_kv() == {}
        self.loop.run_until_complete(asyncio.wait_for(self._close(), 10))

    async def _close(self) -> None:
        turning = asyncio.get_running_loop().create_future()
        turning.set_result(None)
        await self.service.close(turning)
        await asyncio.gather(*self.tasks)


@pytest.fixture(autouse=True, scope="module")
def _close_loop() -> Iterator[None]:
    yield
    SEQUENTIAL.close()


TestDecode = DecodeMachine.TestCase
TestDecode.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
