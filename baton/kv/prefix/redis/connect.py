"""From the URL of the `--redis` setting to clients of redis-py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis, Sentinel
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import AuthenticationError, RedisError

from baton.breaker import Breaker
from baton.errors import ConfigError
from baton.kv.prefix.address import RedisAddress
from baton.kv.prefix.redis.topology import Address, Cluster, SingleMaster, Topology, first_answer

_READ_BYTES = 256 << 10
"""Bytes that are given to the parser at a time, if that many have arrived."""


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
