"""Baton over gRPC, through its own client.

Requests use `place.connections` connections in turn, like the requests of as many users. If a router has several
processes on its port, one connection reaches one of them.
"""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Self

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.targets import Place
from baton.bench.load.workload import Job
from baton.client import AsyncClient
from baton.errors import BatonError, Overloaded

_ASK_S = 10.0


class GrpcTarget:
    """The router at `place`."""

    def __init__(self, place: Place) -> None:
        address = place.url.removeprefix("grpc://").strip("/")
        self._clients = [AsyncClient(address, model=place.model, **place.reach) for _ in range(place.connections)]
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
        """Asked on every connection, so that none is made while requests are timed."""
        asked = (client.get_model(timeout=_ASK_S) for client in self._clients)
        try:
            return (await asyncio.gather(*asked))[0].vocab_size
        except BatonError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None
