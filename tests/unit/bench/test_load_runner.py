"""Loops of `baton bench serve`: a cap on requests in flight, and users who are refused."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.runner import Cap, LoadPlan, LoadRun
from baton.bench.load.targets import RETRY_S
from baton.bench.load.workload import Job

HELD_S, BUSY_S = 0.1, 0.05


class Server:
    """Answers with one event; what it does before is its user's."""

    def __init__(self, before: Callable[[int], Awaitable[object]]) -> None:
        self._before = before
        self.prompts: list[Sequence[int] | str] = []
        self.open = self.most_open = 0

    async def send(self, job: Job, outcome: Outcome) -> None:
        self.prompts.append(job.prompt)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._before(len(self.prompts))
            outcome.event()
        finally:
            self.open -= 1

    async def vocab_size(self) -> int | None:
        return None


async def until(true: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come to that")


def jobs(count: int) -> Iterator[Job]:
    return (Job([number], 1, 0.0) for number in range(count))


async def test_no_more_than_the_cap_are_open_and_none_is_passed() -> None:
    server = Server(lambda number: asyncio.sleep(0.001 * (number % 3)))
    run = LoadRun(LoadPlan(max_concurrency=3))
    await run.send_all(server, jobs(30))
    assert server.most_open == 3
    assert run.endings[Ending.FINISHED] == 30
    # Requests that get their places at the same moment may be sent in any order.
    assert all(abs(number - place) < 3 for place, (number,) in enumerate(server.prompts))  # type: ignore[operator, str-unpack]
    assert [each.due for each in run.outcomes] == [run.began] * 30


async def test_the_wait_for_the_cap_is_told_apart_from_the_generators_own() -> None:
    loop = asyncio.get_running_loop()

    async def held(number: int) -> None:
        if number == 1:
            await asyncio.sleep(HELD_S)
            # Runs after the place is given and before the one who waited for it goes on.
            loop.call_soon(time.sleep, BUSY_S)

    run = LoadRun(LoadPlan(max_concurrency=1))
    await run.send_all(Server(held), jobs(2))
    _, second = run.outcomes
    assert second.capped >= HELD_S - 0.01
    assert second.lateness >= BUSY_S
    assert second.sent - second.due == pytest.approx(second.capped + second.lateness)
    # No latency includes either.
    assert second.ttft is not None
    assert second.ttft <= second.ended - second.sent


async def test_late_requests_are_not_sent() -> None:
    run = LoadRun(LoadPlan(max_concurrency=1, timeout_s=1.0))

    # The first ends once both others wait, the second once the third waits no more.
    server = Server(lambda number: until(lambda: run.waiting == (2 if number == 1 else 0)))
    await run.send_all(server, jobs(3))
    assert len(server.prompts) == 2
    assert [each.kind for each in run.outcomes if each.kind == "not sent"] == ["not sent"]
    (unsent,) = [each for each in run.outcomes if each.kind == "not sent"]
    assert unsent.message == "waited 1 s for the cap of 1"
    assert unsent.capped >= 0.99


async def test_requests_that_wait_when_the_run_is_interrupted_were_not_sent() -> None:
    run = LoadRun(LoadPlan(max_concurrency=2))
    server = Server(lambda number: asyncio.Event().wait())
    going = asyncio.create_task(run.send_all(server, jobs(5)))
    await until(lambda: run.waiting == 3)
    run.interrupt()
    await going
    assert (len(run.outcomes), run.endings[Ending.INTERRUPTED], run.waiting) == (2, 2, 0)


async def test_a_place_that_is_given_to_one_who_goes_is_the_next_ones() -> None:
    cap = Cap(1)
    await cap.enter()
    goes, stays = (asyncio.create_task(cap.enter()) for _ in range(2))
    await asyncio.sleep(0)
    assert cap.waiting == 2
    cap.leave()
    goes.cancel()
    await asyncio.wait_for(stays, 60)
    assert cap.waiting == 0
    cap.leave()
    gone = asyncio.create_task(cap.enter())
    await gone
    left = asyncio.create_task(cap.enter())
    await asyncio.sleep(0)
    left.cancel()
    cap.leave()
    await asyncio.gather(left, return_exceptions=True)
    await asyncio.wait_for(cap.enter(), 60)


class Refusing:
    """A server that answers at once, with nothing else than a refusal."""

    def __init__(self, retry_after: float | None) -> None:
        self._retry_after = retry_after

    async def send(self, job: Job, outcome: Outcome) -> None:
        raise RequestFailed("Overloaded", "the queue is full", Ending.REFUSED, self._retry_after)

    async def vocab_size(self) -> int | None:
        return None


@pytest.mark.parametrize(("retry_after", "most"), [(None, 3), (0.45, 2), (60.0, 1)])
async def test_a_client_refused_at_once_waits_and_not_beyond_the_end(retry_after: float | None, most: int) -> None:
    """As long as the server asks for: a loop without pauses sends thousands in this time."""
    seconds = 2.5 * RETRY_S
    run = LoadRun(LoadPlan(concurrency=4, seconds=seconds))
    async with asyncio.timeout(30):  # nobody waits for what may not be sent any more
        await run.send_all(Refusing(retry_after), (Job([1], 1) for _ in itertools.count()))
    assert run.endings[Ending.REFUSED] == len(run.outcomes)
    assert 4 <= len(run.outcomes) <= 4 * (most + 1)


async def test_the_pause_after_the_last_request_is_no_part_of_the_run() -> None:
    run = LoadRun(LoadPlan(concurrency=1, requests=1))
    await run.send_all(Refusing(0.5), iter([Job([1], 1)]))
    assert run.ended == run.outcomes[0].ended
