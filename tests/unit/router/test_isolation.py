"""Requests that run isolated: what is kept for them, for how long, and what others get meanwhile."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from baton.errors import Unavailable
from router.placement.policy import FleetView
from router.workers.failures import Suspicion
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import (
    FULL,
    GRANTED,
    REFUSED,
    TOO_LARGE,
    FakePool,
    Held,
    ask,
    dispatcher,
    place,
    settle,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 0.02)


async def test_an_isolated_request_waits_for_an_empty_pair_and_keeps_it_until_its_end() -> None:
    d = dispatcher(pool := FakePool(d=GRANTED, e=GRANTED))
    before = [Held(d, "one"), Held(d, "two")]
    await asyncio.gather(*(held.placed.wait() for held in before))
    for held in before:
        d.release(held.place.prefill)
    assert pool.running == {"d": 1, "e": 1} or pool.running == {"d": 2, "e": 0}
    pool.running["e"] = 1
    isolated = Held(d, "isolated", again=True, isolated=Suspicion.PAIR)
    waiting = await ask(d, "waiting")
    # The only prefill worker is kept too, so that nothing else is placed.
    assert not isolated.placed.is_set()
    assert not waiting.placed.is_set()
    pool.running["e"] = 0
    pool.notify()
    await isolated.until_placed()
    await settle()
    assert not waiting.placed.is_set()
    await isolated.end()
    await waiting.until_placed()
    await asyncio.gather(waiting.end(), *(held.end() for held in before))
    assert pool.assignments == 0


def test_an_isolated_request_runs_among_others_if_no_worker_becomes_empty_in_time() -> None:
    async def run() -> None:
        d = dispatcher(pool := FakePool(d=GRANTED), isolation_wait_s=5.0)
        running = await place(d, "running")
        isolated, other = Held(d, "isolated", again=True, isolated=Suspicion.PAIR), Held(d, "other")
        await asyncio.sleep(4.0)
        assert not other.placed.is_set()
        await asyncio.sleep(2.0)
        assert isolated.placed.is_set()
        assert other.placed.is_set()
        assert isolated.place.isolation is None
        await asyncio.gather(running.end(), isolated.end(), other.end())
        assert pool.assignments == 0

    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())


async def test_a_request_no_longer_suspected_stops_waiting_to_run_alone() -> None:
    d = dispatcher(pool := FakePool(d=GRANTED))
    running = await place(d, "running")
    isolated = await ask(d, "isolated", again=True, isolated=Suspicion.PAIR)
    assert not isolated.placed.is_set()
    isolated.suspected = Suspicion.NONE
    pool.notify()
    await isolated.until_placed()
    await asyncio.gather(running.end(), isolated.end())


def test_the_second_isolated_request_waits_until_its_caller_cancels_it() -> None:
    async def run() -> None:
        d = dispatcher(FakePool(d=GRANTED), isolation_wait_s=0.01)
        first, second = (Held(d, name, again=True, isolated=Suspicion.PAIR) for name in ("first", "second"))
        await first.until_placed()
        await asyncio.sleep(60)
        assert not second.task.done()
        assert not second.placed.is_set()
        await second.cancel()
        await first.end()
        other = await place(d, "other", isolated=Suspicion.PAIR)
        await other.end()

    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())


async def test_an_isolated_request_asks_the_next_worker_if_some_are_too_small_and_fails_without_any() -> None:
    d = dispatcher(pool := FakePool(a=TOO_LARGE, b=TOO_LARGE, c=GRANTED), worker_wait_s=0.05)
    held = await place(d, "big", again=True, isolated=Suspicion.PAIR)
    assert pool.order == ["big a", "big b", "big c"]
    await held.end()
    pool.by_name.clear()
    with pytest.raises(Unavailable, match=r"no decode worker is there after a wait of 0\.05 s"):
        await asyncio.wait_for(Held(d, "nowhere", again=True, isolated=Suspicion.PAIR).task, 60)
    assert pool.assignments == 0


async def test_one_request_at_a_time_is_isolated_and_asks_once() -> None:
    d = dispatcher(pool := FakePool(d=FULL))
    first, second = (Held(d, name, again=True, isolated=Suspicion.PAIR) for name in ("first", "second"))
    await settle()
    assert pool.order == ["first d"]
    pool.answer(d=GRANTED)
    await first.until_placed()
    await settle()
    assert not second.placed.is_set()
    await first.end()
    await second.finish()
    assert pool.order == ["first d", "second d"]


async def test_an_isolated_request_does_not_fall_back_on_a_worker_where_others_run() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=GRANTED))
    other = await place(d, "other")
    d.release(other.place.prefill)
    isolated = await ask(d, "isolated", again=True, isolated=Suspicion.PAIR, avoid=("e",))
    assert pool.order == ["other e", "isolated d"]
    pool.notify()
    await settle()
    assert not isolated.placed.is_set()
    pool.answer(d=GRANTED)
    await isolated.until_placed()
    assert isolated.place.decode_address == "d"
    await asyncio.gather(isolated.end(), other.end())


async def test_others_decode_beside_one_that_has_only_its_prefill_worker_for_itself() -> None:
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=GRANTED))
    before = await place(d, "before")
    isolated, other = Held(d, "isolated", again=True, isolated=Suspicion.PREFILL), Held(d, "other")
    await asyncio.wait_for(asyncio.gather(isolated.placed.wait(), other.placed.wait()), 60)
    assert pool.isolated == {"q"}
    assert not isolated.place.isolation.isolates_decode
    waiting = await place(d, "waiting", needs_decode=False)
    assert pool.open_requests == {"p": 3, "q": 1}
    await isolated.end()
    assert pool.isolated == frozenset()
    await asyncio.gather(before.end(), other.end(), waiting.end())
    assert pool.assignments == 0


async def test_a_full_decode_worker_is_kept_until_it_has_pages_for_one_that_must_not_wait_behind_others() -> None:
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=FULL))
    isolated, other = Held(d, "isolated", again=True, isolated=Suspicion.PREFILL), Held(d, "other")
    await settle()
    assert pool.isolated == {"p", "d"}
    assert not other.placed.is_set()
    pool.answer(d=GRANTED)
    await asyncio.wait_for(asyncio.gather(isolated.placed.wait(), other.placed.wait()), 60)
    assert pool.isolated == {"p"}
    assert pool.order[-2:] == ["isolated d", "other d"]
    await asyncio.gather(isolated.end(), other.end())


async def test_one_that_gives_up_the_wait_for_its_turn_frees_no_worker_that_is_kept_for_another() -> None:
    kept = list[frozenset[str]]()

    class Noted(FakePool):
        def isolate(self, names: frozenset[str]) -> None:
            kept.append(names)
            super().isolate(names)

    d = dispatcher(pool := Noted(prefill=("p", "q"), d=GRANTED))
    first = await place(d, "first", request="r", again=True, isolated=Suspicion.PREFILL)
    pool.by_name["d"] = FULL
    sibling = Held(d, "sibling", request="r", again=True, isolated=Suspicion.PREFILL)
    waiting = [Held(d, name, request="s", again=True, isolated=Suspicion.PREFILL) for name in ("one", "two")]
    await settle()
    assert pool.isolated == {"p", "d"}
    kept.clear()
    await waiting[0].cancel()
    await settle()
    assert pool.isolated == {"p", "d"}
    assert set(kept) <= {pool.isolated}
    pool.answer(d=GRANTED)
    await sibling.until_placed()
    await asyncio.gather(first.end(), sibling.end(), waiting[1].end())


async def test_a_choice_that_needs_a_decode_worker_for_itself_does_not_take_one_where_others_run() -> None:
    d = dispatcher(FakePool(prefill=("p", "q"), d=GRANTED), isolation_wait_s=0.05)
    first = await place(d, "first", request="r", again=True, isolated=Suspicion.PREFILL)
    second = await place(d, "second", request="r", again=True, isolated=Suspicion.PAIR)
    assert second.place.isolation is None
    await asyncio.gather(first.end(), second.end())


async def test_one_that_waits_for_pages_keeps_its_workers_and_runs_among_others_after_a_time() -> None:
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=FULL, e=FULL), isolation_wait_s=2.0)
    isolated = await ask(d, "isolated", again=True, isolated=Suspicion.PAIR)
    kept = set(pool.isolated)
    for _ in range(3):
        pool.notify()
        await settle()
    assert (len(pool.order), pool.isolated) == (1, kept)
    async with asyncio.timeout(60):
        while pool.isolated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await settle()
    assert {attempt.worker for attempt in pool.waiting} == {"d", "e"}
    pool.answer(e=GRANTED)
    await isolated.until_placed()
    assert isolated.place.isolation is None
    await isolated.end()


async def test_one_that_runs_among_others_after_a_time_asks_only_when_a_prefill_worker_has_room() -> None:
    d = dispatcher(pool := FakePool(d=FULL), isolation_wait_s=0.0, prefill_limit=1)
    running = await place(d, "running", needs_decode=False)
    isolated = await ask(d, "isolated", again=True, isolated=Suspicion.PAIR)
    for _ in range(3):
        pool.notify()
        await settle()
    assert pool.order == []
    await running.end()
    await settle()
    assert pool.order == ["isolated d"]
    await isolated.cancel()


async def test_one_that_waits_for_pages_at_a_worker_that_leaves_goes_to_another() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL))
    isolated = await ask(d, "isolated", again=True, isolated=Suspicion.PAIR)
    (first,) = (attempt.worker for attempt in pool.waiting)
    del pool.by_name[first]
    pool.answer_all(GRANTED)
    await isolated.until_placed()
    assert isolated.place.decode_address != first
    await isolated.end()
    assert pool.isolated == frozenset()


async def test_a_choice_that_needs_no_decode_worker_runs_where_the_others_of_its_request_do() -> None:
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=GRANTED))
    first = await place(d, "first", request="r", again=True, isolated=Suspicion.PREFILL)
    last = await place(d, "last", request="r", again=True, isolated=Suspicion.PREFILL, needs_decode=False)
    assert (last.place.decode, pool.open_requests) == (None, {"p": 2, "q": 0})
    await asyncio.gather(first.end(), last.end())
    assert pool.assignments == 0


async def test_a_choice_that_needs_a_decode_worker_gets_one_after_a_choice_that_needs_none() -> None:
    d = dispatcher(pool := FakePool(d=GRANTED))
    first = await place(d, "first", request="r", again=True, isolated=Suspicion.PREFILL, needs_decode=False)
    other = await ask(d, "other", request="r", again=True, isolated=Suspicion.PREFILL)
    await first.end()
    await other.until_placed()
    assert other.place.decode_address == "d"
    await other.end()
    assert pool.assignments == 0


async def test_choices_of_one_request_wait_for_pages_at_the_same_workers() -> None:
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=FULL, e=FULL))
    choices = [await ask(d, name, request="r", again=True, isolated=Suspicion.PAIR) for name in ("one", "two")]
    assert (pool.order, pool.isolated) == (["r d", "r d"], {"p", "d"})
    pool.answer_all(GRANTED)
    for choice in choices:
        await choice.until_placed()
        assert choice.place.isolation.isolates_decode
    await asyncio.gather(*(choice.end() for choice in choices))


class Draining(FakePool):
    """A pool whose prefill workers drain if a test says so."""

    drains: tuple[str, ...] = ()

    @property
    def fleet(self) -> FleetView:
        fleet = super().fleet
        for name in self.drains:
            fleet.set_prefill(name, replace(fleet.prefill[name], draining=True))
        return fleet


async def test_an_isolated_request_goes_to_no_prefill_worker_that_began_to_drain() -> None:
    d = dispatcher(pool := Draining(prefill=("p", "q", "s"), d=FULL))
    first = await ask(d, "first", request="r", again=True, isolated=Suspicion.PREFILL)
    assert pool.isolated == {"p", "d"}
    pool.drains = ("p",)
    pool.answer(d=GRANTED)
    await first.until_placed()
    pool.drains = ("p", "q")
    pool.notify()
    other = await place(d, "other", request="r", again=True, isolated=Suspicion.PREFILL)
    assert pool.open_requests == {"p": 0, "q": 1, "s": 1}
    await asyncio.gather(first.end(), other.end())
    assert pool.assignments == 0


async def test_a_request_that_was_refused_while_it_was_isolated_asks_again_when_it_runs_among_others() -> None:
    d = dispatcher(pool := FakePool(d=REFUSED))
    held = await ask(d, "r", again=True, isolated=Suspicion.PAIR)
    held.suspected = Suspicion.NONE
    d._on_change(next(iter(d._waiting)))
    await settle()
    assert len(d.queue) == 1
    pool.answer(d=GRANTED)
    await held.finish()
    assert pool.assignments == 0


async def test_choices_with_other_suspicions_wait_for_the_same_workers() -> None:
    """They must not take the workers of each other in turn, and so keep the router busy."""
    d = dispatcher(pool := FakePool(prefill=("p", "q"), d=GRANTED, e=GRANTED))
    running = [await place(d, f"running {number}") for number in range(4)]
    choices = [
        await ask(d, f"{suspicion}", request="r", again=True, isolated=suspicion)
        for suspicion in (Suspicion.PREFILL, Suspicion.PAIR)
    ]
    kept, isolated = list[frozenset[str]](), pool.isolate
    pool.isolate = lambda addresses: (kept.append(addresses), isolated(addresses))[1]
    await asyncio.sleep(0.1)
    assert not any(choice.placed.is_set() for choice in choices)
    assert {*kept} == {pool.isolated}
    for each in running:
        await each.end()
    for choice in choices:
        await choice.until_placed()
        assert choice.place.isolation is not None
    await asyncio.gather(*(choice.end() for choice in choices))
    assert (pool.assignments, pool.isolated) == (0, frozenset())


async def test_an_empty_pair_of_one_that_gave_up_is_kept_for_the_other_choices() -> None:
    d = dispatcher(pool := Draining(prefill=("p", "q", "s"), d=GRANTED))
    first = await place(d, "first", request="r", again=True, isolated=Suspicion.PREFILL)
    pool.drains = ("p",)
    pool.answer(d=FULL)
    second = await ask(d, "second", request="r", again=True, isolated=Suspicion.PREFILL)
    assert pool.isolated == {"p", "q", "d"}
    await second.cancel()
    pool.answer(d=GRANTED)
    other = await place(d, "other")
    assert pool.open_requests == {"p": 1, "q": 0, "s": 1}
    third = await place(d, "third", request="r", again=True, isolated=Suspicion.PREFILL)
    assert pool.open_requests == {"p": 1, "q": 1, "s": 1}
    assert third.place.isolation is not None
    await asyncio.gather(first.end(), other.end(), third.end())
    assert pool.assignments == 0


async def test_one_that_gets_pages_of_an_empty_pair_runs_there_even_if_its_time_to_wait_is_over() -> None:
    d = dispatcher(pool := FakePool(d=GRANTED), isolation_wait_s=0.0)
    choices = [await place(d, "r", request="r", again=True, isolated=Suspicion.PAIR) for _ in range(2)]
    assert all(choice.place.isolation is not None for choice in choices)
    assert pool.order == ["r d", "r d"]
    await asyncio.gather(*(choice.end() for choice in choices))
    assert pool.assignments == 0
