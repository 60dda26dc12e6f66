"""Addresses of workers.

A target is "host:port", or "dns:///name:port", which is looked up regularly and has a worker at each of its address
records.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from baton.config import parse_address
from baton.config.values import join_address
from baton.errors import ConfigError, preview

_DNS = "dns:///"

_logger = logging.getLogger(__name__)


class Discovery:
    """Calls `found` with the set of addresses of `targets` whenever it changes; static addresses are found at once.

    DNS names are looked up every `interval_s` seconds, independently of each other. Raises ConfigError, which names
    `flag`, for a bad target.
    """

    def __init__(self, flag: str, targets: Sequence[str], interval_s: float, found: Callable[[set[str]], None]) -> None:
        self._names = [target.removeprefix(_DNS) for target in targets if target.startswith(_DNS)]
        self._static = {target for target in targets if not target.startswith(_DNS)}
        for address in (*self._names, *self._static):
            try:
                # Look-ups use this encoding. It refuses labels that are empty or longer than 63 characters.
                parse_address(address)[0].encode("idna")
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None
            except UnicodeError as error:
                raise ConfigError(f"{flag}: {preview(address)} names no host: {error}") from None
        self._interval_s = interval_s
        self._found = found
        self._problems: dict[str, str] = {}
        self._known: dict[str, set[str]] = {name: set() for name in self._names}

    async def run(self) -> None:
        """Look up names until cancelled; returns at once if all addresses are static."""
        if self._static:
            self._found(self._static)
        await asyncio.gather(*map(self._follow, self._names))

    async def _follow(self, name: str) -> None:
        """Look up one name, and report changes, until cancelled."""
        while True:
            try:
                addresses = await self._look_up(name)
                if addresses is not None and addresses != self._known[name]:
                    self._found(self._static.union(*{**self._known, name: addresses}.values()))
                    self._known[name] = addresses
            except Exception:
                # A look-up needs a thread, for example. Without the next one, new workers would stay unused.
                _logger.exception("%s can't be looked up", name)
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, name: str) -> set[str] | None:
        """The addresses of a name now; None if it can't be looked up."""
        host, port = parse_address(name)
        try:
            records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            # Known workers go on serving while the name server fails. Before its first worker is ready, a name may have
            # no address.
            if self._problems.get(name) != str(error):
                level = logging.WARNING if self._known[name] else logging.INFO
                _logger.log(level, "%s can't be looked up: %s", name, error)
            self._problems[name] = str(error)
            return None
        self._problems.pop(name, None)
        return {join_address(record[4][0], port) for record in records}
