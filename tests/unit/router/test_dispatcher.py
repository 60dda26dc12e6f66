"""From the queue to a place, with workers that answer as the test says; no network."""

import asyncio
from typing import Any

import pytest

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.lifecycle import State
from baton.request import ReserveResult
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


async def test_a_full_fleet_is_asked_once_in_an_epoch_and_by_the_waiter_refused_first() -> None:
    d = dispatcher(pool := FakePool())
    pool.answer_all(FULL)
    first = await ask(d, "first")
    assert pool.asked == 1
    second = await ask(d, "second")
    assert pool.asked == 1
    pool.notify()
    await settle()
    assert (pool.asked, pool.order) == (2, ["first", "first"])
    pool.answer_all(GRANTED)
    pool.notify()
    await asyncio.gather(first.placed.wait(), second.placed.wait())
    assert (pool.asked, pool.order[2:], pool.assignments) == (4, ["first", "second"], 2)
    await asyncio.gather(first.end(), second.end())
    assert (pool.assignments, pool.closed) == (0, 2 + 2)


async def test_requests_with_a_context_that_finds_room_go_on_behind_one_that_lacks_pages() -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=9)
    pool.answer_all(ReserveResult(False, "needs pages", False, reservable_tokens=30))
    large = await ask(d, "large", tokens=100)
    pool.answer_all(GRANTED)
    small = [Held(d, f"small{number}", tokens=10) for number in range(4)]
    other = await ask(d, "other", tokens=50)
    # The room is for three of them; the others wait for the next epoch, and ask after the large one.
    assert pool.order == ["large", "small0", "small1", "small2"]
    pool.notify()
    await asyncio.wait_for(asyncio.gather(large.placed.wait(), other.placed.wait()), 5)
    assert pool.order[4:] == ["large", "small3", "other"]
    for held in (large, other, *small):
        await held.end()
    assert pool.assignments == 0


async def test_after_a_refused_overtaker_only_half_as_large_ones_ask_before_the_next_epoch() -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=9)
    pool.answer_all(ReserveResult(False, "needs pages", False, reservable_tokens=64))
    waiting = [Held(d, "100", tokens=100)]
    await settle()
    waiting += [Held(d, str(tokens), tokens=tokens) for tokens in (60, 50, 40, 20, 16, 7)]
    await settle()
    assert pool.order == ["100", "60", "20", "7"]
    pool.answer_all(FULL)
    pool.notify()
    await settle()
    assert pool.order[4:] == ["100"]
    d.close()
    await asyncio.gather(*(held.task for held in waiting), return_exceptions=True)


@pytest.mark.parametrize("placed", [True, False])
async def test_claims_end_when_a_request_is_placed_elsewhere_or_cancelled(placed: bool) -> None:
    d = dispatcher(pool := FakePool(d=FULL, e=FULL))
    held = await ask(d, "r")
    assert (pool.asked, pool.cancelled_claims) == (2, [])
    if placed:
        pool.answer(e=GRANTED)
        await held.until_placed()
        assert pool.cancelled_claims == ["r d"]
    else:
        await held.cancel()
        assert sorted(pool.cancelled_claims) == ["r d", "r e"]
    held.go.set()
    await asyncio.gather(held.task, return_exceptions=True)


async def test_a_placement_that_ends_begins_an_epoch() -> None:
    d = dispatcher(pool := FakePool())
    running = await place(d, "running")
    pool.answer_all(FULL)
    waiting = await ask(d, "waiting")
    pool.answer_all(GRANTED)
    await running.end()
    await waiting.finish()


async def test_an_epoch_that_begins_while_decode_is_asked_is_not_lost() -> None:
    class Changing(FakePool):
        async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
            answer = await super().reserve(attempt)
            self.answer_all(GRANTED)
            self.notify()
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


@pytest.mark.parametrize("had_its_turn", [True, False])
async def test_a_waiter_that_is_cancelled_before_it_wakes_gives_its_turn_to_the_next(had_its_turn: bool) -> None:
    d = dispatcher(pool := FakePool(), prefill_limit=1)
    running = await place(d, "running")
    waiting, other = Held(d, "waiting"), Held(d, "other")
    await settle()
    if had_its_turn:
        d.release(running.place.prefill)
    waiting.task.cancel()
    if not had_its_turn:
        d.release(running.place.prefill)
    await other.until_placed()
    await asyncio.gather(running.end(), other.end())
    assert pool.assignments == 0


async def test_a_cancelled_head_of_line_does_not_stop_the_queue() -> None:
    d = dispatcher(pool := FakePool(d=FULL))
    first, second = Held(d, "first"), Held(d, "second")
    await settle()
    pool.answer_all(GRANTED)
    first.task.cancel()
    pool.notify()
    await second.finish()
    assert pool.assignments == 0


async def test_requests_that_need_no_decode_do_not_wait_for_decode() -> None:
    d = dispatcher(FakePool(d=FULL))
    full = await ask(d, "full")
    await full.cancel()
    short = await place(d, "short", needs_decode=False)
    assert short.place.decode is None
    await short.end()


async def test_without_workers_new_requests_and_accepted_ones_wait_a_while() -> None:
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
        await Held(d, "new").task


async def test_a_decode_worker_that_does_not_answer_is_a_refusal() -> None:
    closed = asyncio.Event()

    class Silent(FakePool):
        async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
            if self.asked > 1:
                return GRANTED
            return await asyncio.get_running_loop().create_future()

        def close(self, attempt: FakeAttempt) -> None:
            closed.set()

    d = dispatcher(pool := Silent(), reserve_timeout_s=0.02)
    held = Held(d, "r")
    await asyncio.wait_for(closed.wait(), 60)
    await settle()
    assert pool.assignments == 0
    pool.notify()
    await held.finish()


async def test_a_request_that_is_too_large_is_refused_at_once_and_does_not_stop_the_queue() -> None:
    d = dispatcher(pool := FakePool())
    pool.answer_all(ReserveResult(False, "needs 9 pages, there are 4", True))
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
    assert pool.order[2:] == ["r large"], "a worker that is too small is not asked again"
    await held.end()


async def test_a_replay_that_only_a_lost_worker_could_hold_waits_for_one_like_it() -> None:
    d = dispatcher(pool := FakePool(small=TOO_LARGE), worker_wait_s=5)
    held = await ask(d, "r", again=True)
    assert not held.task.done()
    pool.answer(large=GRANTED)
    await held.finish()
    del pool.by_name["large"]
    d = dispatcher(pool, worker_wait_s=0.02)
    other = Held(d, "other", again=True)
    with pytest.raises(Unavailable, match=r"that could hold the request, after a wait of 0\.02 s: .* 9 pages"):
        await asyncio.wait_for(other.task, 60)
    assert pool.assignments == 0


async def test_the_lifecycle_of_a_request_follows_its_placement() -> None:
    d = dispatcher(pool := FakePool(d=FULL), reserve_timeout_s=2)
    held = await ask(d, "r")
    assert held.lifecycle.state is State.QUEUED
    pool.answer(d=GRANTED)
    await held.placed.wait()
    assert held.lifecycle.state is State.RESERVING
    assert held.lifecycle.deadline == pytest.approx(asyncio.get_running_loop().time() + 2, abs=1)
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
    """A decode worker with room for 100 tokens."""

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        fits = asked["context_tokens"] in range(101)
        return GRANTED if fits else ReserveResult(False, "pages", False, 1.0, reservable_tokens=100)


async def test_a_flood_of_large_contexts_hides_no_small_one_of_another_tenant() -> None:
    asked = dispatcher(RoomPool(), prefill_limit=99, queue_capacity=512)
    running = await ask(asked, "running", tokens=10, tenant="other")
    large = [Held(asked, f"large{i}", tokens=1000, tenant="flood") for i in range(80)]
    await settle()
    small = await ask(asked, "small", tokens=10, tenant="other")
    assert small.placed.is_set()
    for request in (running, small, *large):
        request.task.cancel()
    await settle()
    asked.close()
