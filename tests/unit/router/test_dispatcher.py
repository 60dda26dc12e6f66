"""From the line to a place, with workers that answer as the test says; no network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from baton.kv.format import KvFormat, KvPart
from baton.lifecycle import Lifecycle, State
from router.breaker import Breakers
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.place import Answers, Application, Place, Reserver
from router.policy import Choice, DecodeView, Demand, Fleet, PrefillView
from router.pool import Pool
from router.session import Reserved

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
GRANTED, FULL = Reserved(True, "", False), Reserved(False, "full", False)


class FakeSeat:
    def __init__(self, pool: FakePool) -> None:
        self._pool = pool
        self._held = True
        pool.seats += 1

    def release(self) -> bool:
        held, self._held = self._held, False
        self._pool.seats -= held
        return held


class FakeAttempt:
    def __init__(self, pool: FakePool) -> None:
        self._pool = pool

    async def reserve(self, **asked: object) -> Reserved:
        await asyncio.sleep(0)
        return self._pool.answer()

    def close(self) -> None:
        self._pool.closed += 1


class FakePool:
    """One prefill and one decode worker; stands for pool, link and session at once."""

    open = True
    name = "d at d:1"
    consumer = "incarnation-d"

    def __init__(self) -> None:
        self.seats = self.closed = self.asked = 0
        self.answers: Reserved = GRANTED
        self.there = True
        self.news: Callable[[], None] = lambda: None
        self.session = self
        self.order: list[str] = []

    def fleet(self) -> Fleet:
        decode = (DecodeView("d", KV, free_tokens=1, free_slots=1),) if self.there else ()
        return Fleet((PrefillView("p", KV, own_requests=self.seats),), decode)

    def on_news(self, listener: Callable[[], None]) -> None:
        self.news = listener

    def missing(self) -> str:
        return "no decode worker is there"

    def forget_snapshot(self) -> None:
        return

    def prefill(self, name: str) -> FakePool:
        return self

    def decode(self, name: str) -> FakePool:
        return self

    def seat(self, tokens: int) -> FakeSeat:
        return FakeSeat(self)

    def attempt(self, request_id: str, number: int, deliver: object) -> FakeAttempt:
        self.order.append(request_id)
        return FakeAttempt(self)

    def answer(self) -> Reserved:
        self.asked += 1
        return self.answers


class Held:
    """A request that takes a place and keeps it until told to go."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        name: str,
        *,
        again: bool = False,
        decodes: bool = True,
        alone: bool = False,
        deadline: float = math.inf,
        tokens: int = 8,
    ) -> None:
        self.placed = asyncio.Event()
        self.go = asyncio.Event()
        self.place: Place | None = None
        demand = Demand(tokens, decodes, alone=alone)
        self.life = Lifecycle(State.LINE, 0.0, request_deadline=deadline)
        asked = Application(name, int(again), "", self.life, demand, 8, 4, (0,), again)
        self.task = asyncio.create_task(self._run(dispatcher, asked))

    async def _run(self, dispatcher: Dispatcher, asked: Application) -> None:
        async with dispatcher.place(asked, lambda event: None) as self.place:
            self.placed.set()
            await self.go.wait()

    async def end(self) -> None:
        self.go.set()
        await self.task


def dispatcher(pool: FakePool, **settings: Any) -> Dispatcher:
    config = RouterConfig(prefill=("p:1",), decode=("d:1",), **settings)
    return Dispatcher(cast(Pool, pool), config)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_full_fleet_is_asked_once_per_news_and_by_the_head_alone() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    pool.answers = FULL
    first = Held(d, "first")
    await settle()
    assert pool.asked == 1
    second = Held(d, "second")
    await settle()
    assert pool.asked == 1
    pool.news()
    await settle()
    assert (pool.asked, pool.order) == (2, ["first", "first"])
    pool.answers = GRANTED
    pool.news()
    await asyncio.gather(first.placed.wait(), second.placed.wait())
    assert (pool.asked, pool.order[2:], pool.seats) == (4, ["first", "second"], 2)
    await asyncio.gather(first.end(), second.end())
    assert (pool.seats, pool.closed) == (0, 2 + 2)


async def test_a_place_that_ends_is_news() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    running = Held(d, "running")
    await running.placed.wait()
    pool.answers = FULL
    waiting = Held(d, "waiting")
    await settle()
    pool.answers = GRANTED
    await running.end()
    await asyncio.wait_for(waiting.placed.wait(), 5)
    await waiting.end()


async def test_news_that_comes_while_decode_is_asked_is_not_lost() -> None:
    pool = FakePool()
    d = dispatcher(pool)

    def answer() -> Reserved:
        pool.answer = lambda: GRANTED  # type: ignore[method-assign]
        pool.news()
        return FULL

    pool.answer = answer  # type: ignore[method-assign]
    held = Held(d, "r")
    await asyncio.wait_for(held.placed.wait(), 5)
    await held.end()


async def test_a_replay_is_neither_refused_nor_overtaken() -> None:
    pool = FakePool()
    d = dispatcher(pool, prefill_limit=1, line_capacity=1)
    running = Held(d, "running")
    await running.placed.wait()
    waiting = Held(d, "waiting")
    await settle()
    refused = Held(d, "refused")
    with pytest.raises(Overloaded, match="1 requests wait, 1 may"):
        await refused.task
    replay = Held(d, "replay", again=True)
    await settle()
    await running.end()
    await asyncio.wait_for(replay.placed.wait(), 5)
    assert pool.order == ["running", "replay"]
    await replay.end()
    await asyncio.wait_for(waiting.placed.wait(), 5)
    await waiting.end()


async def test_cancelling_at_any_point_gives_all_back() -> None:
    for turns in range(12):
        pool = FakePool()
        d = dispatcher(pool, prefill_limit=1)
        cancelled, other = Held(d, "cancelled"), Held(d, "other")
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled.task.cancel()
        await asyncio.gather(cancelled.task, return_exceptions=True)
        await asyncio.wait_for(other.placed.wait(), 5)
        assert pool.seats == 1
        await other.end()
        assert pool.seats == 0


async def test_cancelling_between_the_turn_and_its_use_gives_the_seat_back() -> None:
    pool = FakePool()
    d = dispatcher(pool, prefill_limit=1)
    running = Held(d, "running")
    await running.placed.wait()
    waiting, other = Held(d, "waiting"), Held(d, "other")
    await settle()
    assert running.place is not None
    d.leave(running.place.seat)
    waiting.task.cancel()
    await asyncio.wait_for(other.placed.wait(), 5)
    await asyncio.gather(running.end(), other.end())
    assert pool.seats == 0


async def test_a_turn_passes_over_a_head_that_was_cancelled_and_has_yet_to_wake() -> None:
    pool = FakePool()
    d = dispatcher(pool, prefill_limit=1)
    running = Held(d, "running")
    await running.placed.wait()
    waiting, other = Held(d, "waiting"), Held(d, "other")
    await settle()
    assert running.place is not None
    waiting.task.cancel()
    d.leave(running.place.seat)
    await asyncio.wait_for(other.placed.wait(), 5)
    await asyncio.gather(running.end(), other.end())
    assert pool.seats == 0


async def test_a_cancelled_probe_leaves_the_line_able_to_move() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    pool.answers = FULL
    first, second = Held(d, "first"), Held(d, "second")
    await settle()
    pool.answers = GRANTED
    first.task.cancel()
    pool.news()
    await asyncio.wait_for(second.placed.wait(), 5)
    await second.end()
    assert pool.seats == 0


async def test_what_needs_no_decode_does_not_wait_for_it() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    pool.answers = FULL
    full = Held(d, "full")
    await settle()
    full.task.cancel()
    await asyncio.gather(full.task, return_exceptions=True)
    short = Held(d, "short", decodes=False)
    await asyncio.wait_for(short.placed.wait(), 5)
    assert short.place is not None
    assert short.place.decode is None
    await short.end()


async def test_without_workers_new_requests_are_refused_and_accepted_ones_wait_a_while() -> None:
    pool = FakePool()
    d = dispatcher(pool, worker_wait_s=0.05)
    pool.there = False
    pool.news()
    with pytest.raises(Unavailable, match="no decode worker is there"):
        await Held(d, "new").task
    with pytest.raises(Unavailable, match="no decode worker is there"):
        await asyncio.wait_for(Held(d, "replay", again=True).task, 5)
    saved = Held(d, "saved", again=True)
    await settle()
    pool.there = True
    pool.news()
    await asyncio.wait_for(saved.placed.wait(), 5)
    await saved.end()


async def test_a_decode_worker_that_does_not_answer_is_a_refusal() -> None:
    pool = FakePool()
    d = dispatcher(pool, reserve_timeout_s=0.02)

    async def silent(self: FakeAttempt, **asked: object) -> Reserved:
        return await asyncio.get_running_loop().create_future()

    closed = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeAttempt, "reserve", silent)
        patch.setattr(FakeAttempt, "close", lambda self: closed.set())
        held = Held(d, "r")
        await asyncio.wait_for(closed.wait(), 5)
        await settle()
    assert pool.seats == 0
    pool.news()
    await asyncio.wait_for(held.placed.wait(), 5)
    await held.end()


async def test_never_is_told_at_once_and_moves_the_line() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    pool.answers = Reserved(False, "needs 9 pages, there are 4", True)
    with pytest.raises(InvalidRequest, match=r"1 x \(8 tokens of context \+ 4 to generate\) can never fit: .* 9 pages"):
        await Held(d, "large").task
    pool.answers = GRANTED
    small = Held(d, "small")
    await asyncio.wait_for(small.placed.wait(), 5)
    await small.end()


async def test_closing_ends_all_that_wait() -> None:
    pool = FakePool()
    d = dispatcher(pool)
    pool.answers = FULL
    held = Held(d, "r")
    await settle()
    d.close()
    with pytest.raises(Unavailable, match="the router stops"):
        await held.task


class Workers(FakePool):
    """One prefill worker and decode workers by name, each with its answers; counts who is where."""

    def __init__(self, **answers: Reserved) -> None:
        super().__init__()
        self.by_name = answers
        self.running = dict.fromkeys(answers, 0)
        self.rate = 0.0
        self._name = ""

    def fleet(self) -> Fleet:
        decode = (DecodeView(name, KV, free_slots=1, own_requests=self.running[name]) for name in self.by_name)
        return Fleet((PrefillView("p", KV, own_requests=self.seats, rate=self.rate),), tuple(decode))

    def decode(self, name: str) -> FakePool:
        self._name = name
        return self

    def attempt(self, request_id: str, number: int, deliver: object) -> FakeAttempt:
        self.order.append(f"{request_id} {self._name}")
        return WorkersAttempt(self, self._name)


class WorkersAttempt(FakeAttempt):
    def __init__(self, workers: Workers, name: str) -> None:
        super().__init__(workers)
        self._workers, self._name = workers, name
        workers.running[name] += 1

    async def reserve(self, **asked: object) -> Reserved:
        await asyncio.sleep(0)
        return self._workers.by_name[self._name]

    def close(self) -> None:
        self._workers.running[self._name] -= 1


NEVER = Reserved(False, "needs 9 pages, there are 4", True)


async def test_never_ends_a_request_only_when_every_decode_worker_says_so() -> None:
    pool = Workers(small=NEVER, large=FULL)
    d = dispatcher(pool)
    held = Held(d, "r")
    await settle()
    assert pool.order == ["r large", "r small"] or pool.order == ["r small", "r large"]
    pool.by_name["large"] = GRANTED
    pool.news()
    await asyncio.wait_for(held.placed.wait(), 5)
    assert pool.order[2:] == ["r large"], "who can never hold it is not asked again"
    await held.end()


async def test_a_replay_that_only_a_lost_worker_could_hold_waits_for_one_like_it() -> None:
    pool = Workers(small=NEVER)
    d = dispatcher(pool, worker_wait_s=5)
    held = Held(d, "r", again=True)
    await settle()
    assert not held.task.done()
    pool.by_name["large"], pool.running["large"] = GRANTED, 0
    pool.news()
    await asyncio.wait_for(held.placed.wait(), 5)
    await held.end()
    del pool.by_name["large"]
    d = dispatcher(pool, worker_wait_s=0.02)
    other = Held(d, "other", again=True)
    with pytest.raises(Unavailable, match=r"that could hold the request: .* 9 pages"):
        await asyncio.wait_for(other.task, 5)
    assert pool.seats == 0


async def test_a_lost_news_does_not_stop_the_line() -> None:
    pool = Workers(d=Reserved(False, "full", False, 0.05))
    d = dispatcher(pool)
    held = Held(d, "r")
    await settle()
    assert len(pool.order) == 1
    pool.by_name["d"] = GRANTED
    await asyncio.wait_for(held.placed.wait(), 5)
    assert len(pool.order) == 2
    await held.end()


async def test_a_request_that_cant_be_in_time_is_refused_at_once() -> None:
    pool = Workers(d=GRANTED)
    pool.rate = 10.0
    d = dispatcher(pool)
    now = asyncio.get_running_loop().time()
    with pytest.raises(Overloaded, match=r"the first token is expected in 10\.0 s") as refusal:
        await Held(d, "late", deadline=now + 5, tokens=100).task
    assert refusal.value.retry_after is not None
    in_time = Held(d, "in time", deadline=now + 15, tokens=100)
    await asyncio.wait_for(in_time.placed.wait(), 5)
    assert pool.order == ["in time d"]
    await in_time.end()
    # What was accepted once is not judged again.
    replay = Held(d, "replay", deadline=now + 5, tokens=100, again=True)
    await asyncio.wait_for(replay.placed.wait(), 5)
    await replay.end()


async def test_the_life_goes_with_the_request() -> None:
    pool = Workers(d=FULL)
    d = dispatcher(pool, reserve_timeout_s=2)
    held = Held(d, "r")
    await settle()
    assert held.life.state is State.LINE
    pool.by_name["d"] = GRANTED
    pool.news()
    await held.placed.wait()
    assert held.life.state is State.RESERVING
    assert held.life.deadline == pytest.approx(asyncio.get_running_loop().time() + 2, abs=1)
    await held.end()


async def test_alone_waits_for_an_empty_pair_and_keeps_it_until_its_end() -> None:
    pool = Workers(d=GRANTED, e=GRANTED)
    d = dispatcher(pool)
    before = [Held(d, "one"), Held(d, "two")]
    await asyncio.gather(*(held.placed.wait() for held in before))
    for held in before:
        assert held.place is not None
        d.leave(held.place.seat)
    assert pool.running == {"d": 1, "e": 1} or pool.running == {"d": 2, "e": 0}
    pool.running["e"] = 1
    alone = Held(d, "alone", again=True, alone=True)
    waiting = Held(d, "waiting")
    await settle()
    # The only prefill worker is kept too, so that nothing else is placed.
    assert not alone.placed.is_set()
    assert not waiting.placed.is_set()
    pool.running["e"] = 0
    pool.news()
    await asyncio.wait_for(alone.placed.wait(), 5)
    await settle()
    assert not waiting.placed.is_set()
    await alone.end()
    await asyncio.wait_for(waiting.placed.wait(), 5)
    await asyncio.gather(waiting.end(), *(held.end() for held in before))
    assert pool.seats == 0


async def test_alone_is_refused_when_no_worker_empties_in_time_and_others_go_on() -> None:
    pool = Workers(d=GRANTED)
    d = dispatcher(pool, isolation_wait_s=0.05)
    running = Held(d, "running")
    await running.placed.wait()
    with pytest.raises(EngineError, match=r"must run alone; no workers were free of other requests within 0\.05 s"):
        await asyncio.wait_for(Held(d, "alone", again=True, alone=True).task, 5)
    other = Held(d, "other")
    await asyncio.wait_for(other.placed.wait(), 5)
    await asyncio.gather(running.end(), other.end())


async def test_one_request_at_a_time_runs_alone_and_a_refusal_is_no_storm() -> None:
    pool = Workers(d=FULL)
    d = dispatcher(pool)
    first, second = (Held(d, name, again=True, alone=True) for name in ("first", "second"))
    await settle()
    assert pool.order == ["first d"]
    pool.by_name["d"] = GRANTED
    pool.news()
    await asyncio.wait_for(first.placed.wait(), 5)
    await settle()
    assert not second.placed.is_set()
    await first.end()
    await asyncio.wait_for(second.placed.wait(), 5)
    await second.end()
    assert pool.order == ["first d", "first d", "second d"]


@pytest.mark.parametrize("alone", [False, True])
async def test_a_worker_that_was_meanwhile_kept_for_another_is_not_asked(alone: bool) -> None:
    pool = Workers(d=FULL, e=GRANTED)
    reserver = Reserver(cast(Pool, pool), Breakers(), 1.0)
    reserver.held = frozenset({"e"})
    demand = Demand(8, alone=alone)
    asked = Application("r", 0, "", Lifecycle(State.LINE, 0.0), demand, 8, 4, (0,), True)
    choice = Choice("p", ("d", "e"))
    place = await reserver.reserve(asked, reserver.seat(choice, demand), choice, lambda event: None, Answers())
    assert (place is not None) is alone
    assert pool.order == ["r d", "r e"][: 1 + alone]
