"""Listening addresses: bound before a server takes them over, or as a trial."""

from __future__ import annotations

import errno
import socket

from baton.config import parse_address
from baton.errors import ConfigError


def bind(address: str, *, shared: bool = False) -> socket.socket:
    """A socket bound to `address` ("host:port") as servers bind: ended connections don't keep the port busy.

    A port may have several sockets if all are `shared` (SO_REUSEPORT). Raises ConfigError naming the address.
    """
    host, port = parse_address(address)
    problem = "can't be bound"
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{address} can't be bound: {error.strerror or error}") from None
    # A name may stand for an IPv6 address on a machine that has none.
    for family, kind, proto, _, where in places:
        try:
            bound = socket.socket(family, kind, proto)
        except OSError as error:
            problem = f"can't be bound: {error.strerror or error}"
            continue
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(where)
            return bound
        except OSError as error:
            bound.close()
            taken = error.errno == errno.EADDRINUSE
            problem = "is already in use" if taken else f"can't be bound: {error.strerror or error}"
    raise ConfigError(f"{address} {problem}")
