"""One master of Redis: what a call says of it, with a client that answers, stalls or fails on demand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from baton.breaker import Breaker
from baton.kv.prefix.redis.nodes import LANES, Node, NodeHealth
from tests.clock import Clock


class StubClient:
    """A client of redis-py whose calls end with `answer`, once `open` is set."""

    def __init__(self) -> None:
        self.answer: list[Any] | Exception = [b"OK"]
        self.open = asyncio.Event()
        self.open.set()

    def pipeline(self, transaction: bool) -> StubClient:
        return self

    async def __aenter__(self) -> StubClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def execute_command(self, *_: Any) -> None:
        pass

    async def execute(self, raise_on_error: bool) -> list[Any]:
        await self.open.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def ask(node: Node, budget_s: float = 60.0) -> list[Any] | None:
    return await node.run("look", [("GET", b"key")], budget_s)


@pytest.mark.parametrize("how", ["cancelled", "busy"])
async def test_a_trial_that_did_not_reach_the_node_is_followed_by_another_at_once(how: str) -> None:
    clock, client = Clock(), StubClient()
    node = Node(cast(Any, client), NodeHealth("redis", Breaker(clock=clock)))
    client.open.clear()
    others = [asyncio.create_task(ask(node)) for _ in range(LANES["look"] - (how == "cancelled"))]
    await asyncio.sleep(0)
    node.health.record_failure(ConnectionError())
    clock.now += 1.01
    if how == "cancelled":
        trial = asyncio.create_task(ask(node))
        await asyncio.sleep(0)
        assert await ask(node) is None, "the trial is under way"
        trial.cancel()
        await asyncio.wait({trial})
    else:
        assert await ask(node, budget_s=1e-6) is None, "no place in the lane is free"
    for other in others:
        other.cancel()
    await asyncio.wait(others)
    client.open.set()
    assert await ask(node) == [b"OK"]
    assert node.health.is_reachable
