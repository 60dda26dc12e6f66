"""The front door: the path of a request from its caller, whatever the transport.

    authenticate ── admit ── validate ── request_runner ── updates ── the client has taken them all, or is gone

    authorization: Bearer KEY ──▶ Caller (tenant, its limit, whether an admin) or Unauthenticated

Without a file of keys everybody is the one tenant "". A tenant has a queue of its own, a salt of the prefix cache, and
a number of open streams. Tokenize and Detokenize count as streams too. GetModel does not: it takes no longer than a
refusal.

A front end translates: it takes a key and a request off the wire, iterates over the updates, and sends each. Asking for
the next update tells that the client has taken the one before. Everything else is here: the tenant's limit of streams,
the queue's capacity, deadlines, clients that read nothing, and the drain.

A front end writes until the client's flow-control window is full, and then the write waits until the client reads.
Keepalive does not help: a client that reads nothing still answers pings. So each item has a bound, from when the front
end has it until it asks for the next one. It is short while the router drains and the request is generated: only the
client could then hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.config.watched import watch_file
from baton.errors import BatonError, ConfigError, DeadlineExceeded, Overloaded, Unauthenticated, Unavailable
from baton.keys import MAX_KEY_LENGTH, ApiKey, digest, parse
from baton.rpc.channel import LATE_S
from baton.telemetry.metrics import CLIENTS_STALLED, REQUESTS
from router.dispatcher import Dispatcher
from router.output import OutputProcessor, Update
from router.request_runner import RequestRunner
from router.serving.validator import ChatPrompt, GenerateRequest, RequestValidator, ServedModel, TextPrompt
from router.workers.pool import Pool

DRAIN_LIMIT_S = 5.0

_TICK_S = 1.0

HEADER = "authorization"
_SCHEME = "bearer"
_RETRY_S = 1.0

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a call; `max_streams` None means no limit."""

    tenant: str = ""
    max_streams: int | None = None
    admin: bool = False


ANONYMOUS = Caller(admin=True)
"""The caller where no keys are asked for."""


class Tenants:
    """Knows callers by their keys, and counts the streams of each tenant; lives on the event loop."""

    def __init__(self, path: str = "", fleet_secret: str = "") -> None:
        """`path` is the file of keys, empty for none; it is read again when it changes.

        Raises ConfigError for a bad file, and for several tenants without a fleet secret.
        """

        def keys(data: bytes) -> tuple[ApiKey, ...]:
            found = parse(data)
            if len(tenants := {key.tenant for key in found}) > 1 and not fleet_secret:
                problem = f"BATON_FLEET_SECRET must be set to keep the caches of {len(tenants)} tenants apart"
                raise ConfigError(problem)
            return found

        self._keys = watch_file(path, "api_keys", keys) if path else None
        self._streams: Counter[str] = Counter()

    def caller(self, authorization: Sequence[str]) -> Caller:
        """The tenant whose key the header's values contain. Raises Unauthenticated."""
        if self._keys is None:
            return ANONYMOUS
        seen = digest(_key(authorization))
        found: ApiKey | None = None
        for key in self._keys.value():
            # All are looked at, so that the time taken does not tell which one it was.
            if hmac.compare_digest(key.sha256, seen):
                found = key
        if found is None:
            raise Unauthenticated("unknown API key")
        return Caller(found.tenant, found.max_streams, found.admin)

    @contextlib.contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """Count a stream of the caller's tenant until the block ends. Raises Overloaded beyond the tenant's limit.

        A call is a stream before its message is received, and again while it is served: large messages count too.
        """
        tenant, limit = caller.tenant, caller.max_streams
        if limit is not None and self._streams[tenant] >= limit:
            problem = f"{self._streams[tenant]} streams of tenant {tenant} are open, {limit} may be"
            raise Overloaded(f"max_streams: {problem}", _RETRY_S)
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]


def _key(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(f"an API key is needed, as metadata {HEADER}: Bearer KEY")
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip()
    if len(authorization) > 1 or scheme.lower() != _SCHEME or not 0 < len(key) <= MAX_KEY_LENGTH:
        raise Unauthenticated(f"the metadata {HEADER} must be one Bearer KEY of at most {MAX_KEY_LENGTH} characters")
    return key


class ClientStream(Generic[T]):
    """The items for one client, one by one; asking for an item tells that the client has taken the one before.

    `take` makes the items and raises StopAsyncIteration after the last; `generated` tells whether all output is there.
    """

    def __init__(
        self,
        guard: StallGuard,
        take: Callable[[], Awaitable[T]],
        generated: Callable[[], bool],
        ending: asyncio.Timeout,
    ) -> None:
        self._guard = guard
        self._take = take
        self.generated = generated
        self.ending = ending

    def __aiter__(self) -> ClientStream[T]:
        return self

    async def __anext__(self) -> T:
        self._guard.writing.pop(self, None)
        item = await self._take()
        self._guard.writing[self] = self._guard.now()
        return item


class StallGuard:
    """Watches all streams to clients, which may take `limit_s` seconds for each item."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.draining = False
        self.writing: dict[ClientStream[Any], float] = {}
        """Streams that wait for their clients, the longest first, and since when."""
        self.now = asyncio.get_running_loop().time

    @contextlib.asynccontextmanager
    async def stream(
        self, take: Callable[[], Awaitable[T]], generated: Callable[[], bool]
    ) -> AsyncIterator[ClientStream[T]]:
        """A stream, which is ended by DeadlineExceeded when its client takes nothing for too long."""
        try:
            async with asyncio.timeout(None) as ending:
                stream = ClientStream(self, take, generated, ending)
                try:
                    yield stream
                finally:
                    self.writing.pop(stream, None)
        except TimeoutError:
            if not ending.expired():
                raise
            CLIENTS_STALLED.inc()
            problem = f"the client took none of its waiting output for {self.limit_s:g} s"
            if self.draining:
                problem = "the router drains, and the client took none of its waiting output"
            raise DeadlineExceeded(f"client_stall_s: {problem}") from None

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Judge the streams until the block ends."""
        watching = asyncio.create_task(self._watch(), name="client stalls")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        tick_s = min(_TICK_S, self.limit_s / 2)
        while True:
            due = self.now() + tick_s
            await asyncio.sleep(tick_s)
            now = self.now()
            if now > due + LATE_S:
                # This process was paused or busy, and has not yet noticed what clients took meanwhile.
                continue
            for stream in self._overdue(now):
                self._end(stream, now)

    def _end(self, stream: ClientStream[Any], now: float) -> None:
        # A stream is ended once: its write may take a while to notice, and a timeout that has fired can't be set again.
        del self.writing[stream]
        try:
            stream.ending.reschedule(now)
        except Exception:
            _logger.exception("a stream whose client reads nothing could not be ended")

    def _overdue(self, now: float) -> list[ClientStream[Any]]:
        short_s = min(self.limit_s, DRAIN_LIMIT_S)
        found = []
        for stream, since in self.writing.items():
            waited = now - since
            if waited >= self.limit_s or (self.draining and waited >= short_s and stream.generated()):
                found.append(stream)
            elif waited < short_s:
                break
        return found


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
        model: ServedModel,
        validator: RequestValidator,
        pool: Pool,
        dispatcher: Dispatcher,
        request_runner: RequestRunner,
        tenants: Tenants,
        stalls: StallGuard,
    ) -> None:
        self._model = model
        self._validator = validator
        self._pool = pool
        self._dispatcher = dispatcher
        self._request_runner = request_runner
        self._tenants = tenants
        self._stalls = stalls
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.running = 0
        """Calls that a drain waits for."""

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """The caller, by the values of the header `authorization`. Raises Unauthenticated."""
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
            with self._admit(caller):
                self._validator.check_model(request.model)
                self._dispatcher.check(caller.tenant, decodes=request.max_tokens != 1)
                checked = await self._validator.validate(
                    request, arrived=arrived, deadline=deadline, tenant=caller.tenant
                )
                output = OutputProcessor(checked, now)
                serving = asyncio.create_task(self._request_runner.run(checked, output), name=f"request {checked.id}")
                try:
                    async with self._stalls.stream(output.queue.take, serving.done) as stream:
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
        self, prompt: TextPrompt | ChatPrompt | None, size: int, caller: Caller, *, model: str = ""
    ) -> AsyncIterator[ClientStream[Sequence[int]]]:
        """One item: the token ids of a text or a chat, which takes `size` bytes."""
        with self._admit(caller):
            self._validator.check_model(model)
            token_ids = await self._validator.tokenize(prompt, size, caller.tenant)
            async with self._stalls.stream(_once(token_ids), lambda: True) as stream:
                yield stream

    @contextlib.asynccontextmanager
    async def detokenize(
        self, token_ids: Sequence[int], caller: Caller, *, skip_special_tokens: bool, model: str = ""
    ) -> AsyncIterator[ClientStream[str]]:
        """One item: the text of token ids."""
        with self._admit(caller):
            self._validator.check_model(model)
            text = await self._validator.detokenize(token_ids, caller.tenant, skip_special_tokens=skip_special_tokens)
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
    def receive(self, caller: Caller) -> Iterator[None]:
        """A call whose message has not come: it counts as one of its tenant's streams, but no drain waits for it."""
        if self._draining:
            raise Unavailable("the router is draining")
        with self._tenants.stream(caller):
            yield

    @contextlib.contextmanager
    def _admit(self, caller: Caller) -> Iterator[None]:
        """A call that counts as one of its tenant's streams, and that a drain waits for."""
        with self.receive(caller):
            self.running += 1
            self._idle.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()


def _once(item: T) -> Callable[[], Awaitable[T]]:
    """Takes one item."""
    items = iter((item,))

    async def take() -> T:
        for each in items:
            return each
        raise StopAsyncIteration

    return take
