"""Mixed workers in simulated time: none waits for another, whoever computes the prompts, and nothing is left."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from router.placement import policy
from tests.property.fleet import LEASE_S
from tests.property.storm import Storm, simulated

BOUND_S = 600.0
"""Many times what the slowest of these runs takes."""

FLEETS: dict[str, dict[str, int]] = {
    "two": {"prefills": 0, "decodes": 0, "mixed": 2},
    "three": {"prefills": 0, "decodes": 0, "mixed": 3},
    "beside": {"prefills": 1, "decodes": 1, "mixed": 1},
}


@pytest.fixture(params=["by seconds", "elsewhere", "in place"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where prompts are computed: as placement decides, at another worker if possible, or in place if possible."""
    transfer_s = {"elsewhere": -100.0, "in place": 100.0}.get(request.param)
    if transfer_s is not None:
        monkeypatch.setattr(policy, "TRANSFER_S", transfer_s)
    return str(request.param)


def run(storm: Storm, work: Coroutine[Any, Any, None]) -> None:
    """Run the work to its end; afterwards all streams are right, and nothing is left at a worker."""

    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await work

    storm.loop.run_until_complete(bounded())


async def empty(storm: Storm) -> None:
    """Hold that nothing is left once the leases of exports have ended."""
    await asyncio.sleep(2 * LEASE_S)
    for worker in storm.fleet.workers.values():
        assert not any((worker.held, worker.waiting, worker.jobs, worker.exports)), worker.address
        assert worker.free_pages == worker.pages


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("pages", [2, 5])
def test_full_mixed_workers_never_wait_for_each_other(fleet: str, pages: int, placement: str) -> None:
    """All pages are reserved for prompts that are yet to be computed, from two routers."""
    random.seed(pages)
    draw = random.Random(pages)

    async def work() -> None:
        async with storm.running(), other.routing():
            await asyncio.sleep(1.0)
            streams = []
            for number in range(40):
                router = (storm, other)[number % 2]
                streams.append(router.stream(max_tokens=draw.randint(1, 8), prompt=draw.randint(3, 24)))
                if number % 10 == 9:
                    await asyncio.sleep(draw.uniform(0.0, 1.0))
            await asyncio.gather(*streams)
            await empty(storm)

    with simulated(**FLEETS[fleet]) as storm:
        other = storm.beside()
        for worker in storm.fleet.mixed:
            worker.pages = pages
        run(storm, work())
        streams = [*storm.streams, *other.streams]
        assert [stream.error for stream in streams if not stream.right] == []
        mixed = storm.fleet.mixed
        if placement == "in place":
            assert sum(worker.in_place for worker in mixed) > 0
        if placement == "elsewhere" and fleet != "beside":
            assert sum(worker.prompts - worker.in_place for worker in mixed) > 0
            assert sum(worker.refused for worker in mixed) > 0


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("seed", [0])
def test_no_request_is_blamed_in_a_storm_on_mixed_workers(fleet: str, seed: int) -> None:
    random.seed(seed)

    async def work() -> None:
        async with storm.running():
            # A death of each worker every 14 s on average.
            every_s = 4 / len(storm.fleet.workers), 24 / len(storm.fleet.workers)
            kills = asyncio.create_task(storm.kills(random.Random(seed), 40, every_s))
            await asyncio.gather(*(storm.stream(max_tokens=40, n=1 + number % 2) for number in range(32)))
            kills.cancel()
            await asyncio.sleep(storm.back_s)
            await empty(storm)

    with simulated(**FLEETS[fleet], step_s=0.25, back_s=4.0) as storm:
        for worker in storm.fleet.mixed:
            worker.pages = 16
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
        assert storm.deaths >= 3


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_request_that_kills_mixed_workers_is_found(where: str, placement: str) -> None:
    """One death of a mixed worker is one event, though it prefilled and decoded."""
    random.seed(1)

    async def work() -> None:
        async with storm.running():
            await asyncio.gather(*(storm.stream(max_tokens=40) for _ in range(9)))

    def is_bad(asked: Any) -> bool:
        return bool(asked.prompt_token_ids[0] == 5)

    with simulated(**FLEETS["two"]) as storm:
        if where == "prefill":
            storm.kills_prefill = is_bad
        else:
            storm.kills_decode = lambda asked, index: is_bad(asked) and index >= 5
        run(storm, work())
        poison = storm.streams.pop(4)
        assert "at the last one alone" in str(poison.error)
        assert [stream.error for stream in storm.streams if not stream.right] == []
        assert 3 <= storm.deaths <= 12


def test_streams_go_on_at_the_other_mixed_worker(placement: str) -> None:
    async def work() -> None:
        async with storm.running():
            streams = asyncio.gather(*(storm.stream(max_tokens=60) for _ in range(8)))
            await storm.until(lambda: all(stream.tokens[0] for stream in storm.streams))
            storm.kill(storm.fleet.mixed[0])
            await streams
            assert storm.loop.now < 100

    with simulated(**FLEETS["two"], back_s=1000.0) as storm:
        run(storm, work())
        assert [stream.error for stream in storm.streams if not stream.right] == []
