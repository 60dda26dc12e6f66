"""The Redis servers behind one URL: a server, the master that sentinels name, or the masters of a cluster.

redis-py keeps the connections, follows a cluster's slots and asks the sentinels. What blocks here is called from
threads only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    MovedError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    SlotNotCoveredError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from baton.errors import ConfigError
from baton.kv.prefix.address import RedisAddress
from baton.kv.prefix.breaker import Breaker
from baton.kv.prefix.faults import Health
from baton.kv.prefix.wire import Wire

_NAME = "Redis"


class Node:
    """One master: its connections, and whether it can be had."""

    def __init__(self, pool: ConnectionPool, health: Health) -> None:
        self.pool, self.health = pool, health

    @contextmanager
    def wire(self, deadline: float) -> Iterator[Wire]:
        """A connection for one call, until `deadline`; blocks. A call that raises leaves replies behind, so ends it."""
        connection: Any = self.pool.get_connection()
        try:
            wire: Wire = connection.wire
            wire.deadline = deadline
            yield wire
            wire.deadline = None
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self.pool.release(connection)


class Servers(Protocol):
    """Where keys are. Nothing but `open` and `close` blocks."""

    health: Health
    """Of the way to learn where the servers are."""

    @property
    def ready(self) -> bool:
        """Whether it is known where the servers are."""

    def open(self) -> None:
        """Find out, or find out again; raises RedisError."""

    def masters(self) -> list[Node]:
        """All of them."""

    def of(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """The nodes concerned, each with the indexes of its keys; keys that no node has lack."""

    def redirected(self, error: AskError) -> Node | None:
        """The node that a reply MOVED or ASK tells of."""

    def demoted(self, node: Node) -> None:
        """A replica refused a write: it may have been the master before."""

    def close(self) -> None:
        """Disconnect; who waits for a reply gets an error."""


class Sentinels(Sentinel):
    """redis-py's, but for how the master is asked for: from several threads, and with a short word of what was wrong.

    redis-py itself tells all settings of the connections, swaps places in its list without a lock, and does not ask the
    next sentinel if one refuses.
    """

    _first = 0

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Address of the master, from the sentinel that knew it last, or else the next.

        Raises AuthenticationError if it was that with all of them, and MasterNotFoundError.
        """
        errors: list[RedisError] = []
        words, first, many = [], self._first, len(self.sentinels)
        for number in ((first + turn) % many for turn in range(many)):
            sentinel = self.sentinels[number]
            try:
                masters: Any = sentinel.sentinel_masters()
            except RedisError as error:
                where = sentinel.connection_pool.connection_kwargs
                words.append(f"{where['host']}:{where['port']}: {error}")
                errors.append(error)
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):  # type: ignore[no-untyped-call]
                self._first = number
                return state["ip"], state["port"]
        text = f"No master found for {service_name!r}{': ' if words else ''}{'; '.join(words)}"
        refused = len(errors) == many and all(isinstance(e, AuthenticationError | NoPermissionError) for e in errors)
        raise AuthenticationError(text) if refused else MasterNotFoundError(text)


class OneMaster:
    """A server, or the master of a service that sentinels watch."""

    ready = True

    def __init__(self, pool: ConnectionPool, breaker: Breaker, sentinels: Sentinels | None = None) -> None:
        self._node = Node(pool, Health(_NAME, breaker))
        self._sentinels = sentinels
        self.health = Health(_NAME, Breaker())

    def open(self) -> None:
        """Nothing to find out: sentinels are asked when a connection is made."""

    def masters(self) -> list[Node]:
        """The one."""
        return [self._node]

    def of(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """All keys are there."""
        return {self._node: list(range(len(keys)))} if keys else {}

    def redirected(self, error: AskError) -> Node | None:
        """A cluster's reply, to a client that was not told that this is one."""
        return None

    def demoted(self, node: Node) -> None:
        """Let go of idle connections, so that the next asks the sentinels."""
        if self._sentinels is not None:
            node.pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Disconnect from the server and the sentinels."""
        self._node.pool.disconnect()
        if self._sentinels is not None:
            self._sentinels.close()


class Cluster:
    """The masters of a cluster. Keys have no hash tags, so that a shared prefix is spread over all of them."""

    def __init__(
        self, hosts: Sequence[tuple[str, int]], options: Mapping[str, Any], breaker: Callable[[], Breaker]
    ) -> None:
        self._hosts, self._options, self._breaker = hosts, options, breaker
        self._manager: NodesManager | None = None
        self._nodes: dict[str, Node] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.health = Health(f"{_NAME}'s cluster", breaker())

    @property
    def ready(self) -> bool:
        """Whether the cluster's slots were learnt."""
        return self._manager is not None

    def open(self) -> None:
        """Ask the nodes for the cluster's slots."""
        with self._lock:
            manager = self._manager
            if manager is None:
                seeds = [ClusterNode(host, port) for host, port in self._hosts]
                manager = NodesManager(seeds, from_url=True, dynamic_startup_nodes=False, **self._options)
            else:
                known = [(node.host, node.port) for node in list(manager.nodes_cache.values())]
                manager.initialize(additional_startup_nodes_info=known, disconnect_startup_nodes_pools=False)
            if not manager.slots_cache:
                raise RedisClusterException("no slots are served")
            self._manager = manager
            there = set(manager.nodes_cache)
            for name in set(self._nodes) - there:  # else those of a cluster whose addresses change would pile up
                self._nodes.pop(name, None)
            if self._closed:
                manager.close()

    def masters(self) -> list[Node]:
        """Those that have slots, and have had them at the last look."""
        if self._manager is None:
            return []
        return [self._node(node) for node in self._manager.get_nodes_by_server_type("primary")]

    def of(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """By the slots of the keys."""
        places: dict[Node, list[int]] = {}
        if self._manager is None:
            return places
        for index, key in enumerate(keys):
            try:
                node = self._manager.get_node_from_slot(key_slot(key))
            except SlotNotCoveredError:
                continue
            places.setdefault(self._node(node), []).append(index)
        return places

    def redirected(self, error: AskError) -> Node | None:
        """The node of the reply; a slot that moved is looked for there from now on."""
        if self._manager is None:
            return None
        if isinstance(error, MovedError):
            if error.slot_id not in self._manager.slots_cache:
                return None
            self._manager.move_slot(error)
            return self._node(self._manager.get_node_from_slot(error.slot_id))
        node = self._manager.get_node(error.host, error.port)
        return self._node(node) if node is not None else None

    def demoted(self, node: Node) -> None:
        """A replica of a cluster redirects writes, and does not refuse them."""

    def close(self) -> None:
        """Disconnect from all nodes."""
        self._closed = True
        if self._manager is not None:
            self._manager.close()

    def _node(self, node: ClusterNode) -> Node:
        if node.redis_connection is None and self._manager is not None:
            self._manager.create_redis_connections([node])
        pool = node.redis_connection.connection_pool
        known = self._nodes.get(node.name)
        if known is None:
            known = self._nodes[node.name] = Node(pool, Health(f"{_NAME}'s node {node.name}", self._breaker()))
        known.pool = pool
        return known


def open_servers(address: RedisAddress, timeout_s: float, breaker: Callable[[], Breaker]) -> Servers:
    """Connects at the first use, each step within `timeout_s`; raises ConfigError for options without sense."""
    # RESP2 spares the handshake; a retry within the client would multiply the budget.
    common = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2}
    try:
        options = parse_url(address.url) | common | {"parser_class": Wire}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis: {error}") from error
    never = Retry(NoBackoff(), 0)
    if address.kind == "server":
        return OneMaster(ConnectionPool(**options, retry=never), breaker())
    del options["host"], options["port"]
    if address.kind == "cluster":
        options.pop("db", None)
        return Cluster(address.hosts, {"connection_class": Connection} | options, breaker)
    tls = options.pop("connection_class", None) is SSLConnection
    to_sentinels = {name: value for name, value in options.items() if name.startswith("ssl_")} | common
    user, password = address.sentinel_user or None, address.sentinel_password or None
    sentinels = Sentinels(  # type: ignore[no-untyped-call]
        address.hosts,
        sentinel_kwargs=to_sentinels | {"ssl": tls, "username": user, "password": password, "retry": never},
    )
    pool = SentinelConnectionPool(address.service, sentinels, ssl=tls, retry=never, **options)
    return OneMaster(pool, breaker(), sentinels)
