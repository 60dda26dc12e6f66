"""Calls to Redis: one round trip to each node concerned, all at once, within a time budget. Faults become misses.

    `RedisCalls`    sends commands to the nodes of their keys
    `Topology`      the node of each key: one server, the master that sentinels name, or the masters of a cluster
    `open_topology` makes a topology and its clients of redis-py from an address
    `Node`          one master: its client, its breaker, the number of calls that it gets at a time
    `NodeHealth`    whether a server can be reached; logs changes

A node that fails gets no calls for a while (`Breaker`), and its keys are misses. Everything is a miss while the nodes
are not known. If some nodes of a cluster fail, or it moves slots, the nodes are looked up again, at most once a second,
so that calls follow a failover.

A cluster is asked for its slots by CLUSTER SLOTS, on plain clients. Nothing else of redis-py's cluster client is needed
(docs/decisions/0014-redis-py-as-documented.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from redis.asyncio import Redis, Sentinel
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.driver_info import DriverInfo
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.breaker import Breaker, Permit
from baton.errors import ConfigError
from baton.kv.prefix.redis.address import RedisAddress
from baton.telemetry import metrics

T = TypeVar("T")

Command: TypeAlias = tuple[Any, ...]
"""A command and its arguments, as `Redis.execute_command` takes them."""

Address: TypeAlias = tuple[str, int]

LANES = {"look": 8, "fetch": 8, "write": 4}
"""The number of calls of each kind that one node gets at a time, so that no kind delays another."""

_NAME = "Redis"
_ASKED = 3
"""Number of masters that are asked for the slots, in addition to the nodes of the URL."""
_LOOK_AGAIN_S = 1.0
_READ_BYTES = 256 << 10
"""Most bytes that are given to the parser at a time."""

_REASONS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    ((TimeoutError, RedisTimeoutError), "timeout"),
    (BusyLoadingError, "loading"),
    ((AuthenticationError, NoPermissionError), "auth"),
    (ReadOnlyError, "readonly"),
    (OutOfMemoryError, "oom"),
    (ClusterDownError, "cluster_down"),
    ((AskError, TryAgainError), "moved"),
)

_ARGUMENTS = ", with args beginning with"
"""A server's error about an unknown command repeats the arguments after these words; those of AUTH are secrets."""

_WORDS = {"timeout": "no answer in time"}

_log = logging.getLogger(__name__)


def fault_label(error: Exception) -> str:
    """Metric label of an error."""
    if isinstance(error.__context__, ReadOnlyError):
        error = error.__context__  # with sentinels, redis-py turns it into a connection error
    for kind, name in _REASONS:
        if isinstance(error, kind):
            return name
    if isinstance(error, ResponseError):
        return "wrong_type" if str(error).startswith("WRONGTYPE") else "server"
    return "connection"


def count_fault(name: str, times: int = 1) -> None:
    """Count misses under the label `name`."""
    metrics.PREFIX_FAULTS.labels(name).inc(times)


class NodeHealth:
    """Whether a server can be reached. Logs when it is lost and when it is back, and counts each failed call."""

    def __init__(self, name: str, breaker: Breaker) -> None:
        self.name, self.breaker = name, breaker
        self.last_error = ""

    @property
    def is_reachable(self) -> bool:
        """Whether the last call was answered."""
        return self.breaker.closed

    def record_failure(self, error: Exception, permit: Permit | None = None) -> None:
        """Record that a call could not reach the server; `permit` is the breaker's for this call, if it was asked."""
        self.last_error = str(error).partition(_ARGUMENTS)[0] or _WORDS.get(fault_label(error), fault_label(error))
        if self.breaker.closed:
            _log.warning("%s can't be reached, requests continue without it: %s", self.name, self.last_error)
        self.breaker.record_failure(permit)
        count_fault(fault_label(error))

    def record_success(self) -> None:
        """Record that a call was answered."""
        if not self.breaker.closed:
            _log.info("%s can be reached again", self.name)
        self.breaker.record_success()
        self.last_error = ""


class Node:
    """One master server. Its client opens connections as needed, one for each running call."""

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
    """The first result of `questions`, which are keyed by the name of the server; the others are cancelled.

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


class Sentinels(Sentinel):
    """redis-py's class, except that all sentinels are asked for the master at once, and that errors are short.

    redis-py asks one after the other, so one that does not answer uses up the whole budget. Its errors contain all
    settings of the connections.
    """

    async def discover_master(self, service_name: str) -> Address:
        """Address of the master, from the first sentinel that knows it.

        Raises MasterNotFoundError, or AuthenticationError if all sentinels refused the password.
        """
        try:
            return await first_answer({_where(each): self._ask(each, service_name) for each in self.sentinels})
        except RedisError as error:
            kind = AuthenticationError if isinstance(error, AuthenticationError) else MasterNotFoundError
            raise kind(f"No master found for {service_name!r}: {error}") from None

    async def _ask(self, sentinel: Redis, service_name: str) -> Address:
        masters: Any = await sentinel.sentinel_masters()
        state = masters.get(service_name)
        if not state or not self.check_master_state(state, service_name):
            raise MasterNotFoundError("does not know it")
        return state["ip"], state["port"]


def open_topology(address: RedisAddress, timeout_s: float, breaker: Callable[[], Breaker]) -> Topology:
    """Make the topology, which connects at its first use within `timeout_s`. Raises ConfigError for invalid options."""
    # Calls have budgets of their own. RESP2 needs no handshake. Retries in the client would multiply the budget.
    common: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        # Each connection would otherwise search the installed packages for the version: 3 ms of the event loop.
        "driver_info": DriverInfo(),
    }
    try:
        options: dict[str, Any] = dict(parse_url(address.url))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis: {error}") from error
    if address.kind == "server":
        return SingleMaster(_client(options | common), breaker(), None)
    del options["host"], options["port"]
    if address.kind == "cluster":
        options.pop("db", None)
        return Cluster(
            address.hosts, lambda node: _client(options | common | {"host": node[0], "port": node[1]}), breaker
        )
    tls = options.pop("connection_class", None) is SSLConnection
    to_sentinels = {name: value for name, value in options.items() if name.startswith("ssl_")} | common
    user, password = address.sentinel_user or None, address.sentinel_password or None
    sentinels = Sentinels(  # type: ignore[no-untyped-call]
        address.hosts, sentinel_kwargs=to_sentinels | {"ssl": tls, "username": user, "password": password}
    )
    master = sentinels.master_for(address.service, ssl=tls, **options, **common)
    return SingleMaster(master, breaker(), sentinels.aclose)


def _client(options: dict[str, Any]) -> Redis:
    return Redis.from_pool(ConnectionPool(**options))


def _where(client: Redis) -> str:
    settings = client.connection_pool.connection_kwargs
    return f"{settings['host']}:{settings['port']}"


class RedisCalls:
    """Sends commands to the nodes of their keys, on the asyncio loop. Looking up the nodes may take `budget_s`."""

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
