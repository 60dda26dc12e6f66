"""From the line to a place, with workers that answer as the test says; no network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.kv.format import KvFormat, KvPart
from router.config import RouterConfig
from router.dispatcher import Application, Dispatcher, Place
from router.policy import DecodeView, Demand, Fleet, PrefillView
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

    def __init__(self, dispatcher: Dispatcher, name: str, *, again: bool = False, decodes: bool = True) -> None:
        self.placed = asyncio.Event()
        self.go = asyncio.Event()
        self.place: Place | None = None
        demand = Demand(8, decodes)
        asked = Application(name, int(again), "", math.inf, demand, 8, 4, (0,), again)
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
