"""Faults of Redis: their names in metrics, and whether a server can be reached."""

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

from baton.breaker import Breaker, Permit
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
