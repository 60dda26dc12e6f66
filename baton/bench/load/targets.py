"""The server under load: `grpc://host:port` is Baton, `http(s)://…/v1/completions` any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.workload import Job
from baton.config import parse_address
from baton.errors import ConfigError

CONNECTIONS = 8
"""To a Baton router, if nothing else is set."""

RETRY_S = 0.2
"""Between two tries to reach a server that is still starting."""
PROBE = Job([1, 2, 3, 4], 1)
TEXT_PROBE = Job("Hello", 1)
"""For servers that may take no token ids."""
_NOT_THERE = frozenset({"connection", "Unavailable", "http 503"})
"""Failures that pass while a server starts."""


@dataclass(frozen=True, slots=True)
class Place:
    """A target, and how to reach it; `reach` has API key and TLS, with the names of `baton.client`.

    `body` is merged into each HTTP request; a value of None removes a field. `tokenizer` is the file that turns prompts
    into text, for servers that accept no token ids. `connections` is the number of connections to a Baton router; over
    HTTP each open request has its own.
    """

    url: str
    model: str = ""
    reach: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    connections: int = CONNECTIONS


class Target(Protocol):
    """A server that streams completions."""

    async def send(self, job: Job, outcome: Outcome) -> None:
        """Ask for exactly `job.output_tokens` tokens, and record each event and the number of tokens in `outcome`.

        Returns when all tokens have come, else raises RequestFailed. May be cancelled at any time.
        """

    async def vocab_size(self) -> int | None:
        """Number of token ids that the model has, None if the server does not report it."""


def is_grpc(url: str) -> bool:
    """Whether `url` names a Baton router; raises ValueError if it is no target at all."""
    parts = urlsplit(url)
    if parts.scheme == "grpc" and not parts.path.strip("/"):
        try:
            parse_address(parts.netloc)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return True
    if parts.scheme in ("http", "https") and parts.netloc and parts.path.endswith("/completions"):
        if parts.path.endswith("/chat/completions"):
            raise ValueError("chat accepts no token ids; give the server's /v1/completions")
        return False
    raise ValueError(f"must be grpc://HOST:PORT or http://HOST:PORT/v1/completions, got {url!r}")


async def wait_until_ready(target: Target, wait_s: float, timeout_s: float, probe: Job = PROBE) -> None:
    """Return when `probe`, a small request, has succeeded; repeats it for at most `wait_s` while the server starts.

    Raises RequestFailed with the last failure; at once if waiting does not help.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                return await target.send(probe, Outcome.of(probe, time.perf_counter()))
        except TimeoutError:
            raise RequestFailed("timeout", f"no answer to a small request within {timeout_s:g} s") from None
        except RequestFailed as error:
            if (error.kind not in _NOT_THERE and error.ending is not Ending.REFUSED) or time.monotonic() >= end:
                raise
        await asyncio.sleep(RETRY_S)
