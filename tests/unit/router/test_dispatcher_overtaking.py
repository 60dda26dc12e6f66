"""No request that waits for reasons of its own keeps others from workers that they could use."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.request import ReserveResult
from router.dispatcher import Dispatcher
from router.placement.policy import FleetView
from tests.unit.router.dispatching import (
    FULL,
    GRANTED,
    TOO_LARGE,
    FakeAttempt,
    FakePool,
    Held,
    ask,
    dispatcher,
    place,
    settle,
)


async def end(asked: Dispatcher, *requests: Held) -> None:
    for request in requests:
        request.task.cancel()
    await settle()
    asked.close()


async def test_a_replay_falls_back_on_what_failed_it_when_the_others_refuse_and_stops_nobody() -> None:
    asked = dispatcher(workers := FakePool(a=GRANTED, b=FULL), prefill_limit=99)
    replay = await ask(asked, "replay", again=True, avoid=("a",))
    assert workers.order == ["replay b", "replay a"]
    others = [Held(asked, f"other{i}", tenant=f"t{i}") for i in range(5)]
    await settle()
    assert all(request.placed.is_set() for request in (replay, *others))
    await end(asked, replay, *others)


async def test_a_request_that_waits_asks_no_worker_with_an_open_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.failures.WORKER_FAULTS", 1)
    asked = dispatcher(workers := FakePool(a=GRANTED, b=FULL))
    asked._breakers.record_fault(("a",))
    held = await ask(asked, "r")
    assert (workers.order, held.placed.is_set()) == (["r b"], False)
    await end(asked, held)


async def test_a_context_that_only_a_full_worker_can_hold_stops_nobody_who_has_another_one() -> None:
    asked = dispatcher(workers := FakePool(a=TOO_LARGE, b=FULL), prefill_limit=99)
    large = await ask(asked, "large", tokens=1000)
    workers.by_name["a"] = GRANTED
    others = [Held(asked, f"other{i}", tenant=f"t{i}") for i in range(5)]
    await settle()
    assert [request.placed.is_set() for request in others] == [True] * 5
    assert workers.order[:2] in (["large a", "large b"], ["large b", "large a"])
    assert not large.placed.is_set()
    workers.answer(b=GRANTED)
    await settle()
    assert large.placed.is_set()
    await end(asked, large, *others)


class Lengths(FakePool):
    """Worker `small` has room, but holds 100 tokens only."""

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        too_large = asked["context_tokens"] + asked["max_new_tokens"] > 100
        return FULL if attempt.worker != "small" else TOO_LARGE if too_large else GRANTED


async def test_a_short_context_whose_outputs_only_a_full_worker_can_hold_stops_nobody_with_fewer_outputs() -> None:
    asked = dispatcher(workers := Lengths(small=GRANTED, large=FULL), prefill_limit=99)
    long = await ask(asked, "long", tokens=10, output=1000)
    others = [await ask(asked, f"other{i}", tokens=20) for i in range(3)]
    assert workers.order[:2] == ["long small", "long large"]
    assert [request.placed.is_set() for request in (long, *others)] == [False, True, True, True]
    await end(asked, long, *others)


class Slots(FakePool):
    """Decode workers with two slots each; a large context does not fit those that answer TOO_LARGE.

    Who waits for a slot gets it in the order in which it came.
    """

    def __init__(self, **answers: ReserveResult) -> None:
        super().__init__(**answers)
        self.free = dict.fromkeys(answers, 2)
        self.shown = dict(self.free)
        """Free slots as far as the router knows."""

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        if self.by_name[attempt.worker] is TOO_LARGE and asked["context_tokens"] == LARGE:
            return TOO_LARGE
        if self.free[attempt.worker]:
            self.free[attempt.worker] -= 1
            attempt.held = True
        self.shown[attempt.worker] = self.free[attempt.worker]
        return GRANTED if attempt.held else FULL

    def subtract_free(self, tokens: int, slots: int) -> None:
        self.shown[self._worker] -= slots

    def close(self, attempt: FakeAttempt) -> None:
        self.free[attempt.worker] += bool(attempt.held)
        self.shown[attempt.worker] = self.free[attempt.worker]
        attempt.held = False
        self.answer_again()

    @property
    def fleet(self) -> FleetView:
        fleet = super().fleet
        for view in list(fleet.decode.values()):
            fleet.set_decode(view.address, replace(view, free_slots=self.shown[view.address]))
        return fleet


LARGE = 1000


async def test_a_restricted_waiter_gets_pages_however_many_others_want_them() -> None:
    asked = dispatcher(Slots(a=TOO_LARGE, b=GRANTED), prefill_limit=99)
    others = [Held(asked, f"other{i}", tenant="t") for i in range(30)]
    await settle()
    large = [Held(asked, f"large{i}", tokens=LARGE, tenant="u") for i in range(3)]
    await settle()
    for _ in range(24):
        # Of those that run, the one that came first goes, wherever it is.
        running = next(each for each in others if each.placed.is_set() and not each.task.done())
        await running.end()
        await settle()
        for each in large:
            if each.placed.is_set() and not each.task.done():
                await each.end()
                await settle()
    assert [each.placed.is_set() for each in large] == [True] * 3
    # They take turns with the others: these got places meanwhile.
    assert sum(each.placed.is_set() for each in others) >= 20
    await end(asked, *large, *others)


async def test_of_many_restricted_waiters_with_the_same_workers_one_asks() -> None:
    asked = dispatcher(workers := FakePool(a=TOO_LARGE, b=FULL), prefill_limit=99)
    large = [await ask(asked, "large0", tokens=LARGE)]
    large += [Held(asked, f"large{i}", tokens=LARGE) for i in range(1, 20)]
    await settle()
    workers.notify()
    await settle()
    assert sorted(workers.order) == ["large0 a", "large0 b"]
    # A context that worker a may hold is not hidden: it need not wait for worker b.
    smaller = await ask(asked, "smaller", tokens=LARGE - 1)
    assert len(workers.order) == 4
    await end(asked, *large, smaller)


async def test_a_waiter_without_a_pair_is_overtaken_while_prefill_workers_have_room() -> None:
    """The prefill worker has a pair that failed one request, and the other one has no room."""
    workers = FakePool(("p1", "p2"))
    workers.open_requests["p2"] = 2
    asked = dispatcher(workers, prefill_limit=2)
    failed = await place(asked, "failed")
    failed.place.breakers.record_fault(failed.place.breakers.pair)
    await failed.end()
    waits = Held(asked, "waits", tenant="t")
    others = [Held(asked, f"other{i}", tenant="t", needs_decode=False) for i in range(2)]
    await settle()
    assert not waits.placed.is_set()
    assert [request.placed.is_set() for request in others] == [True, True]
    await end(asked, waits, *others)


@pytest.mark.parametrize("before", [1, 100])
async def test_requests_without_decode_go_on_while_decode_workers_are_gone(before: int) -> None:
    workers = FakePool()
    workers.there = False
    asked = dispatcher(workers)
    decoding = [Held(asked, f"decoding{i}") for i in range(before)]
    await settle()
    single = await ask(asked, "single", needs_decode=False)
    assert single.placed.is_set()
    assert not any(each.placed.is_set() for each in decoding)
    await end(asked, *decoding, single)


class Choosy(FakePool):
    """A decode worker that has room, but keeps no further context for choices that wait."""

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        return GRANTED if len(asked["choices"]) == 1 else FULL


async def test_waiters_with_many_choices_stop_nobody_with_one_and_one_of_them_asks() -> None:
    asked = dispatcher(workers := Choosy(), prefill_limit=1)
    many = [await ask(asked, "many0", choices=64, tokens=100)]
    many += [await ask(asked, f"many{i}", choices=64, tokens=100) for i in (1, 2)]
    assert workers.order == ["many0"]
    other = await ask(asked, "other", tokens=100)
    assert other.placed.is_set()
    await other.end()
    await settle()
    assert workers.order == ["many0", "other"]
    await end(asked, *many)


@pytest.mark.parametrize("tokens", [1, 10**9])
async def test_replays_are_never_hidden(tokens: int) -> None:
    asked = dispatcher(workers := FakePool(d=FULL))
    waiting = [await ask(asked, "waiting", tokens=5), await ask(asked, "hidden", tokens=5)]
    replays = [await ask(asked, f"replay{i}", tokens=tokens, again=True) for i in range(2)]
    assert workers.order == ["waiting d", "replay0 d", "replay1 d"]
    await end(asked, *waiting, *replays)
