"""One call of a client: its deadline, its progress, and an error message that contains both."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from typing import Any

import grpc

from baton.completion import Delta
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, Unavailable, preview
from baton.rpc.errors import from_rpc_error

MAX_TIMEOUT_S = 366 * 24 * 3600
"""Longest timeout of a call. gRPC treats a much longer one as no timeout, or as one that has already passed."""

# gRPC's message when gRPC itself ends a call at its deadline.
_SAYS_NOTHING = re.compile(r"(stream removed )?\(?(deadline exceeded)?\)?\.?", re.IGNORECASE)
# gRPC's message when a TLS listener gets a call without TLS.
_CLOSED = re.compile(r"failed to connect to all addresses.*Socket closed", re.DOTALL)
# gRPC's messages when there is no such process, or no such host.
_UNREACHED = re.compile(
    r"failed to connect to all addresses.*"
    r"(connection refused|no route to host|network is unreachable|connection timed out)( \(\d+\))?",
    re.DOTALL | re.IGNORECASE,
)
_UNRESOLVED = re.compile(r"(errors resolving|DNS resolution failed for) .*", re.DOTALL)


class ClientCall:
    """A call to `target`, with `timeout` in seconds, None without a deadline; `secure`: its channel has TLS.

    Raises InvalidRequest naming timeout, unless that is a finite number of at most MAX_TIMEOUT_S.
    """

    def __init__(self, target: str, timeout: float | None, *, secure: bool) -> None:
        if timeout is not None and not (isinstance(timeout, numbers.Real) and _usable(timeout)):
            problem = f"must be a number of at most {MAX_TIMEOUT_S} seconds, got {preview(timeout)}"
            raise InvalidRequest("timeout", problem)
        self.timeout = timeout
        self._target = target
        self._secure = secure
        self._tokens: int | None = None

    def start_stream(self) -> None:
        """Record that the call streams tokens."""
        self._tokens = 0

    def count_tokens(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Count the tokens in `deltas`; returns `deltas`."""
        self._tokens = (self._tokens or 0) + sum(len(delta.tokens) for delta in deltas)
        return deltas

    def to_error(self, error: grpc.RpcError) -> BatonError:
        """The Baton error of a failed call."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and self.timeout is not None:
            more = "" if _SAYS_NOTHING.fullmatch(details) else f": {details}"
            return DeadlineExceeded(f"the deadline of {self.timeout:g} s passed{self._progress()}{more}")
        if not self._secure and code is grpc.StatusCode.UNAVAILABLE and _CLOSED.fullmatch(details):
            return Unavailable(f"{details}; is it a TLS listener? Then give its CA (ca, --ca)")
        if code is grpc.StatusCode.UNAVAILABLE and (why := self._connection_problem(details)):
            return Unavailable(why)
        return from_rpc_error(error)

    def _connection_problem(self, details: str) -> str:
        """Why there is no connection, in plain words; "" if gRPC's message is about something else."""
        if _UNRESOLVED.fullmatch(details):
            return f"cannot find the host of {self._target}; check the address"
        if (found := _UNREACHED.fullmatch(details)) is None:
            return ""
        return f"cannot connect to {self._target}: {found[1].lower()}; check the address, and that the process runs"

    def _progress(self) -> str:
        if self._tokens is None:
            return ""
        if not self._tokens:
            return " before the first token"
        return f" after {self._tokens} token{'s' if self._tokens > 1 else ''}"


def _usable(timeout: Any) -> bool:
    return math.isfinite(timeout) and timeout <= MAX_TIMEOUT_S
