"""The rate of a fetch: the time in which the exporter has nothing to send does not count."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.transfer.fetcher import MAX_FLOW_GAP_S, MIN_FLOW_BYTES, _Flow, _MeteredSource
from tests.property.virtual import VirtualLoop

LARGE, SMALL = bytes(MIN_FLOW_BYTES), bytes(100)


@pytest.mark.parametrize(
    ("frames", "size", "seconds"),
    [
        ([(0.01, LARGE), (0.03, LARGE), (0.001, SMALL)], 2 * MIN_FLOW_BYTES, 0.04),
        # Computing the second layer took longer.
        ([(0.01, LARGE), (MAX_FLOW_GAP_S + 0.01, LARGE), (0.02, LARGE)], 2 * MIN_FLOW_BYTES, 0.03),
        ([(0.01, SMALL), (0.01, SMALL)], 0, 0.0),
    ],
)
def test_frames_that_follow_each_other_count(frames: list[tuple[float, bytes]], size: int, seconds: float) -> None:
    async def send(kv_slice: Any) -> AsyncGenerator[bytes, None]:
        for wait_s, frame in frames:
            await asyncio.sleep(wait_s)
            yield frame

    async def fetch() -> _Flow:
        flow = _Flow()
        metered = _MeteredSource(cast(Any, SimpleNamespace(frames=send)), flow)
        async with aclosing(metered.frames(cast(Any, None))) as coming:
            assert [frame async for frame in coming] == [frame for _, frame in frames]
        return flow

    loop = VirtualLoop()
    flow = loop.run_until_complete(fetch())
    loop.close()
    assert flow.size == size
    assert flow.seconds == pytest.approx(seconds)
