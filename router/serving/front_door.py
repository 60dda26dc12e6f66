"""The front door: the path of a request from its caller to its stream of updates, independent of the transport.

    authenticate ── admit ── validate ── request_runner ── updates ── the client has taken them all, or is gone

    authorization: Bearer KEY ──▶ Caller (tenant, its limit, whether an admin) or Unauthenticated

Without a file of keys, all callers are the tenant "". Each tenant has its own queue, its own salt of the prefix cache,
and its own number of open streams. Calls of Tokenize and Detokenize count as streams too. Calls of GetModel do not,
because they are as cheap as a refusal.

A front end only translates: it reads a key and a request, iterates over the updates, and sends each of them. When it
asks for the next update, the client has taken the one before. This module handles all else: limits of streams and of
the queue, deadlines, clients that do not read, and the drain.

A front end writes until the client's flow-control window is full; then the write waits until the client reads. A client
that does not read still answers keepalive pings. So there is a time limit for each item, from when the front end gets
it until it asks for the next one. The limit is shorter for fully generated requests while the router drains, because
then only the client delays the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.completion import WorkerGroup
from baton.config.watched import watch_file
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    unexpected,
)
from baton.keys import MAX_KEY_LENGTH, ApiKey, digest, parse
from baton.telemetry.logs import about
from baton.telemetry.metrics import CLIENTS_STALLED, REFUSED, REQUESTS, tenant_label
from baton.tokenizer import Tokenizer
from baton.worker.status import WorkerIdentity, WorkerRole
from router.dispatcher import Dispatcher
from router.output import OutputProcessor, Update
from router.request import ChatPrompt, Request, TextPrompt, UncheckedRequest
from router.request_runner import RequestRunner
from router.serving.validator import RequestValidator, ServedModel
from router.workers.pool import WorkerPool

DRAIN_LIMIT_S = 5.0

_TICK_S = 1.0

_LATE_S = 0.5
"""A tick that comes so much later finds a process that was paused or busy."""

HEADER = "authorization"
_SCHEME = "bearer"
_RETRY_S = 1.0

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call, as known from its key; without a limit of streams, `max_streams` is None."""

    tenant: str = ""
    max_streams: int | None = None
    admin: bool = False


ANONYMOUS = Caller(admin=True)
"""The caller of all calls if there is no file of keys."""


class ApiKeys:
    """Identifies callers by their keys, and counts the streams of each tenant. Use it on the event loop only."""

    def __init__(self, path: str = "", fleet_secret: str = "") -> None:
        """`path` is the file of keys, which is read again when it changes; empty for no keys.

        Raises ConfigError if the file is bad, or has several tenants and `fleet_secret` is empty.
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
        """The caller with the key in the values of the header. Raises Unauthenticated if there is none."""
        if self._keys is None:
            return ANONYMOUS
        seen = digest(_key(authorization))
        found: ApiKey | None = None
        for key in self._keys.value():
            # All keys are compared, so that the time does not tell which one it was.
            if hmac.compare_digest(key.sha256, seen):
                found = key
        if found is None:
            raise Unauthenticated("unknown API key")
        return Caller(found.tenant, found.max_streams, found.admin)

    @contextlib.contextmanager
    def stream(self, caller: Caller, *, limited: bool = True) -> Iterator[None]:
        """Count a stream of the caller's tenant until the block ends.

        Raises Overloaded beyond the tenant's limit if `limited`.

        A call counts once while its message is received, and once while it is served.
        """
        tenant, limit = caller.tenant, caller.max_streams
        if limited and limit is not None and self._streams[tenant] >= limit:
            problem = f"{self._streams[tenant]} streams of tenant {tenant} are open, {limit} are allowed"
            raise Overloaded(f"max_streams: {problem}", _RETRY_S, reason="max_streams")
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]


def _key(authorization: Sequence[str]) -> str:
    if not authorization:
        raise Unauthenticated(f"an API key is needed, as {HEADER}: Bearer KEY")
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip()
    if len(authorization) > 1 or scheme.lower() != _SCHEME or not 0 < len(key) <= MAX_KEY_LENGTH:
        raise Unauthenticated(f"{HEADER} must be one Bearer KEY of at most {MAX_KEY_LENGTH} characters")
    return key


class ClientStream(Generic[T]):
    """The items for one client, as an iterator.

    The call for the next item shows that the client has taken the one before. `take` returns the next item and raises
    StopAsyncIteration after the last one. `is_finished` tells whether the request has ended, so that all items wait
    only for the client. `names` has the request's id, if there is one, for the log.
    """

    def __init__(
        self,
        guard: StallGuard,
        take: Callable[[], Awaitable[T]],
        is_finished: Callable[[], bool],
        timeout: asyncio.Timeout,
        names: Sequence[str],
    ) -> None:
        self._guard = guard
        self._take = take
        self.is_finished = is_finished
        self.timeout = timeout
        self.names = names

    def __aiter__(self) -> ClientStream[T]:
        return self

    async def __anext__(self) -> T:
        self._guard.writing.pop(self, None)
        item = await self._take()
        self._guard.writing[self] = self._guard.now()
        return item


class StallGuard:
    """Ends streams whose client does not take an item within `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.draining = False
        self.writing: dict[ClientStream[Any], float] = {}
        """Streams that wait for their clients, with the time since which they wait, the longest wait first."""
        self.now = asyncio.get_running_loop().time

    @contextlib.asynccontextmanager
    async def stream(
        self, take: Callable[[], Awaitable[T]], is_finished: Callable[[], bool], *names: str
    ) -> AsyncIterator[ClientStream[T]]:
        """A stream for one client. Raises DeadlineExceeded if the client takes no item for too long."""
        try:
            async with asyncio.timeout(None) as timeout:
                stream = ClientStream(self, take, is_finished, timeout, names)
                try:
                    yield stream
                finally:
                    self.writing.pop(stream, None)
        except TimeoutError:
            if not timeout.expired():
                raise
            CLIENTS_STALLED.inc()
            problem = f"the client took none of its waiting output for {self.limit_s:g} s"
            if self.draining:
                problem = "the router drains, and the client took none of its waiting output"
            raise DeadlineExceeded(f"client_stall_s: {problem}") from None

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Watch the streams until the block ends."""
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
            if now > due + _LATE_S:
                # This process was paused or busy, and does not yet know which items clients took meanwhile.
                continue
            for stream in self._overdue(now):
                self._end(stream, now)

    def _end(self, stream: ClientStream[Any], now: float) -> None:
        # Each stream is ended once, because a timeout that has fired can't be rescheduled.
        del self.writing[stream]
        try:
            stream.timeout.reschedule(now)
        except Exception:
            words = "a stream whose client reads nothing could not be ended"
            _logger.exception(words, extra=about(*stream.names))

    def _overdue(self, now: float) -> list[ClientStream[Any]]:
        short_s = min(self.limit_s, DRAIN_LIMIT_S)
        found = []
        for stream, since in self.writing.items():
            waited = now - since
            if waited >= self.limit_s or (self.draining and waited >= short_s and stream.is_finished()):
                found.append(stream)
            elif waited < short_s:
                break
        return found


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model for clients; `fingerprint` is empty while there is no worker."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str
    workers: tuple[WorkerGroup, ...]


class FrontDoor:
    """Serves the calls of clients; all methods raise errors of `baton.errors`."""

    def __init__(
        self,
        model: ServedModel,
        validator: RequestValidator,
        pool: WorkerPool,
        dispatcher: Dispatcher,
        request_runner: RequestRunner,
        api_keys: ApiKeys,
        stalls: StallGuard,
        *,
        request_timeout_s: float,
    ) -> None:
        """`request_timeout_s` is the number of seconds until the deadline of a request that comes without one."""
        self._model = model
        self._validator = validator
        self._pool = pool
        self._dispatcher = dispatcher
        self._request_runner = request_runner
        self._api_keys = api_keys
        self._stalls = stalls
        self._request_timeout_s = request_timeout_s
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._awaited = 0
        self.running = 0
        """Number of calls that are served."""

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """The caller with the key in the values of the header `authorization`. Raises Unauthenticated."""
        return self._api_keys.caller(authorization)

    @contextlib.asynccontextmanager
    async def generate(
        self, request: UncheckedRequest, caller: Caller, deadline: float | None
    ) -> AsyncIterator[tuple[Request, ClientStream[Update]]]:
        """Serve a request until the block ends; yields it and its updates, of which the last one has the usage.

        `deadline` is in seconds on the event loop's clock; None for the router's default. A full queue refuses with
        Overloaded before the request is validated, because validation may take long. So an invalid request may be
        refused as if it were valid.
        """
        status, now = "CANCELLED", asyncio.get_running_loop().time
        admitted, checked, output = False, None, None
        try:
            arrived = now()
            with self._admit(caller):
                admitted = True
                self._validator.check_model(request.model)
                self._dispatcher.check_admission(caller.tenant, needs_decode=request.max_tokens != 1)
                checked = await self._validator.validate(
                    request,
                    arrived=arrived,
                    deadline=arrived + self._request_timeout_s if deadline is None else deadline,
                    tenant=caller.tenant,
                )
                output = OutputProcessor(checked, now)
                serving = asyncio.create_task(self._request_runner.run(checked, output), name=f"request {checked.id}")
                try:
                    async with self._stalls.stream(output.queue.take, serving.done, checked.id) as stream:
                        yield checked, stream
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
            status = "OK"
        except BatonError as error:
            status = error.grpc_status
            if admitted and (output is None or output.account.placed is None):
                _count_refusal(caller, error)
            raise
        except Exception as error:
            status = "INTERNAL"
            if checked is None:
                raise
            # The transport would log it without the id.
            _logger.exception("request %s failed", checked.id, extra=about(checked.id))
            raise unexpected(error, "the router") from None
        finally:
            REQUESTS.labels(tenant_label(caller.tenant), status).inc()

    @contextlib.asynccontextmanager
    async def answer(self, parts: Iterator[T], caller: Caller) -> AsyncIterator[ClientStream[T]]:
        """A stream of the parts of an answer that is complete; its requests have ended.

        It counts as a stream of the tenant, beyond its limit too, and a drain waits for it.
        """
        with self.awaited(), self._api_keys.stream(caller, limited=False):
            async with self._stalls.stream(_taker(parts), lambda: True) as stream:
                yield stream

    async def decode(self, token_ids: Sequence[int], caller: Caller) -> str:
        """The text of the prompt of a request that is served, with its special tokens. Raises Overloaded."""
        return await self._validator.detokenize(token_ids, caller.tenant, skip_special_tokens=False)

    @contextlib.asynccontextmanager
    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt | None, size: int, caller: Caller, *, model: str = ""
    ) -> AsyncIterator[ClientStream[Sequence[int]]]:
        """A stream of one item, the token ids of a text or a chat; `size` is its size in bytes."""
        with self._admit(caller):
            self._validator.check_model(model)
            token_ids = await self._validator.tokenize(prompt, size, caller.tenant)
            async with self._stalls.stream(_taker(iter((token_ids,))), lambda: True) as stream:
                yield stream

    @contextlib.asynccontextmanager
    async def detokenize(
        self, token_ids: Sequence[int], caller: Caller, *, skip_special_tokens: bool, model: str = ""
    ) -> AsyncIterator[ClientStream[str]]:
        """A stream of one item, the text of token ids."""
        with self._admit(caller):
            self._validator.check_model(model)
            text = await self._validator.detokenize(token_ids, caller.tenant, skip_special_tokens=skip_special_tokens)
            async with self._stalls.stream(_taker(iter((text,))), lambda: True) as stream:
                yield stream

    def model(self, name: str = "") -> ModelInfo:
        """The served model. Raises NotFound if `name` is neither empty nor its name."""
        self._validator.check_model(name)
        tokenizer, identities = self._model.tokenizer, self._pool.identities
        return ModelInfo(
            self._model.name,
            self._validator.max_model_len(),
            self._model.vocab_size,
            self._model.eos_token_ids,
            tokenizer is not None and tokenizer.has_chat_template,
            identities[0].fingerprint if identities else "",
            _groups(identities),
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the served model."""
        return self._model.tokenizer

    async def drain(self) -> None:
        """Refuse new requests, and wait until the running ones have ended."""
        self._draining = self._stalls.draining = True
        await self._idle.wait()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Let a drain wait until the block ends."""
        self._awaited += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._awaited -= 1
            if not self._awaited:
                self._idle.set()

    @contextlib.contextmanager
    def count_receiving(self, caller: Caller) -> Iterator[None]:
        """Count a call of `caller` against its tenant's limit while its message arrives; a drain does not wait for it.

        Raises Unavailable while the router drains, Overloaded beyond the tenant's limit of streams.
        """
        with contextlib.ExitStack() as stack:
            try:
                if self._draining:
                    raise Unavailable("the router is draining")
                stack.enter_context(self._api_keys.stream(caller))
            except BatonError as error:
                _count_refusal(caller, error, draining=self._draining)
                raise
            yield

    @contextlib.contextmanager
    def _admit(self, caller: Caller) -> Iterator[None]:
        """Count a call as a stream while it is served; a drain waits for it."""
        with self.count_receiving(caller), self.awaited():
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1


_REFUSALS = {Unavailable: "unavailable", InvalidRequest: "invalid_argument", NotFound: "not_found"}


def _count_refusal(caller: Caller, error: BatonError, *, draining: bool = False) -> None:
    """Count a request that ended before a worker served it, if it was refused."""
    reason = error.reason if isinstance(error, Overloaded) else _REFUSALS.get(type(error))
    if reason is not None:
        REFUSED.labels(tenant_label(caller.tenant), "draining" if draining else reason).inc()


def _groups(identities: Iterable[WorkerIdentity]) -> tuple[WorkerGroup, ...]:
    """The workers by role and degrees, prefill first."""
    counts = Counter((each.role, each.tensor_parallel, each.pipeline_parallel) for each in identities)
    order = list(WorkerRole)
    found = sorted(counts.items(), key=lambda item: (order.index(item[0][0]), item[0][1:]))
    return tuple(WorkerGroup(role.value, count, tensor, pipeline) for (role, tensor, pipeline), count in found)


def _taker(items: Iterator[T]) -> Callable[[], Awaitable[T]]:
    """A `take` function for a stream of items that are there."""

    async def take() -> T:
        for each in items:
            return each
        raise StopAsyncIteration

    return take
