"""Where workers are: static addresses, and DNS names that are looked up again and again.

A target is "host:port", dialled as it is, or "dns:///name:port", each of whose address records is a worker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.config import parse_address
from baton.errors import ConfigError, preview
from baton.kv.format import Shard

_logger = logging.getLogger(__name__)

_DNS = "dns:///"


class Discovery:
    """Calls `found` with the set of addresses behind `targets`, at once and whenever it changes."""

    def __init__(self, flag: str, targets: Sequence[str], interval_s: float, found: Callable[[set[str]], None]) -> None:
        self._names = [target.removeprefix(_DNS) for target in targets if target.startswith(_DNS)]
        self._static = {target for target in targets if not target.startswith(_DNS)}
        for address in (*self._names, *self._static):
            try:
                # Looked up by this encoding, which refuses labels that are empty or longer than 63 characters.
                host_of(address).encode("idna")
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None
            except UnicodeError as error:
                raise ConfigError(f"{flag}: {preview(address)} names no host: {error}") from None
        self._interval_s = interval_s
        self._found = found
        self._known: dict[str, set[str]] = {name: set() for name in self._names}

    async def run(self) -> None:
        """Look up until cancelled; static addresses alone need no second look."""
        known: set[str] | None = None
        while True:
            await asyncio.gather(*map(self._look_up, self._names))
            addresses = self._static.union(*self._known.values())
            if addresses != known:
                known = addresses
                self._found(addresses)
            if not self._names:
                return
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, name: str) -> None:
        host, port = parse_address(name)
        try:
            records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            # Workers that are known go on serving while a name server has a bad moment.
            _logger.warning("%s can't be looked up: %s", name, error)
            return
        self._known[name] = {_joined(record[4][0], port) for record in records}


def host_of(address: str) -> str:
    """The host of "host:port", without brackets."""
    return parse_address(address)[0]


def addressed(shards: Sequence[Shard], dialled: str) -> tuple[Shard, ...]:
    """The shards of a worker that was dialled there, each with the host of its address."""
    return tuple(replace(shard, kv_address=complete(shard.kv_address, dialled)) for shard in shards)


def complete(kv_address: str, dialled: str) -> str:
    """`kv_address` with an empty host replaced by that of the dialled address."""
    host, _, port = kv_address.rpartition(":")
    return kv_address if host else _joined(host_of(dialled), int(port))


def _joined(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
