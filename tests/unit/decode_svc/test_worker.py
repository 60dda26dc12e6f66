"""Deadlines of attempts: a result that reaches the loop in time counts, however late the loop handles it.

Reservations that wait, and those that replace many cached blocks: others are served meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from baton.config.worker import DecodeConfig, WorkerConfig
from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import EngineError
from baton.request import CachePolicy, Handoff, RemoteExport, ReserveResult, SamplingParams
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import ExportFetcher
from baton.worker.health import Watchdog, WorkerAudit
from baton.worker.prefix_cache import CacheAdmin
from baton.worker.start import WorkerParts
from baton.worker.status import WorkerRole, new_identity
from decode_svc.messages import AttemptKey, Cancel, FailureKind, Heartbeat, Reserve, Start
from decode_svc.session import RouterSession
from decode_svc.worker import DecodeWorker
from tests.decoding import GREEDY, digests, prefill
from tests.prefix_cache import MemoryPrefixCache
from tests.property.virtual import VirtualLoop

PROMPT, FETCH_S = (3, 4, 5), 20.3


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


def fetcher(fetch: Callable[..., Awaitable[Handoff]]) -> ExportFetcher:
    return cast(ExportFetcher, SimpleNamespace(fetch=fetch))


def made(loop: VirtualLoop, engine: FakeEngine, fetch: Callable[..., Awaitable[Handoff]]) -> DecodeWorker:
    """A worker without its engine thread. A fetch may take FETCH_S for three tokens."""

    def make() -> DecodeWorker:
        identity = new_identity(WorkerConfig(), WorkerRole.DECODE, engine.spec, "")
        # And a tenth of a second for each token.
        config = DecodeConfig(fetch_timeout_s=FETCH_S - 0.3)
        cache, exports = MemoryPrefixCache(), ExportRegistry(engine, "ours")
        tiers = CacheAdmin(engine, cache)
        audit = WorkerAudit(identity, engine)
        parts = WorkerParts(engine, exports, cache, tiers, Watchdog(), audit, lambda: None)
        return DecodeWorker(config, parts, fetcher(fetch))

    return loop.call(make)


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_fetch_that_ends_at_the_deadline_is_in_time(loop: VirtualLoop, late_s: float) -> None:
    engine, ready = FakeEngine(), prefill(PROMPT, SamplingParams(max_tokens=8, seed=1), request_id="r")
    fetched: asyncio.Future[None] = loop.create_future()

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        await fetched
        ready.write(engine, handle, tokens.start)
        return ready.handoff

    worker = made(loop, engine, fetch)
    session, key = loop.call(worker.open_session, "router"), AttemptKey("r", 0)
    loop.call(worker.handle_command, session, Reserve(key, len(PROMPT), 8, 1))
    # Before the worker's own timer, at the same instant.
    loop.call_at(loop.now + FETCH_S + late_s, fetched.set_result, None)
    loop.call(worker.handle_command, session, Start(key, RemoteExport("t", "theirs", ())))
    loop.advance(FETCH_S + late_s)
    failures = [(failure.kind, failure.message) for _, failure in session._down.failures]
    late = [(FailureKind.TRANSFER, "r/0 was still transferring after 20.3 s, prefill included (--fetch-timeout-s)")]
    assert failures == (late if late_s else [])
    assert len(worker.attempts) == (not late_s)
    loop.call(worker.close_session, session)
    assert engine.audit() == {}


def test_a_router_gets_the_end_of_an_attempt_that_ends_with_its_first_token(loop: VirtualLoop) -> None:
    """Its own word for it may come late: it must not take the attempt for lost meanwhile."""
    engine, ready = FakeEngine(), prefill(PROMPT, SamplingParams(max_tokens=1, seed=1), request_id="r")

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        ready.write(engine, handle, tokens.start)
        return ready.handoff

    worker = made(loop, engine, fetch)
    session, key = loop.call(worker.open_session, "router"), AttemptKey("r", 0)
    loop.call(worker.handle_command, session, Reserve(key, len(PROMPT), 1, 1))
    loop.call(worker.handle_command, session, Start(key, RemoteExport("t", "theirs", ())))
    loop.advance(1.0)
    assert (session._down.ended, session._down.failures) == ([key], [])
    assert len(worker.attempts) == 0
    loop.call(worker.close_session, session)


@dataclass
class Evicting:
    """A worker that evicts two pages at a time, whose 14 pages are full of the cached blocks of two contexts."""

    loop: VirtualLoop
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(pages=14))
    answers: list[tuple[str, str]] = field(default_factory=list)
    """The requests in the order in which they were answered, and whether they were granted, wait or were refused."""

    def __post_init__(self) -> None:
        self.worker = made(self.loop, self.engine, cast(Any, None))
        self.contexts = [[number] * 16 * 7 for number in (1, 2)]
        for ids in self.contexts:
            self.engine.free(self.engine.reserve("cached", len(ids)), digests(self.engine, ids))
        assert self.engine.stats().cached == 14

    def open_session(self) -> RouterSession:
        session, send = self.loop.call(self.worker.open_session, "router"), RouterSession.send

        def noted(key: AttemptKey, message: Any) -> None:
            if isinstance(message, ReserveResult):
                answer = "granted" if message.granted else "waits" if message.waiting else "refused"
                self.answers.append((key.request_id, answer))
            send(session, key, message)

        session.send = noted  # type: ignore[method-assign]
        return session

    def ask(
        self,
        session: RouterSession,
        name: str,
        pages: int,
        prefix: Sequence[int] = (),
        attempt: int = 0,
        outputs: int = 1,
    ) -> None:
        """Soon ask for so many pages, including those of `outputs` tokens."""
        names = b"".join(digests(self.engine, prefix))
        request = Reserve(AttemptKey(name, attempt), pages * 16 - outputs, outputs, 1, prefix_digests=names)
        self.loop.call_soon(self.worker.handle_command, session, request)


@pytest.fixture
def evicting(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Evicting]:
    monkeypatch.setattr("baton.kv.pool.SLICE_PAGES", 2)
    monkeypatch.setattr("decode_svc.admission.SLICE_NODES", 2)
    made = Evicting(loop)
    yield made
    for session in list(made.worker.sessions.values()):
        loop.call(made.worker.close_session, session)
    assert made.engine.audit() == {}


@pytest.mark.parametrize("outputs", [1, 160])
def test_others_are_served_while_blocks_are_evicted_for_a_long_context_or_output(
    evicting: Evicting, outputs: int
) -> None:
    first, second = evicting.open_session(), evicting.open_session()
    evicting.ask(first, "long", 12, evicting.contexts[0][:32], outputs=outputs)
    evicting.ask(second, "short", 1)
    evicting.loop.settle()
    assert evicting.answers == [("short", "granted"), ("long", "granted")]
    assert evicting.engine.match_prefix(digests(evicting.engine, evicting.contexts[0])) == 32, "its own prefix stays"


def kept(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[DecodeWorker, RouterSession]:
    """A worker with so many attempts of one session, of which each has a pending choice and no sequence."""
    engine = FakeEngine(pages=4 * count, page_size=4, slots=count)
    ready = prefill(PROMPT, SamplingParams(max_tokens=8, seed=1, n=2), request_id="r", choices=range(2), page_size=4)

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        ready.write(engine, handle, tokens.start)
        return replace(ready.handoff, request_id=source.transfer_id)

    worker = made(loop, engine, fetch)
    session = loop.call(worker.open_session, "router")
    with monkeypatch.context() as patched:
        patched.setattr(worker.admission, "_fork_next", lambda *_: False)
        for number in range(count):
            key = AttemptKey(f"r{number}", 0)
            loop.call(worker.handle_command, session, Reserve(key, len(PROMPT), 8, 2))
            loop.call(worker.handle_command, session, Start(key, RemoteExport(key.request_id, "theirs", ())))
            loop.call(worker.handle_command, session, Cancel(key, 0))
    assert worker.attempts.pending_choices == count
    return worker, session


def test_forks_that_all_fail_end_all_attempts_and_nothing_else(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, session = kept(loop, monkeypatch, 400)
    monkeypatch.setattr(worker.attempts, "fork", Mock(side_effect=EngineError("broken")))
    loop.call(worker.resume_waiting)
    loop.settle()
    assert {failure.kind for _, failure in session._down.failures} == {FailureKind.ENGINE}
    assert (len(session._down.failures), worker._engine.audit()) == (400, {})
    loop.call(worker.close_session, session)


@pytest.mark.parametrize("end", ["session", "drain", "heartbeat"])
def test_no_choice_is_forked_of_attempts_that_end_together(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    worker, session = kept(loop, monkeypatch, 4)
    fork = Mock(side_effect=worker.attempts.fork)
    monkeypatch.setattr(worker.attempts, "fork", fork)
    match end:
        case "session":
            loop.call(worker.close_session, session)
        case "drain":
            loop.call(worker.cut_short, 1.0)
        case "heartbeat":
            loop.call(worker.handle_command, session, Heartbeat(frozenset()))
    assert (fork.call_count, len(worker.attempts), worker._engine.audit()) == (0, 0, {})
    loop.call(worker.close_session, session)


def test_a_drain_ends_the_eviction_for_a_long_context(evicting: Evicting) -> None:
    evicting.ask(evicting.open_session(), "long", 12)
    evicting.loop.call_soon(evicting.worker.refuse)
    evicting.loop.settle()
    assert evicting.answers == [("long", "refused")]
    assert evicting.engine.stats().cached == 12, "one slice of two pages"


def test_nothing_is_evicted_for_a_long_context_that_waits_for_a_slot(evicting: Evicting) -> None:
    session = evicting.open_session()
    for slot in range(evicting.engine.spec.slots):
        evicting.ask(session, f"r{slot}", 1)
    evicting.loop.settle()
    cached = evicting.engine.stats().cached
    evicting.ask(session, "long", 5)
    evicting.loop.settle()
    assert (evicting.answers[-1], evicting.engine.stats().cached) == (("long", "waits"), cached)
    evicting.loop.call(evicting.worker.handle_command, session, Cancel(AttemptKey("r0", 0)))
    assert evicting.answers[-1] == ("long", "granted")


def test_no_more_is_evicted_for_a_session_that_has_ended(evicting: Evicting) -> None:
    session = evicting.open_session()
    evicting.ask(session, "long", 12)
    evicting.loop.call_soon(evicting.worker.close_session, session)
    evicting.loop.settle()
    assert evicting.engine.stats().cached == 12, "one slice of two pages"
    other = evicting.open_session()
    for slot in range(evicting.engine.spec.slots):
        evicting.ask(other, f"r{slot}", 1)
    evicting.loop.settle()
    assert all(answer == "granted" for _, answer in evicting.answers), "no slot is kept"


def test_blocks_of_a_long_context_are_published_in_slices(evicting: Evicting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.prefix_cache.PUBLISH_BLOCKS", 2)
    published = list[int]()
    publish = evicting.engine.publish
    monkeypatch.setattr(evicting.engine, "publish", lambda *each: (published.append(len(each[1])), publish(*each)))
    ready = prefill([7] * 90, GREEDY, page_size=16)

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        ready.write(evicting.engine, handle, tokens.start)
        return ready.handoff

    evicting.worker._fetcher = fetcher(fetch)
    session, key = evicting.open_session(), AttemptKey("r", 0)
    evicting.loop.call(evicting.worker.handle_command, session, Reserve(key, 90, 4, 1))
    evicting.loop.call(evicting.worker.handle_command, session, Start(key, RemoteExport("t", "theirs", ())))
    assert published == [2, 4, 5]
    assert evicting.engine.match_prefix(digests(evicting.engine, [7] * 90)) == 80


def test_of_two_long_contexts_that_replace_blocks_at_the_same_time_one_is_granted(evicting: Evicting) -> None:
    sessions = [evicting.open_session() for _ in "ab"]
    for session, name, ids in zip(sessions, "ab", evicting.contexts, strict=True):
        evicting.ask(session, name, 13, ids[:32])
    evicting.loop.settle()
    assert evicting.answers == [("b", "waits"), ("a", "granted")], "b is told at once, so that its router asks others"


@pytest.mark.parametrize("attempt", [0, 1])
def test_no_later_reservation_gets_the_slot_of_a_long_context(evicting: Evicting, attempt: int) -> None:
    session, others = evicting.open_session(), evicting.open_session()
    for slot in range(evicting.engine.spec.slots):
        evicting.ask(session, f"r{slot}", 1)
    evicting.ask(session, "long", 5, attempt=attempt)
    for number in range(4):
        evicting.ask(session, f"same{number}", 1)
        evicting.ask(others, f"other{number}", 1)
    evicting.loop.settle()
    evicting.answers.clear()
    for slot in range(2):
        evicting.loop.call_soon(evicting.worker.handle_command, session, Cancel(AttemptKey(f"r{slot}", 0)))
    evicting.loop.settle()
    # The second slot is for others.
    assert sorted(evicting.answers) == [("long", "granted"), ("other0", "granted")]


def test_half_of_the_pages_are_set_aside_for_the_long_context_for_which_blocks_are_evicted(evicting: Evicting) -> None:
    first, second = evicting.open_session(), evicting.open_session()
    evicting.ask(first, "long", 12)
    for number in range(5):
        evicting.ask(second, f"other{number}", 2)
    evicting.loop.settle()
    assert [name for name, answer in evicting.answers if answer == "granted"] == ["other0", "other1", "other2"]
    for number in range(5):
        evicting.loop.call(evicting.worker.handle_command, second, Cancel(AttemptKey(f"other{number}", 0)))
    evicting.loop.settle()
    assert evicting.answers[-1] == ("long", "granted")


def test_blocks_that_a_request_may_only_read_are_not_published(evicting: Evicting) -> None:
    ids = [7] * 32 + [8] * 58
    evicting.engine.free(evicting.engine.reserve("cached", 32), digests(evicting.engine, ids[:32]))
    ready = prefill(ids, GREEDY, page_size=16)

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        assert tokens.start == 32
        return ready.handoff

    evicting.worker._fetcher = fetcher(fetch)
    session, key = evicting.open_session(), AttemptKey("r", 0)
    names = b"".join(digests(evicting.engine, ids[:32]))
    reserve = Reserve(key, 90, 4, 1, prefix_digests=names, cache=CachePolicy.READ)
    evicting.loop.call(evicting.worker.handle_command, session, reserve)
    evicting.loop.call(evicting.worker.handle_command, session, Start(key, RemoteExport("t", "theirs", ())))
    evicting.loop.settle()
    assert evicting.engine.match_prefix(digests(evicting.engine, ids)) == 32


def test_blocks_that_do_not_follow_the_pinned_ones_are_not_published(loop: VirtualLoop) -> None:
    """Pages of four blocks: the pinned beginning of a page was copied into the attempt's own page."""
    engine, ids = FakeEngine(pages=8, page_size=64), [7] * 32 + [8] * 58
    ready = prefill(ids, GREEDY, page_size=64)

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: range, **limits: float) -> Handoff:
        assert tokens.start == 32
        return ready.handoff

    worker = made(loop, engine, fetch)
    engine.free(engine.reserve("cached", 64), digests(engine, [1] * 64))
    session, key = loop.call(worker.open_session, "router"), AttemptKey("r", 0)
    names = b"".join(digests(engine, [1] * 32))
    loop.call(worker.handle_command, session, Reserve(key, 90, 4, 1, prefix_digests=names))
    loop.call(worker.handle_command, session, Start(key, RemoteExport("t", "theirs", ())))
    loop.settle()
    assert len(worker.attempts) == 0
    assert engine.match_prefix(digests(engine, ids)) == 0
    loop.call(worker.close_session, session)


@dataclass
class Waiting:
    """A worker with one slot, which is taken, and a session with reservations that wait."""

    loop: VirtualLoop
    names: tuple[str, ...] = ("first", "second", "third")

    def __post_init__(self) -> None:
        self.engine = FakeEngine(slots=1)
        self.worker = made(self.loop, self.engine, cast(Any, None))
        self.session = self.loop.call(self.worker.open_session, "router")
        self.ask("runs")
        assert self.answers() == {"runs": "granted"}
        for name in self.names:
            self.ask(name)
        assert self.answers() == dict.fromkeys(self.names, "waits")

    def ask(self, name: str, deadline_s: float | None = None) -> None:
        self.loop.call(self.worker.handle_command, self.session, Reserve(AttemptKey(name, 0), 5, 5, 1, deadline_s))

    def answers(self) -> dict[str, str]:
        """Answers since the last call."""
        told = {
            key.request_id: "granted" if answer.granted else "waits" if answer.waiting else answer.reason
            for key, answer in self.session._down.reserved
        }
        self.session._down.reserved.clear()
        return told

    def cancel(self, name: str) -> None:
        self.loop.call(self.worker.handle_command, self.session, Cancel(AttemptKey(name, 0)))


@pytest.fixture
def waiting(loop: VirtualLoop) -> Iterator[Waiting]:
    made = Waiting(loop)
    yield made
    loop.call(made.worker.close_session, made.session)
    assert made.engine.audit() == {}
    assert len(made.worker.admission) == 0


def test_a_reservation_that_waits_is_granted_when_its_turn_comes(waiting: Waiting) -> None:
    waiting.cancel("first")
    waiting.cancel("runs")
    assert waiting.answers() == {"second": "granted"}
    assert list(waiting.session._live_keys()) == [AttemptKey("second", 0), AttemptKey("third", 0)]


def test_a_grant_that_is_not_started_ends_after_a_while_and_the_next_one_comes(waiting: Waiting) -> None:
    waiting.loop.advance(waiting.worker._config.start_timeout_s + 0.1)
    assert waiting.answers() == {"first": "granted"}


def test_a_reservation_that_waits_is_refused_at_its_deadline(waiting: Waiting) -> None:
    waiting.ask("late", 1.5)
    assert waiting.answers() == {"late": "waits"}
    waiting.loop.advance(1.4)
    assert waiting.answers() == {}
    waiting.loop.advance(0.2)
    assert waiting.answers() == {"late": "its deadline has passed"}


def test_reservations_that_the_router_does_not_list_end(waiting: Waiting) -> None:
    live = Heartbeat(frozenset({AttemptKey("second", 0)}))
    waiting.loop.call(waiting.worker.handle_command, waiting.session, live)
    assert waiting.answers() == {"second": "granted"}
    assert len(waiting.worker.admission) == 0


@pytest.mark.parametrize(("end", "reason"), [("drain", "draining"), ("fail", "engine has failed")])
def test_all_reservations_that_wait_are_refused_when_the_worker_ends(waiting: Waiting, end: str, reason: str) -> None:
    if end == "drain":
        waiting.loop.call(waiting.worker.refuse)
    else:
        waiting.loop.call(waiting.worker.fail_engine, RuntimeError("broken"))
    told = waiting.answers()
    assert set(told) == set(waiting.names)
    assert all(reason in each for each in told.values())
    assert len(waiting.worker.attempts) == (end == "drain")


def test_a_session_with_too_many_reservations_that_wait_ends(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_svc.worker.MAX_WAITING", 3)
    waiting.ask("fourth")
    assert "4 reservations wait; at most 3 may wait in a session" in str(waiting.session.error)
    assert (len(waiting.worker.attempts), len(waiting.worker.admission)) == (0, 0)


def test_the_end_of_a_session_grants_nothing_to_it(waiting: Waiting) -> None:
    other = waiting.loop.call(waiting.worker.open_session, "router")
    waiting.loop.call(waiting.worker.handle_command, other, Reserve(AttemptKey("other", 0), 5, 5, 1))
    waiting.loop.call(waiting.worker.close_session, waiting.session)
    assert waiting.answers() == {}
    assert [answer.granted for _, answer in other._down.reserved] == [False, True]
    waiting.loop.call(waiting.worker.close_session, other)
