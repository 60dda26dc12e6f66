"""The front door: what every front end does with a request, whatever it came by.

    authenticate ── admit ── validate ── pipeline ── updates ── the client has taken them all, or is gone

A front end translates: it takes a key and a request off the wire, iterates over the updates, and sends each. Asking for
the next update tells that the client has taken the one before. Everything else is here: the tenant's limit of streams,
the queue's capacity, deadlines, clients that read nothing, and the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import BatonError, Unavailable
from baton.telemetry.metrics import REQUESTS
from router.dispatcher import Dispatcher
from router.output.processor import OutputProcessor
from router.output.queue import OutputQueue, Update
from router.pipeline import Pipeline
from router.serving.stalls import ClientStream, StallGuard
from router.serving.tenants import Caller, Tenants
from router.serving.validator import ChatPrompt, GenerateRequest, Model, RequestValidator, TextPrompt
from router.workers.pool import Pool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model; `fingerprint` is empty while no worker is there."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str


class FrontDoor:
    """Serves callers; all methods raise errors of `baton.errors`."""

    def __init__(
        self,
        model: Model,
        validator: RequestValidator,
        pool: Pool,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        tenants: Tenants,
        stalls: StallGuard,
    ) -> None:
        self._model = model
        self._validator = validator
        self._pool = pool
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._tenants = tenants
        self._stalls = stalls
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.running = 0
        """Calls that a drain waits for."""

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """Who calls, by the values of the header `authorization`. Raises Unauthenticated."""
        return self._tenants.caller(authorization)

    @contextlib.asynccontextmanager
    async def generate(
        self, request: GenerateRequest, caller: Caller, deadline: float | None
    ) -> AsyncIterator[tuple[str, ClientStream[Update]]]:
        """The request's id, and its updates; the last one has the usage. The end of the block ends the request.

        `deadline` is on the event loop's clock, None for the router's own.
        """
        status, now = "CANCELLED", asyncio.get_running_loop().time
        try:
            arrived = now()
            with self._admitted(caller):
                self._validator.check_model(request.model)
                self._dispatcher.check(caller.tenant, decodes=request.max_tokens != 1)
                checked = await self._validator.validate(
                    request, arrived=arrived, deadline=deadline, tenant=caller.tenant
                )
                output = OutputProcessor(checked, now)
                serving = asyncio.create_task(self._pipeline.run(checked, output), name=f"request {checked.id}")
                try:
                    async with self._stalls.stream(_updates(output.queue), serving.done) as stream:
                        yield checked.id, stream
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
            status = "OK"
        except BatonError as error:
            status = error.grpc_status
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            REQUESTS.labels(status).inc()

    @contextlib.asynccontextmanager
    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt | None, caller: Caller, *, model: str = "", size: int = 0
    ) -> AsyncIterator[ClientStream[list[int]]]:
        """One item: the token ids of a text or a chat, which takes `size` bytes."""
        with self._admitted(caller):
            self._validator.check_model(model)
            token_ids = await self._validator.tokenize(prompt, caller.tenant, size=size)
            async with self._stalls.stream(_once(token_ids), lambda: True) as stream:
                yield stream

    @contextlib.asynccontextmanager
    async def detokenize(
        self, token_ids: Sequence[int], caller: Caller, *, skip_special_tokens: bool, model: str = "", size: int = 0
    ) -> AsyncIterator[ClientStream[str]]:
        """One item: the text of token ids, which take `size` bytes."""
        with self._admitted(caller):
            self._validator.check_model(model)
            text = await self._validator.detokenize(
                token_ids, caller.tenant, skip_special_tokens=skip_special_tokens, size=size
            )
            async with self._stalls.stream(_once(text), lambda: True) as stream:
                yield stream

    def model(self, name: str = "") -> ModelInfo:
        """The served model, which must have that name if there is one. Raises NotFound."""
        self._validator.check_model(name)
        tokenizer, identities = self._model.tokenizer, self._pool.identities
        return ModelInfo(
            self._model.name,
            self._validator.max_model_len(),
            self._model.vocab_size,
            self._model.eos_token_ids,
            tokenizer is not None and tokenizer.has_chat_template,
            identities[0].fingerprint if identities else "",
        )

    async def drain(self) -> None:
        """Refuse new requests, and return when the running ones have ended."""
        self._draining = self._stalls.draining = True
        await self._idle.wait()

    @contextlib.contextmanager
    def _admitted(self, caller: Caller) -> Iterator[None]:
        """A call that counts as one of its tenant's streams, and that a drain waits for."""
        if self._draining:
            raise Unavailable("the router is draining")
        self.running += 1
        self._idle.clear()
        try:
            with self._tenants.stream(caller):
                yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()


def _updates(queue: OutputQueue) -> Callable[[], Awaitable[Update]]:
    """Takes updates from a queue until the last one."""
    ended = False

    async def take() -> Update:
        nonlocal ended
        if ended:
            raise StopAsyncIteration
        update = await queue.take()
        ended = update.usage is not None
        return update

    return take


def _once(item: T) -> Callable[[], Awaitable[T]]:
    """Takes one item."""
    items = iter((item,))

    async def take() -> T:
        for each in items:
            return each
        raise StopAsyncIteration

    return take
