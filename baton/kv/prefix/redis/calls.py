"""Calls to Redis: one round trip to each node concerned, all at once, within a time budget. Faults become misses.

A node that fails gets no calls for a while (`Breaker`), and its keys are misses. Everything is a miss while the nodes
are not known. If some nodes of a cluster fail, or it moves slots, the nodes are looked up again, at most once a second,
so that calls follow a failover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import AskError

from baton.breaker import Permit
from baton.kv.prefix.redis.faults import count_fault, fault_label
from baton.kv.prefix.redis.nodes import Command, Node
from baton.kv.prefix.redis.topology import Topology

_LOOK_AGAIN_S = 1.0

_log = logging.getLogger(__name__)


class RedisCalls:
    """Used on the asyncio loop only. Looking up the nodes may take `budget_s`."""

    def __init__(self, topology: Topology, budget_s: float) -> None:
        self._topology, self._budget_s = topology, budget_s
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = -float("inf")
        self._closed = False

    def can_write(self, key: bytes) -> bool:
        """Whether a write of this key can succeed, as far as is known.

        True also when the breaker would allow one call: a decode worker makes no other calls, so without writes it
        would never notice that the node is back.
        """
        if not self._topology.ready:
            return self._topology.health.breaker.due
        node = self._topology.node_of(key)
        return node is None or node.health.breaker.due

    async def masters(self) -> Sequence[Node]:
        """All known nodes."""
        await self._ensure_ready()
        return self._topology.masters

    async def call_keys(
        self, lane: str, keys: Sequence[bytes], command: Callable[[int], Command], budget_s: float
    ) -> list[Any]:
        """Send `command(i)` for each key i to its node; returns for each its reply, an error about the key, or None."""
        until = _now() + budget_s
        replies: list[Any] = [None] * len(keys)
        if not keys or not await self._ensure_ready():
            return replies
        places: dict[Node, list[int]] = {}
        homeless = 0
        for index, key in enumerate(keys):
            node = self._topology.node_of(key)
            if node is None:
                homeless += 1
            else:
                places.setdefault(node, []).append(index)

        async def ask(node: Node, indexes: Sequence[int]) -> None:
            got = await self.call_node(node, lane, [command(index) for index in indexes], until - _now())
            for index, reply in zip(indexes, got or (), strict=False):
                replies[index] = reply

        async with asyncio.TaskGroup() as group:
            for node, indexes in places.items():
                group.create_task(ask(node, indexes))
        if homeless:
            count_fault("cluster_down", homeless)
            self._refresh_soon()
        self._handle_errors([reply for reply in replies if isinstance(reply, Exception)])
        return replies

    async def call_node(self, node: Node, lane: str, commands: Sequence[Command], budget_s: float) -> list[Any] | None:
        """The replies of one node; None if it failed, and then the nodes are looked up again."""
        if self._closed:
            return None
        replies = await node.run(lane, commands, budget_s)
        if not node.health.is_reachable:
            self._refresh_soon()
        return replies

    async def aclose(self) -> None:
        """Disconnect; this ends all waiting calls."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        await self._topology.aclose()

    def _handle_errors(self, faults: Sequence[Exception]) -> None:
        for fault in faults:
            count_fault(fault_label(fault))
        if faults:
            _log.debug("%d keys of the prefix cache failed, the first: %s", len(faults), faults[0])
        if any(isinstance(fault, AskError) for fault in faults):  # MovedError is one
            self._refresh_soon()

    async def _ensure_ready(self) -> bool:
        """Whether the nodes are known; looks them up first, unless a look-up has just failed."""
        if not self._topology.ready and not self._closed:
            if not self._is_refreshing() and (permit := self._topology.health.breaker.request()) is not None:
                self._refreshing = asyncio.create_task(self._refresh(permit), name="prefix-cache-topology")
            if self._refreshing is not None and not self._refreshing.done():
                await asyncio.wait({self._refreshing})
        return self._topology.ready and not self._closed

    def _refresh_soon(self) -> None:
        late = _now() - self._refreshed_at > _LOOK_AGAIN_S
        if late and not self._is_refreshing() and not self._closed:
            self._refreshing = asyncio.create_task(self._refresh(), name="prefix-cache-topology")

    def _is_refreshing(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    async def _refresh(self, permit: Permit | None = None) -> None:
        self._refreshed_at = _now()
        try:
            async with asyncio.timeout(self._budget_s):
                await self._topology.refresh()
        except Exception as error:  # any error while looking up the nodes is a miss
            self._topology.health.record_failure(error, permit)
        else:
            self._topology.health.record_success()


def _now() -> float:
    return asyncio.get_running_loop().time()
