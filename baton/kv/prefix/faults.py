"""What goes wrong with Redis: names for metrics, and the state of a server that may be out of reach."""

from __future__ import annotations

import logging

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.kv.prefix.breaker import Breaker
from baton.telemetry import metrics

_REASONS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    ((TimeoutError, RedisTimeoutError), "timeout"),
    (BusyLoadingError, "loading"),
    ((AuthenticationError, NoPermissionError), "auth"),
    (ReadOnlyError, "readonly"),
    (OutOfMemoryError, "oom"),
    (ClusterDownError, "cluster_down"),
    ((AskError, TryAgainError), "moved"),
)

_WHOLE_SERVER = (BusyLoadingError, AuthenticationError, ClusterDownError)

_ARGUMENTS = ", with args beginning with"
"""What a server says of an unknown command before it repeats its words: those of AUTH are user and password."""

_log = logging.getLogger(__name__)


def reason(error: Exception) -> str:
    """Metric label of a fault."""
    for kind, name in _REASONS:
        if isinstance(error, kind):
            return name
    if isinstance(error, ResponseError):
        return "wrong_type" if str(error).startswith("WRONGTYPE") else "server"
    return "connection"


def concerns_server(reply: object) -> bool:
    """Whether a reply says that the server serves nobody now, or not us, whatever the key."""
    return isinstance(reply, _WHOLE_SERVER)


def count(name: str, times: int = 1) -> None:
    """Count misses by the reason `name`."""
    metrics.PREFIX_FAULTS.labels(name).inc(times)


class Health:
    """Whether a server can be had. Its loss and its return are logged, each failed call is counted."""

    def __init__(self, name: str, breaker: Breaker) -> None:
        self.name, self.breaker = name, breaker
        self.trouble = ""

    @property
    def well(self) -> bool:
        """Whether the last call came through."""
        return self.breaker.closed

    def failed(self, error: Exception) -> None:
        """A call found the server out of reach."""
        self.trouble = str(error).partition(_ARGUMENTS)[0] or reason(error)
        if self.breaker.closed:
            _log.warning("%s is out of reach, requests go on without it: %s", self.name, self.trouble)
        self.breaker.failed()
        count(reason(error))

    def came_through(self) -> None:
        """A call was answered."""
        if not self.breaker.closed:
            _log.info("%s is back", self.name)
        self.breaker.succeeded()
        self.trouble = ""
