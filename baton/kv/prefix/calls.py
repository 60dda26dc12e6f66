"""Calls to Redis from the asyncio loop: exchanges with all nodes concerned at once, within a time budget.

Each exchange runs in a thread of our own; what it waits for is bounded by its sockets' timeouts, and the caller does
not wait for longer than the budget in any case. A node that fails is left alone for a while (`Breaker`), and its keys
are misses; so is everything while it is not known where the nodes are. A cluster that fails in part is looked at
again, at most once a second, so that a failover is followed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from redis.exceptions import AskError, MovedError, ReadOnlyError, RedisError

from baton.kv.prefix.exchange import Exchange, Fetch
from baton.kv.prefix.faults import count, reason
from baton.kv.prefix.servers import Node, Servers

LANES = 2 if (os.cpu_count() or 1) > 2 else 1
"""Connections of one fetch to one server. One thread checks while the other receives, if there are cores for both
beside the server's; while a single one checks, the server fills its socket."""

_SLACK_S = 0.05
_LOOK_AGAIN_S = 1.0
_THREADS = {"look": 8, "fetch": 8, "write": 4}

Part = tuple[Node, Sequence[int], bool]

_log = logging.getLogger(__name__)


class Calls:
    """Lives on the asyncio loop."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._threads = {name: ThreadPoolExecutor(most, f"redis-{name}") for name, most in _THREADS.items()}
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = -float("inf")
        self._closed = False

    def accepts(self, key: bytes) -> bool:
        """Whether a write of this key has a chance, as far as is known.

        One that is due as a try is: a decode worker makes no other calls, and would else never come back.
        """
        if not self._servers.ready:
            return self._servers.health.breaker.due
        return all(node.health.breaker.due for node in self._servers.of([key]))

    async def masters(self, budget_s: float) -> list[Node]:
        """All nodes that are known."""
        await self._ready(budget_s)
        return self._servers.masters()

    async def keyed(self, threads: str, keys: Sequence[bytes], exchange: Exchange, budget_s: float) -> None:
        """Run the exchange for each key at its node; once more for those that are somewhere else by now."""
        until = time.monotonic() + budget_s
        if not keys or not await self._ready(budget_s):
            return
        places = self._servers.of(keys)
        if homeless := len(keys) - sum(map(len, places.values())):
            count("cluster_down", homeless)
            self._look_again()
        await self.at(threads, _parts(places, exchange), exchange, until - time.monotonic())
        if again := self._redirected(exchange):
            await self.at(threads, again, exchange, until - time.monotonic())
        faults = [slot for slot in exchange.slots if isinstance(slot, Exception)]
        for fault in faults:
            count(reason(fault))
        if faults:
            _log.debug("%d keys of the prefix cache failed, the first: %s", len(faults), faults[0])
        if any(isinstance(fault, ReadOnlyError) for fault in faults):
            for node in places:
                self._servers.demoted(node)

    async def at(self, threads: str, parts: Sequence[Part], exchange: Exchange, budget_s: float) -> None:
        """Run parts of an exchange at once. What fails or is late leaves its slots as they are."""
        if self._closed:
            return
        if budget_s <= 0:
            count("timeout")  # that of what came before
            return
        allowed = {node: node.health.breaker.allows() for node in dict.fromkeys(node for node, _, _ in parts)}
        jobs, pool = {}, self._threads[threads]
        for node, indexes, asking in parts:
            if allowed[node]:
                jobs[pool.submit(_run, node, exchange, indexes, asking, budget_s)] = node
        if not jobs:
            return
        waited = {asyncio.wrap_future(job): job for job in jobs}
        done, late = await asyncio.wait(waited, timeout=budget_s + _SLACK_S)
        outcomes: dict[Node, Exception | None] = {}
        for future in done:
            node = jobs[waited[future]]
            if not future.cancelled():  # by `close`
                outcomes[node] = outcomes.get(node) or future.result()
        for future in late:
            if waited[future].cancel():
                count("busy")  # no thread was free: that says nothing of the node
            else:
                outcomes[jobs[waited[future]]] = TimeoutError("no answer in time")
        self._learn(outcomes)

    async def close(self, within_s: float) -> None:
        """Disconnect, which ends all waiting, and let the threads go."""
        self._closed = True
        closer = ThreadPoolExecutor(1, "redis-close")
        await asyncio.wait({asyncio.wrap_future(closer.submit(self._disconnect))}, timeout=within_s)
        for pool in (closer, *self._threads.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._opening is not None:
            self._opening.cancel()

    def _disconnect(self) -> None:
        with suppress(OSError, RedisError):
            self._servers.close()

    def _learn(self, outcomes: Mapping[Node, Exception | None]) -> None:
        for node, error in outcomes.items():
            if error is None:
                node.health.came_through()
            else:
                node.health.failed(error)
        if any(outcomes.values()):
            self._look_again()

    def _redirected(self, exchange: Exchange) -> list[Part]:
        places: dict[tuple[Node, bool], list[int]] = {}
        for index, slot in enumerate(exchange.slots):
            if isinstance(slot, AskError):
                node = self._servers.redirected(slot)
                if node is not None:
                    places.setdefault((node, not isinstance(slot, MovedError)), []).append(index)
        if places:
            self._look_again()
        return [(node, indexes, asking) for (node, asking), indexes in places.items()]

    async def _ready(self, budget_s: float) -> bool:
        """Whether it is known where the nodes are; waits for that if nobody has failed to find out just now.

        To ask nodes that don't answer, one after the other, takes many budgets; only whoever begins it waits for one.
        """
        health = self._servers.health
        if not self._servers.ready:
            if begins := not self._is_opening() and not self._closed and health.breaker.allows():
                self._opening = asyncio.create_task(self._open(), name="prefix-cache-open")
            if self._opening is not None and (begins or health.well):
                _, late = await asyncio.wait({self._opening}, timeout=budget_s)
                if late and health.well:
                    health.failed(TimeoutError("no answer in time"))
        return self._servers.ready and not self._closed

    def _look_again(self) -> None:
        late = time.monotonic() - self._opened_at > _LOOK_AGAIN_S
        if late and not self._is_opening() and not self._closed:
            self._opening = asyncio.create_task(self._open(), name="prefix-cache-open")

    def _is_opening(self) -> bool:
        return self._opening is not None and not self._opening.done()

    async def _open(self) -> None:
        self._opened_at = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads["look"], self._servers.open)
        except Exception as error:  # whatever keeps the client from finding its nodes, it is a miss
            self._servers.health.failed(error)
        else:
            self._servers.health.came_through()


def _parts(places: Mapping[Node, Sequence[int]], exchange: Exchange) -> list[Part]:
    if isinstance(exchange, Fetch) and len(places) == 1:
        ((node, indexes),) = places.items()
        return [(node, lane, False) for lane in exchange.lanes(indexes, LANES)]
    return [(node, indexes, False) for node, indexes in places.items()]


def _run(node: Node, exchange: Exchange, indexes: Sequence[int], asking: bool, budget_s: float) -> Exception | None:
    try:
        with node.wire(time.monotonic() + budget_s) as wire:
            exchange.run(wire, indexes, asking)
    except Exception as error:  # whatever a broken connection makes the client raise, it is a miss
        return error
    return None
