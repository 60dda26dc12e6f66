"""One master: its client of redis-py, its breaker, and how many calls it gets at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import ClusterDownError, RedisError

from baton.breaker import Permit
from baton.kv.prefix.redis.faults import NodeHealth, count_fault

Command: TypeAlias = tuple[Any, ...]
"""A command and its arguments, as `Redis.execute_command` takes them."""

LANES = {"look": 8, "fetch": 8, "write": 4}
"""The number of calls of each kind that one node gets at a time, so that no kind delays another."""


class Node:
    """One master. Its client opens connections as needed, one for each running call."""

    def __init__(self, client: Redis, health: NodeHealth) -> None:
        self.client, self.health = client, health
        self._lanes = {name: asyncio.Semaphore(most) for name, most in LANES.items()}

    async def run(self, lane: str, commands: Sequence[Command], budget_s: float) -> list[Any] | None:
        """The replies to the commands, in one round trip; errors about single keys are among them.

        None if the breaker is open, no place in the lane becomes free, or the call fails: all commands are refused, the
        connection breaks, or the budget is exceeded. redis-py closes a connection when its call is cancelled, so that a
        late reply is not mistaken for the reply to another command.
        """
        if budget_s <= 0:
            count_fault("timeout")  # earlier calls have used up the budget
            return None
        permit = self.health.breaker.request()
        if permit is None:
            return None
        try:
            return await self._run(lane, commands, budget_s, permit)
        finally:
            # A trial that was cancelled, or found its lane busy, says nothing of the node.
            self.health.breaker.release(permit)

    async def _run(self, lane: str, commands: Sequence[Command], budget_s: float, permit: Permit) -> list[Any] | None:
        until = asyncio.get_running_loop().time() + budget_s
        try:
            async with asyncio.timeout_at(until):
                await self._lanes[lane].acquire()
        except TimeoutError:
            count_fault("busy")  # this is no fault of the node
            return None
        try:
            async with asyncio.timeout_at(until):
                replies = await self._ask(commands)
        except Exception as error:  # any error of a broken connection is a miss
            self.health.record_failure(error, permit)
            return None
        finally:
            self._lanes[lane].release()
        self.health.record_success()
        return replies

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, ClusterDownError):
                raise reply  # the reply to one key, but about the whole node
        return replies

    async def aclose(self) -> None:
        """Close all connections: calls under way fail."""
        await close(self.client)


async def close(client: Redis) -> None:
    """Close a client's connections, whatever state they are in."""
    with suppress(OSError, RedisError):
        await client.aclose()
