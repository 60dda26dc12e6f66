"""From the queue to a place, with workers that answer as the test says; no network."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.lifecycle import State
from baton.request import ReserveResult
from router.dispatcher import Dispatcher
from router.placement.policy import ASKED_AT_MOST, FleetView
from tests.unit.router.dispatching import (
    FULL,
    GRANTED,
    REFUSED,
    TOO_LARGE,
    FakeAttempt,
    FakePool,
    Held,
    ask,
    dispatcher,
    place,
    settle,
)


async def test_a_reservation_waits_at_the_workers_and_the_next_one_is_asked_for_when_it_is_granted() -> None:
    d = dispatcher(pool := FakePool())
    pool.answer_all(FULL)
    first, second = await ask(d, "first"), await ask(d, "second")
    pool.notify()
    await settle()
    assert (pool.order, pool.assignments) == (["first"], 0)
    pool.answer_all(GRANTED)
    await asyncio.gather(first.placed.wait(), second.placed.wait())
    assert (pool.order, pool.assignments) == (["first", "second"], 2)
    await asyncio.gather(first.end(), second.end())
    assert (pool.assignments, pool.closed) == (0, 2)


async def test_the_best_worker_is_asked_first_then_all_others_and_the_first_grant_wins() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL, f=FULL))
    held = await ask(d, "r")
    assert pool.order == ["r d", "r e", "r f"]
    # Two of them have room at the same time; the last one is told to forget it.
    pool.answer(e=GRANTED, f=GRANTED)
    await held.until_placed()
    assert held.place.decode_address == "e"
    await settle()
    assert (pool.running, pool.waiting) == ({"d": 0, "e": 1, "f": 0}, [])
    await held.end()
    assert pool.running.total() == 0
    pool.answer(d=GRANTED)
    other = await place(d, "other")
    assert pool.order[3:] in (["other d"], ["other e"], ["other f"])
    await other.end()


async def test_of_many_workers_some_are_asked_and_more_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 600.0)
    pool = FakePool(**{f"d{number}": FULL for number in range(2 * ASKED_AT_MOST + 2)})
    held = await ask(d := dispatcher(pool), "r")
    assert len(pool.order) == ASKED_AT_MOST
    pool.notify()
    await settle()
    assert len(pool.order) == ASKED_AT_MOST
    unasked = sorted(pool.by_name.keys() - {attempt.worker for attempt in pool.waiting})
    pool.answer(**{unasked[-1]: GRANTED})
    d._tick()
    await held.until_placed()
    assert held.place.decode_address == unasked[-1]
    assert len(pool.order) <= 2 * ASKED_AT_MOST
    await held.end()
    assert pool.running.total() == 0


async def test_a_worker_that_refused_once_is_asked_again_while_the_request_waits_elsewhere() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL))
    held = await ask(d, "r")
    pool.answer(d=REFUSED)
    await settle()
    pool.by_name["d"] = GRANTED
    await held.until_placed()
    assert held.place.decode_address == "d"
    await held.end()
    assert pool.running.total() == 0


async def test_a_status_wakes_no_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL), queue_capacity=1000)
    monkeypatch.setattr("router.dispatcher._TICK_S", 600.0)
    replays = [Held(d, f"r{number}", again=True) for number in range(100)]
    while pool.asked < 200:
        await settle()
    await settle()
    handled = list[object]()
    monkeypatch.setattr(d, "_handle", handled.append)
    monkeypatch.setattr(d.queue, "next_to_register", lambda *_: pytest.fail("the queue was searched"))
    for _ in range(20):
        pool.notify()
        await asyncio.sleep(0)
    assert (handled, pool.asked) == ([], 200)
    for replay in replays:
        await replay.cancel()


async def test_requests_that_have_asked_all_workers_compare_none_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 600.0)
    d = dispatcher(FakePool(d=FULL, e=FULL))
    replays = [await ask(d, f"r{number}", again=True) for number in range(3)]
    monkeypatch.setattr("router.dispatcher.rank_pairs", lambda *_, **__: pytest.fail("workers were compared"))
    d._tick()
    await settle()
    assert not any(replay.task.done() for replay in replays)
    for replay in replays:
        await replay.cancel()


async def test_many_requests_in_a_large_fleet_hold_up_the_event_loop_for_a_slice_of_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = FakePool(tuple(f"p{number}" for number in range(100)), **{f"d{number}": FULL for number in range(100)})
    fleet = pool.fleet
    monkeypatch.setattr(FakePool, "fleet", fleet)
    d, work, turns = dispatcher(pool, queue_capacity=1000), Dispatcher._work, []

    def measure(self: Dispatcher) -> None:
        began = time.thread_time()
        work(self)
        turns.append(time.thread_time() - began)

    monkeypatch.setattr(Dispatcher, "_work", measure)
    replays = [Held(d, f"r{number}", again=True, tenant=f"t{number % 50}") for number in range(60)]
    while pool.asked < 60 * ASKED_AT_MOST:
        await settle()
    # Two placements on 100 + 100 workers may take longer than a slice, and the machine may be slow.
    assert sum(turns) > 5 * sorted(turns)[-2]
    for replay in replays:
        await replay.cancel()


async def test_small_contexts_go_on_behind_a_large_one_that_waits_and_larger_ones_do_not_ask() -> None:
    d = dispatcher(pool := RoomPool(), prefill_limit=9)
    large = await ask(d, "large", tokens=1000)
    same = [Held(d, f"same{number}", tokens=1000 + number) for number in range(3)]
    small = [Held(d, f"small{number}", tokens=10) for number in range(4)]
    await settle()
    assert pool.order == ["large", *(f"small{number}" for number in range(4))]
    assert all(held.placed.is_set() for held in small)
    pool.most = 2000
    pool.answer_again()
    await asyncio.wait_for(asyncio.gather(large.placed.wait(), *(held.placed.wait() for held in same)), 60)
    assert pool.order[5:] == ["same0", "same1", "same2"]
    for held in (large, *same, *small):
        await held.end()
    assert pool.assignments == 0


async def test_while_smaller_ones_pass_the_first_of_the_queue_is_in_line_at_the_workers() -> None:
    """Otherwise there could always be a smaller one that waits."""
    d = dispatcher(pool := FakePool(d=FULL), prefill_limit=9)
    for name, tokens in (("first", 100), ("larger", 200), ("small", 10)):
        await ask(d, name, tokens=tokens)
    assert pool.order == ["first d", "small d"]
    pool.by_name["d"] = GRANTED
    pool.waiting[0].answer()
    await settle()
    assert pool.order == ["first d", "small d", "larger d"]
    d.close()


async def test_a_worker_that_joins_or_takes_requests_again_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 600.0)
    d = dispatcher(pool := FakePool(d=FULL))
    held = await ask(d, "r")
    pool.isolated = frozenset({"e"})
    pool.answer(e=GRANTED)
    await settle()
    assert not held.placed.is_set()
    pool.isolate(frozenset())
    await held.until_placed()
    assert (held.place.decode_address, pool.running["d"]) == ("e", 0)
    await held.end()


async def test_a_worker_that_is_lost_or_refuses_while_a_request_waits_there_is_only_left_out() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL))
    held = await ask(d, "r")
    pool.answer(d=REFUSED)
    await settle()
    assert [attempt.worker for attempt in pool.waiting] == ["e"]
    pool.notify()
    pool.answer(e=GRANTED)
    await held.until_placed()
    assert pool.order == ["r d", "r e"]
    await held.end()


async def test_where_all_workers_have_refused_they_are_asked_again_at_the_next_status() -> None:
    d = dispatcher(pool := FakePool(d=REFUSED))
    held = await ask(d, "r")
    assert pool.order == ["r d"]
    pool.answer(d=GRANTED)
    await held.until_placed()
    assert pool.order == ["r d", "r d"]
    assert len({*pool.numbers}) == 2, "a late answer to the first reservation is not about the second"
    await held.end()


async def test_a_request_without_room_keeps_no_place_at_a_prefill_worker_and_gets_the_best_one_in_the_end() -> None:
    d = dispatcher(pool := FakePool(("p", "q"), d=FULL), prefill_limit=1)
    held = await ask(d, "r")
    assert pool.assignments == 0
    pool.open_requests["p"] = 1
    pool.answer(d=GRANTED)
    await held.until_placed()
    assert pool.open_requests == {"p": 1, "q": 1}
    pool.by_name["d"] = FULL
    d.release(held.place.prefill)
    waiting = await ask(d, "waiting")
    pool.open_requests.update(p=1, q=2)
    # Pages must not be idle because all prefill workers are full now.
    pool.answer(d=GRANTED)
    await waiting.until_placed()
    assert pool.open_requests == {"p": 2, "q": 2}
    await asyncio.gather(held.end(), waiting.end())


async def test_a_worker_that_cannot_be_used_any_more_when_it_grants_is_left_out() -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL))
    held = await ask(d, "r")
    pool.isolated = frozenset({"d"})
    pool.answer(d=GRANTED)
    await settle()
    assert (held.placed.is_set(), pool.running["d"]) == (False, 0)
    pool.answer(e=GRANTED)
    await held.until_placed()
    assert held.place.decode_address == "e"
    await held.end()


async def test_news_that_come_while_decode_is_asked_are_not_lost() -> None:
    class Changing(FakePool):
        async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
            answer = await super().reserve(attempt)
            if self.asked == 1:
                self.answer(e=GRANTED)
            return answer

    d = dispatcher(Changing(d=FULL))
    held = await place(d, "r")
    await held.end()


async def test_a_replay_is_neither_refused_nor_overtaken() -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=1, queue_capacity=1)
    running = await place(d, "running")
    waiting = await ask(d, "waiting")
    refused = Held(d, "refused")
    with pytest.raises(Overloaded, match="1 requests are waiting, the limit is 1"):
        await refused.task
    replay = await ask(d, "replay", again=True)
    await running.end()
    await replay.until_placed()
    assert pool.order == ["running", "replay"]
    await replay.end()
    await waiting.finish()


async def test_cancelling_at_any_point_gives_all_back() -> None:
    for turns in range(12):
        d = dispatcher(pool := FakePool(), prefill_limit=1)
        cancelled, other = Held(d, "cancelled"), Held(d, "other")
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancelled.cancel()
        await other.until_placed()
        assert pool.assignments == 1
        await other.end()
        assert pool.assignments == 0


@pytest.mark.parametrize("was_registered", [True, False])
async def test_a_waiter_that_is_cancelled_before_it_wakes_gives_its_place_to_the_next(was_registered: bool) -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=1)
    running = await place(d, "running")
    waiting, other = Held(d, "waiting"), Held(d, "other")
    await settle()
    if was_registered:
        d.release(running.place.prefill)
    waiting.task.cancel()
    if not was_registered:
        d.release(running.place.prefill)
    await other.until_placed()
    await asyncio.gather(running.end(), other.end())
    assert pool.assignments == 0


async def test_a_cancelled_waiter_does_not_stop_the_queue() -> None:
    d = dispatcher(pool := FakePool(d=FULL))
    first, second = Held(d, "first"), Held(d, "second")
    await settle()
    first.task.cancel()
    await settle()
    assert pool.order == ["first d", "second d"]
    pool.answer_all(GRANTED)
    await second.finish()
    assert (pool.assignments, pool.running.total()) == (0, 0)


async def test_requests_that_need_no_decode_do_not_wait_for_decode() -> None:
    d = dispatcher(FakePool(d=FULL))
    full = await ask(d, "full")
    await full.cancel()
    short = await place(d, "short", needs_decode=False)
    assert short.place.decode is None
    await short.end()


async def test_without_workers_new_requests_and_accepted_ones_wait_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 0.02)
    d = dispatcher(pool := FakePool(), worker_wait_s=0.05)
    pool.there = False
    pool.notify()
    for again in (False, True):
        with pytest.raises(Unavailable, match=r"no decode worker is there after a wait of 0\.05 s"):
            await asyncio.wait_for(Held(d, "given up", again=again).task, 30)
    d = dispatcher(pool)
    saved, new = Held(d, "saved", again=True), Held(d, "new")
    await settle()
    pool.there = True
    pool.notify()
    await asyncio.wait_for(asyncio.gather(saved.placed.wait(), new.placed.wait()), 30)
    assert pool.order == ["saved", "new"]
    await asyncio.gather(saved.end(), new.end())


async def test_without_a_worker_wait_new_requests_are_refused_at_once() -> None:
    d = dispatcher(pool := FakePool(), worker_wait_s=0)
    pool.there = False
    with pytest.raises(Unavailable, match=r"no decode worker is there$"):
        d.check_admission("", needs_decode=True)


async def test_a_decode_worker_that_does_not_answer_is_left_out_and_another_one_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 0.02)

    class Silent(FakePool):
        async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
            return GRANTED if attempt.worker != "d" else await asyncio.get_running_loop().create_future()

    d = dispatcher(pool := Silent(d=GRANTED, e=GRANTED, f=GRANTED), reserve_timeout_s=0.02)
    held = await place(d, "r")
    assert (pool.order, pool.running["d"]) == (["r d", "r e"], 0)
    await held.end()
    assert pool.assignments == 0


async def test_a_request_that_is_too_large_is_refused_at_once_and_does_not_stop_the_queue() -> None:
    d = dispatcher(pool := FakePool())
    pool.answer_all(TOO_LARGE)
    with pytest.raises(InvalidRequest, match=r"max_tokens: 8 .* 4 of output need .*, --max-model-len\): .* 9 pages"):
        await Held(d, "large").task
    pool.answer_all(GRANTED)
    small = await place(d, "small")
    await small.end()


async def test_closing_ends_all_that_wait() -> None:
    d = dispatcher(FakePool(d=FULL))
    held = await ask(d, "r")
    d.close()
    with pytest.raises(Unavailable, match="the router is stopping"):
        await held.task


async def test_a_request_is_too_large_only_if_every_decode_worker_says_so() -> None:
    d = dispatcher(pool := FakePool(small=TOO_LARGE, large=FULL))
    held = await ask(d, "r")
    assert pool.order == ["r large", "r small"] or pool.order == ["r small", "r large"]
    pool.answer(large=GRANTED)
    await held.until_placed()
    assert pool.order[2:] == [], "no worker is asked twice"
    await held.end()


@pytest.mark.parametrize("large", [True, False])
async def test_workers_that_are_too_small_are_asked_once_however_many_they_are(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 600.0)
    workers = {f"d{number:02}": TOO_LARGE for number in range(ASKED_AT_MOST + 8)}
    pool = FakePool(**workers, **({"z": GRANTED} if large else {}))
    held = await ask(d := dispatcher(pool), "r")
    d._tick()
    if large:
        await held.until_placed()
        await held.end()
    else:
        with pytest.raises(InvalidRequest, match="9 pages"):
            await asyncio.wait_for(held.task, 60)
    assert sorted(pool.order) == sorted(f"r {name}" for name in pool.by_name)


async def test_a_replay_that_only_a_lost_worker_could_hold_waits_for_one_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.dispatcher._TICK_S", 0.02)
    d = dispatcher(pool := FakePool(small=TOO_LARGE), worker_wait_s=5)
    held = await ask(d, "r", again=True)
    assert (held.task.done(), pool.assignments) == (False, 0)
    pool.answer(large=GRANTED)
    await held.finish()
    del pool.by_name["large"]
    d = dispatcher(pool, worker_wait_s=0.02)
    other = Held(d, "other", again=True)
    with pytest.raises(Unavailable, match=r"that could hold the request, after a wait of 0\.02 s: .* 9 pages"):
        await asyncio.wait_for(other.task, 60)
    assert pool.assignments == 0


async def test_a_request_that_a_lost_worker_could_hold_waits_while_no_worker_is_there() -> None:
    d = dispatcher(pool := FakePool(small=TOO_LARGE, large=FULL))
    held = await ask(d, "r")
    pool.there = False
    pool.answer(large=REFUSED)
    await settle()
    assert not held.task.done()
    pool.there = True
    pool.answer(large=GRANTED)
    await held.finish()


async def test_a_larger_worker_that_comes_to_the_address_of_a_smaller_one_is_asked() -> None:
    d = dispatcher(pool := FakePool(d=TOO_LARGE), worker_wait_s=60)
    held = await ask(d, "r", again=True)
    pool.notify()
    assert pool.order == ["r d"]
    pool.incarnations["d"] = "larger"
    pool.answer(d=GRANTED)
    await held.finish()
    assert pool.order == ["r d", "r d"]


async def test_the_lifecycle_of_a_request_follows_its_placement() -> None:
    d = dispatcher(pool := FakePool(d=FULL))
    held = await ask(d, "r")
    assert held.lifecycle.state is State.RESERVING
    behind = await ask(d, "behind")
    assert behind.lifecycle.state is State.QUEUED
    await behind.cancel()
    pool.answer(d=GRANTED)
    await held.placed.wait()
    assert held.lifecycle.state is State.RESERVING
    await held.end()


async def test_a_tenant_below_its_share_does_not_wait_for_one_that_fills_the_prefill_workers() -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=2)
    flood = [Held(d, f"flood {i}", tenant="flood") for i in range(4)]
    await settle()
    assert pool.assignments == 2
    other = [Held(d, f"other {i}", tenant="other") for i in range(3)]
    await other[0].until_placed()
    await settle()
    # Its share of two requests at the prefill worker is one.
    assert pool.order == ["flood 0", "flood 1", "other 0"]
    await flood[0].end()
    await flood[1].end()
    await settle()
    assert pool.order[3:] == ["flood 2"]
    for held in (other[0], other[1], flood[2], other[2], flood[3]):
        await held.finish()
    assert pool.assignments == 0


class RoomPool(FakePool):
    """A decode worker with room for contexts of at most so many tokens, which is what its status says too."""

    most = 100

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        return GRANTED if asked["context_tokens"] <= self.most else FULL

    @property
    def fleet(self) -> FleetView:
        fleet = super().fleet
        fleet.set_decode("d", replace(fleet.decode["d"], free_tokens=self.most))
        return fleet


async def test_a_flood_of_large_contexts_hides_no_small_one_of_another_tenant() -> None:
    asked = dispatcher(pool := RoomPool(), prefill_limit=99, queue_capacity=512)
    running = await ask(asked, "running", tokens=10, tenant="other")
    large = [Held(asked, f"large{i}", tokens=1000, tenant="flood") for i in range(80)]
    await settle()
    assert pool.order == ["running", "large0"], "a flood takes one registration"
    small = [await ask(asked, f"small {tenant}", tokens=10, tenant=tenant) for tenant in ("other", "flood")]
    assert all(request.placed.is_set() for request in small)
    for request in (running, *small, *large):
        request.task.cancel()
    await settle()
    asked.close()
