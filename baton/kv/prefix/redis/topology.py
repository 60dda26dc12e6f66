"""The master of each key: one server, the master that sentinels name, or the masters of a cluster.

A cluster is asked for its slots by CLUSTER SLOTS, on plain clients. Nothing else of redis-py's cluster client is needed
(docs/decisions/0014-redis-py-as-documented.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AuthenticationError, NoPermissionError, RedisClusterException
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.breaker import Breaker
from baton.kv.prefix.redis.faults import NodeHealth
from baton.kv.prefix.redis.nodes import Node, close

T = TypeVar("T")

Address: TypeAlias = tuple[str, int]

_NAME = "Redis"
_ASKED = 3
"""Number of masters that are asked for the slots, in addition to the nodes of the URL."""


class Topology(Protocol):
    """The node of each key."""

    health: NodeHealth
    """Whether the nodes could be looked up."""

    @property
    def ready(self) -> bool:
        """Whether the nodes are known."""

    @property
    def masters(self) -> Sequence[Node]:
        """All nodes; none before it is ready."""

    def node_of(self, key: bytes) -> Node | None:
        """The node that has a key; None if no node has its slot."""

    async def refresh(self) -> None:
        """Look up the nodes; raises the error that prevents it."""

    async def aclose(self) -> None:
        """Close all connections."""


class SingleMaster:
    """One server, or the master that sentinels name: the client asks them whenever it opens a connection.

    A master that has become a replica refuses writes. With sentinels, redis-py then closes that connection.
    """

    ready = True

    def __init__(self, client: Redis, breaker: Breaker, close_sentinels: Callable[[], Awaitable[None]] | None) -> None:
        self.masters = (Node(client, NodeHealth(_NAME, breaker)),)
        self.health = NodeHealth(_NAME, Breaker())
        self._close_sentinels = close_sentinels

    def node_of(self, key: bytes) -> Node:
        """The single node."""
        return self.masters[0]

    async def refresh(self) -> None:
        """Do nothing: there is nothing to look up."""

    async def aclose(self) -> None:
        """Disconnect from the server and the sentinels."""
        await self.masters[0].aclose()
        if self._close_sentinels is not None:
            await self._close_sentinels()


class Cluster:
    """The masters of a cluster. Keys have no hash tags, so that a shared prefix is spread over all masters."""

    def __init__(
        self, seeds: Sequence[Address], connect: Callable[[Address], Redis], breaker: Callable[[], Breaker]
    ) -> None:
        self._seeds, self._connect, self._breaker = seeds, connect, breaker
        self._clients: dict[Address, Redis] = {}
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self.health = NodeHealth(f"{_NAME}'s cluster", breaker())

    @property
    def ready(self) -> bool:
        """Whether the slots of the cluster are known."""
        return bool(self._nodes)

    @property
    def masters(self) -> Sequence[Node]:
        """The masters that had slots when the cluster was last asked."""
        return tuple(self._nodes.values())

    def node_of(self, key: bytes) -> Node | None:
        """The node that has the slot of the key."""
        return self._slots[key_slot(key)]

    async def refresh(self) -> None:
        """Ask some nodes at once for the slots of the cluster; the first answer counts."""
        reachable = [address for address, node in self._nodes.items() if node.health.is_reachable]
        asked = dict.fromkeys((*reachable[:_ASKED], *self._seeds))
        host, ranges = await first_answer({f"{each[0]}:{each[1]}": self._ask(each) for each in asked})
        # A node that does not know its own address has the one at which it was asked.
        owners = {(first, last): (_text(owner[0]) or host, int(owner[1])) for first, last, owner, *_ in ranges}
        self._nodes = {address: self._node(address) for address in dict.fromkeys(owners.values())}
        self._slots = [None] * REDIS_CLUSTER_HASH_SLOTS
        for (first, last), address in owners.items():
            self._slots[first : last + 1] = [self._nodes[address]] * (last + 1 - first)
        gone = [address for address in self._clients if address not in self._nodes and address not in self._seeds]
        await asyncio.gather(*(close(self._clients.pop(address)) for address in gone))

    async def aclose(self) -> None:
        """Disconnect from all nodes."""
        await asyncio.gather(*(close(client) for client in self._clients.values()))

    async def _ask(self, address: Address) -> tuple[str, list[Any]]:
        ranges = await self._client(address).execute_command("CLUSTER SLOTS")
        if not ranges:
            raise RedisClusterException("no slots are served")
        return address[0], ranges

    def _client(self, address: Address) -> Redis:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    def _node(self, address: Address) -> Node:
        known = self._nodes.get(address)
        name = f"{_NAME}'s node {address[0]}:{address[1]}"
        return known or Node(self._client(address), NodeHealth(name, self._breaker()))


async def first_answer(questions: Mapping[str, Awaitable[T]]) -> T:
    """The first result of several questions, by the name of who is asked; the others are cancelled.

    If all fail, raises an error with all messages: AuthenticationError if all are of that kind, else ConnectionError.
    """
    asked = {asyncio.ensure_future(question): name for name, question in questions.items()}
    errors: dict[str, BaseException] = {}
    try:
        waiting = set(asked)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                error = each.exception()
                if error is None:
                    return each.result()
                errors[asked[each]] = error
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    refused = all(isinstance(error, AuthenticationError | NoPermissionError) for error in errors.values())
    words = "; ".join(f"{name}: {error}" for name, error in errors.items())
    raise AuthenticationError(words) if refused else RedisConnectionError(words)


def _text(host: bytes | str | None) -> str:
    return host.decode() if isinstance(host, bytes) else host or ""
