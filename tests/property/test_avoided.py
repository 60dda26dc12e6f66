"""A request returns to the address of a worker that failed it once another incarnation is there, in simulated time."""

import asyncio

import pytest

from tests.property.storm import simulated


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
