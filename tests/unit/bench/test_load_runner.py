"""The closed loop of `baton bench serve` when nothing is served."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.runner import Plan, Run
from baton.bench.load.targets import AGAIN_S
from baton.bench.load.workload import Job


class Refusing:
    """A server that answers at once, with nothing else than a refusal."""

    def __init__(self, retry_after: float | None) -> None:
        self._retry_after = retry_after

    async def send(self, job: Job, outcome: Outcome) -> None:
        raise RequestFailed("Overloaded", "the line is full", Ending.REFUSED, self._retry_after)

    async def vocab_size(self) -> int | None:
        return None


@pytest.mark.parametrize(("retry_after", "most"), [(None, 3), (0.45, 2), (60.0, 1)])
async def test_who_is_refused_at_once_waits_and_not_beyond_the_end(retry_after: float | None, most: int) -> None:
    """As long as the server asks for: a loop without pauses sends thousands in this time."""
    seconds = 2.5 * AGAIN_S
    run = Run(Plan(concurrency=4, seconds=seconds))
    async with asyncio.timeout(30):  # nobody waits for what may not be sent any more
        await run.go(Refusing(retry_after), (Job([1], 1) for _ in itertools.count()))
    assert run.endings[Ending.REFUSED] == len(run.outcomes)
    assert 4 <= len(run.outcomes) <= 4 * (most + 1)


async def test_the_pause_after_the_last_request_is_no_part_of_the_run() -> None:
    run = Run(Plan(concurrency=1, requests=1))
    await run.go(Refusing(0.5), iter([Job([1], 1)]))
    assert run.ended == run.outcomes[0].ended
