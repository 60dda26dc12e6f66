"""Baton over gRPC, through its own client."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from baton.bench.load.outcome import Ending, Outcome, RequestFailed
from baton.bench.load.targets import Place
from baton.bench.load.workload import Job
from baton.client import AsyncClient
from baton.errors import BatonError, Overloaded


class GrpcTarget:
    """The router at `place`."""

    def __init__(self, place: Place) -> None:
        self._client = AsyncClient(place.url.removeprefix("grpc://").strip("/"), model=place.model, **place.reach)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def send(self, job: Job, outcome: Outcome) -> None:
        """See Target."""
        stream = self._client.generate(job.prompt, max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            async for delta in stream:
                if delta.tokens:
                    outcome.event(len(delta.tokens))
        except Overloaded as error:
            raise RequestFailed(type(error).__name__, str(error), Ending.REFUSED) from None
        except BatonError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None

    async def vocab_size(self) -> int | None:
        """See Target."""
        try:
            return (await self._client.get_model(timeout=10)).vocab_size
        except BatonError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None
