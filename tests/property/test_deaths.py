"""Deaths of workers and breaks of sessions in simulated time: which requests are blamed, which continue and where."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, EngineError, Overloaded, Unavailable
from baton.pb import decode_pb2
from tests.property.fleet import Worker
from tests.property.storm import Storm, simulated

AN_HOUR_S = 3600


def run(storm: Storm, work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(AN_HOUR_S):
            await work

    storm.loop.run_until_complete(bounded())


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("mates", [0, 1, 8, 31])
def test_a_request_that_kills_is_found_and_its_mates_finish(where: str, mates: int) -> None:
    random.seed(mates)
    bad = mates // 2

    async def work() -> None:
        async with storm.running():
            await asyncio.gather(*(storm.stream(max_tokens=40) for _ in range(mates + 1)))

    def is_bad(asked: Any) -> bool:
        return list(asked.prompt_token_ids) == [bad + 1, 2, 3]

    with simulated() as storm:
        if where == "prefill":
            storm.kills_prefill = is_bad
        else:
            storm.kills_decode = lambda asked, index: is_bad(asked) and index >= 5
        run(storm, work())
        poison = storm.streams.pop(bad)
        assert isinstance(poison.error, EngineError)
        assert "at the last one alone" in str(poison.error)
        assert all(stream.right for stream in storm.streams)
        assert 3 <= storm.deaths <= 12


@pytest.mark.parametrize("kills", [False, True])
def test_others_go_on_while_a_long_prompt_is_computed_alone(kills: bool) -> None:
    """Workers die of something else while it is computed; it may kill decode workers afterwards."""

    def is_long(asked: Any) -> bool:
        return list(asked.prompt_token_ids) == [1, 2, 3]

    def its_worker() -> Worker | None:
        jobs = ((worker, job) for worker in storm.fleet.prefills for job in worker.jobs)
        return next((worker for worker, job in jobs if is_long(job.request)), None)

    async def work() -> None:
        async with storm.running():
            long = storm.stream(max_tokens=40)
            for _ in range(2):
                await storm.until(its_worker)
                storm.kill(its_worker() or storm.fleet.prefills[0])
                await storm.until(lambda: its_worker() is None)
            await storm.until(its_worker)
            assert storm.pool.fleet.isolated == {worker.address for worker in [its_worker()] if worker}
            await asyncio.gather(*(storm.stream(max_tokens=40) for _ in range(8)))
            assert its_worker() is not None
            # No proof: it did not have this worker for itself.
            storm.kill(storm.fleet.decodes[0])
            await storm.until(lambda: its_worker() is None)
            await storm.until(its_worker)
            storm.computes_slowly = lambda asked: False
            others = asyncio.gather(*(storm.stream(max_tokens=40) for _ in range(8)))
            await asyncio.gather(long, others)

    with simulated(decodes=1) as storm:
        storm.computes_slowly = is_long
        storm.kills_decode = lambda asked, index: kills and is_long(asked)
        run(storm, work())
        long, *others = storm.streams
        assert all(stream.right for stream in others)
        assert (isinstance(long.error, EngineError) and "alone" in str(long.error)) if kills else long.right
        assert storm.deaths <= 3 + 6 * kills


def test_one_choice_of_three_that_kills_ends_its_request_and_the_choices_wait_for_no_other() -> None:
    async def work() -> None:
        async with storm.running():
            await asyncio.gather(storm.stream(max_tokens=20, n=3), storm.stream(max_tokens=40))

    with simulated() as storm:
        storm.kills_decode = lambda asked, index: (
            asked.prompt_token_ids[0] == 1 and index >= 5 and 1 in asked.choice_indexes
        )
        run(storm, work())
        poison, other = storm.streams
        assert isinstance(poison.error, EngineError)
        assert other.right
        assert storm.loop.now < 30


def test_three_choices_that_were_at_two_deaths_share_one_turn() -> None:
    async def work() -> None:
        async with storm.running(isolation_wait_s=30.0):
            stream = storm.stream(max_tokens=80, n=3)
            await storm.until(lambda: all(storm.streams[0].tokens.values()))
            # Nothing is computed while workers die, so that the request makes no progress in between.
            storm.paused = True
            for _ in range(2):
                await storm.until(lambda: sum(len(worker.held) for worker in storm.fleet.decodes) in (1, 3))
                for worker in storm.fleet.decodes:
                    storm.kill(worker)
                await asyncio.sleep(storm.back_s + 1.0)
            storm.paused = False
            await stream

    with simulated(step_s=0.5, prefills=1) as storm:
        run(storm, work())
        assert storm.streams[0].right, storm.streams[0].error


@pytest.mark.parametrize("seed", [0, 4, 6])
def test_requests_that_kill_at_one_router_convict_none_at_another(seed: int) -> None:
    """With each of these seeds, a good request is convicted if a router ignores the requests of other routers."""
    random.seed(seed)

    async def work() -> None:
        async with storm.running(), other.routing():
            await asyncio.sleep(1.0)
            bad = [other.stream(max_tokens=40) for _ in range(3)]
            good = []
            for _ in range(3):
                good.append(storm.stream(max_tokens=40))
                await asyncio.sleep(random.uniform(0, 0.3))
            await asyncio.gather(*bad, *good)

    with simulated() as storm:
        other = storm.beside()
        storm.kills_decode = lambda asked, index: asked.prompt_token_ids[0] > 100 and index >= 2
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
        errors = [stream.error for stream in other.streams]
        # One that kills may use up its attempts before it is known.
        assert all(isinstance(error, (EngineError, Unavailable)) for error in errors)
        assert any(isinstance(error, EngineError) and "alone" in str(error) for error in errors), errors


def test_a_stream_survives_any_number_of_faults_that_lie_far_apart() -> None:
    async def work() -> None:
        async with storm.running():
            stream = storm.stream(max_tokens=500)
            for _ in range(5):
                await asyncio.sleep(80 * 0.1)
                for worker in storm.busy():
                    for held in list(worker.held.values()):
                        worker.fail_attempt(held, decode_pb2.AttemptFailure.KIND_ENGINE)
            await stream

    with simulated(step_s=0.1) as storm:
        run(storm, work())
        assert storm.streams[0].right, storm.streams[0].error


@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_blamed_in_a_storm(seed: int) -> None:
    random.seed(seed)

    async def work() -> None:
        async with storm.running():
            kills = asyncio.create_task(storm.kills(random.Random(seed), 100, (0.5, 3.0)))
            await asyncio.gather(*(storm.stream(max_tokens=60) for _ in range(56)))
            kills.cancel()

    with simulated(step_s=0.25, back_s=4.0) as storm:
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
        assert storm.deaths >= 10


@pytest.mark.parametrize("count", [1, 8])
def test_requests_finish_though_sessions_of_healthy_workers_break_again_and_again(count: int) -> None:
    isolated: set[str] = set()

    async def work() -> None:
        async with storm.running(isolation_wait_s=2.0):
            storm.pool.subscribe(lambda: isolated.update(storm.pool.fleet.isolated))
            streams = asyncio.gather(*(storm.stream(max_tokens=60) for _ in range(count)))
            # A single request would be the only suspect of each loss, as it gets no token in between.
            storm.paused = count == 1
            for _ in range(6):
                await asyncio.sleep(1.5)
                for worker in storm.fleet.decodes:
                    storm.break_session(worker)
            storm.paused = False
            await streams

    with simulated(decodes=1, step_s=0.1) as storm:
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
        assert not isolated, "the workers live, so no request is suspected"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_for_a_role_that_is_gone_and_go_on_in_order(role: str) -> None:
    random.seed(1)

    async def work() -> None:
        async with storm.running():
            before = [storm.stream(max_tokens=40) for _ in range(8)]
            await asyncio.sleep(0.6)
            gone = storm.fleet.prefills if role == "prefill" else storm.fleet.decodes
            for worker in gone:
                storm.kill(worker)
            await asyncio.sleep(1.0)
            after = [storm.stream(max_tokens=2) for _ in range(8)]
            done: list[int] = []
            for number, task in enumerate(after):
                task.add_done_callback(lambda _, number=number: done.append(number))
            await asyncio.gather(*before, *after)
            # Two at a time are prefilled, and are done in any order.
            assert all(abs(place - number) < 4 for place, number in enumerate(done))

    with simulated(back_s=30.0) as storm:
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
        assert storm.loop.now > 30


def test_a_wait_for_workers_ends_by_deadline_or_worker_wait_and_says_what_lacks() -> None:
    async def work() -> None:
        async with storm.running(worker_wait_s=60.0, queue_capacity=3):
            for worker in storm.fleet.decodes:
                storm.kill(worker)
            await asyncio.sleep(1.0)
            streams = [storm.stream(max_tokens=4, within_s=20.0), storm.stream(max_tokens=4)]
            await asyncio.sleep(10.0)
            streams += [storm.stream(max_tokens=4), storm.stream(max_tokens=4)]
            await asyncio.gather(*streams)
            ends.append(storm.loop.now)

    ends: list[float] = []
    with simulated(back_s=1000.0) as storm:
        run(storm, work())
        late, first, second, refused = storm.streams
        assert isinstance(late.error, DeadlineExceeded)
        assert "passed after 20.0 s, 20.0 s of it in the queue: no decode worker is there" in str(late.error)
        assert isinstance(first.error, Unavailable)
        assert str(first.error).startswith("no decode worker is there after a wait of 60 s")
        assert isinstance(second.error, Unavailable)
        assert isinstance(refused.error, Overloaded)
        # Each waits that long, and not just until the first one has.
        assert 70 < ends[0] < 75


def test_a_worker_that_was_never_there_is_waited_for() -> None:
    async def work() -> None:
        for worker in storm.fleet.prefills:
            worker.die()
        async with storm.running():
            stream = storm.stream(max_tokens=4)
            await asyncio.sleep(20.0)
            storm.fleet.prefills[0].live()
            await stream

    with simulated() as storm:
        run(storm, work())
        assert storm.streams[0].right


def test_a_request_that_must_run_alone_waits_for_workers_as_well() -> None:
    async def work() -> None:
        async with storm.running():
            stream = storm.stream(max_tokens=10)
            for _ in range(2):
                await storm.until(storm.busy)
                storm.kill(storm.fleet.decodes[0])
                await asyncio.sleep(0.01)
            await stream

    with simulated(prefills=1, decodes=1, back_s=25.0) as storm:
        run(storm, work())
        assert storm.streams[0].right, storm.streams[0].error


def test_frozen_workers_do_not_isolate_a_request() -> None:
    """Two freezes of five seconds and more, under a request that is all alone: it never must run alone."""

    async def work() -> None:
        async with storm.running(isolation_wait_s=1.0):
            stream = storm.stream(max_tokens=12)
            for _ in range(4):
                await storm.until(storm.busy)
                (frozen,) = storm.busy()
                frozen.silent = True
                await asyncio.sleep(7.0)
                frozen.live()
                await asyncio.sleep(1.5)
            await stream

    with simulated(step_s=3.0) as storm:
        run(storm, work())
        assert storm.streams[0].right, storm.streams[0].error


@pytest.mark.parametrize("how", ["killed", "session broken"])
def test_a_replay_returns_to_a_decode_worker_that_is_back_and_others_wait_for_no_full_one(how: str) -> None:
    with simulated(prefills=2, decodes=2, back_s=2.0) as storm:
        back, full = storm.fleet.decodes

        async def work() -> None:
            async with storm.running():
                full.full = True
                storm.stream(max_tokens=400)
                replayed = storm.streams[0]
                await storm.until(lambda: len(replayed.tokens[0]) > 5)
                storm.kill(back) if how == "killed" else storm.break_session(back)
                await asyncio.sleep(5)
                storm.stream(max_tokens=4)
                await asyncio.sleep(5)
                assert storm.streams[1].right
                assert len(replayed.tokens[0]) > 50

        storm.loop.run_until_complete(work())
