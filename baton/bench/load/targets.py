"""The server under load: `grpc://host:port` is Baton, `http(s)://…/v1/completions` any OpenAI-compatible server.

Requests to Baton use its own client and `Endpoint.connections` connections in turn, like the requests of as many users.
If a router has several processes on its port, one connection reaches one of them. `http_target` has the other servers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.workload import Job
from baton.client import AsyncClient
from baton.config import parse_address
from baton.errors import BatonError, ConfigError, Overloaded

CONNECTIONS = 8
"""Default number of connections to a Baton router."""

RETRY_S = 0.2
"""Seconds between two tries to connect to a server that is still starting."""
PROBE = Job([1, 2, 3, 4], 1)
TEXT_PROBE = Job("Hello", 1)
"""The probe for servers that may accept no token ids."""
_NOT_THERE = frozenset({"connection", "Unavailable", "http 503"})
"""Failures that pass while a server starts."""
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A target and its connection; `reach` has API key and TLS settings, as arguments of `baton.client`.

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


class GrpcTarget:
    """The router at `endpoint`."""

    def __init__(self, endpoint: Endpoint) -> None:
        address = endpoint.url.removeprefix("grpc://").strip("/")
        self._clients = [
            AsyncClient(address, model=endpoint.model, **endpoint.reach) for _ in range(endpoint.connections)
        ]
        self._turns = itertools.cycle(self._clients)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def send(self, job: Job, outcome: Outcome) -> None:
        stream = next(self._turns).generate(
            job.prompt, cache_salt=job.cache_salt, max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True
        )
        try:
            async for delta in stream:
                if delta.tokens:
                    outcome.event(len(delta.tokens))
                if delta.usage:
                    outcome.input_tokens = delta.usage.prompt_tokens
                    outcome.cached_tokens = delta.usage.cached_tokens
        except Overloaded as error:
            raise RequestFailed(type(error).__name__, str(error), Ending.REFUSED, error.retry_after) from None
        except BatonError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None

    async def vocab_size(self) -> int | None:
        """Number of token ids. Every connection asks, so that none is opened while requests are timed."""
        asked = (client.get_model(timeout=_ASK_S) for client in self._clients)
        try:
            return (await asyncio.gather(*asked))[0].vocab_size
        except BatonError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None


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
