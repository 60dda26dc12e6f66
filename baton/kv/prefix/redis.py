"""The prefix cache in Redis or Valkey, shared by all prefill workers of a fleet.

One key a block, `baton:kv:1:<digest in hex>`, one record a key (`baton.kv.prefix.record`), expiring after
`ttl_s` and evicted by the server's own policy before. A look-up is one round trip for each LOOKUP_KEYS
blocks: a pipeline of STRLEN, which also tells a key of another type or size from a block. Fetches are
pipelined GETs of at most BATCH_BYTES a round trip, checked off the loop. Writes go through one background
task, from a queue bounded in bytes.

Every round trip has a time budget, and one failure opens a circuit breaker: a Redis that is slow, full or
gone costs one budget now and then, and is otherwise a miss. The breaker's opening and closing are logged, not
each failure. Nothing here raises after construction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.errors import ConfigError
from baton.kv.format import KvFormat
from baton.kv.prefix.breaker import Breaker
from baton.kv.prefix.contract import Payload
from baton.kv.prefix.record import BadRecord, RecordCodec
from baton.telemetry import metrics

KEY_PREFIX = "baton:kv:1:"
LOOKUP_KEYS = 1024
BATCH_BYTES = 8 << 20
_SLOWEST_BYTES_PER_S = 100e6
_WRITE_BUDGET_S = 1.0
_CLOSE_S = 1.0
_CONNECTIONS = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLimits:
    """Seconds that a round trip may take beside its payload's time; life of a block; bytes queued."""

    budget_s: float = 0.5
    ttl_s: int = 24 * 3600
    queue_bytes: int = 256 << 20


class RedisPrefixCache:
    """`PrefixCache` over redis://, rediss:// or unix:// URLs; raises ConfigError for an unusable one."""

    def __init__(
        self,
        url: str,
        kv_format: KvFormat,
        fleet_secret: str,
        limits: RedisLimits | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._limits = limits or RedisLimits()
        self._codec = RecordCodec(kv_format, fleet_secret)
        self._breaker = breaker or Breaker()
        self._batch = max(1, BATCH_BYTES // self._codec.record_bytes)
        self._client = _client(url, self._limits.budget_s)
        self._queue: dict[bytes, Payload] = {}
        self._queued_bytes = 0
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def stores(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """One round trip."""
        await self._call("PING", [()], self._limits.budget_s)

    async def lookup(self, digests: Sequence[bytes]) -> int:
        """Length of the longest run of leading hits; one round trip for each LOOKUP_KEYS digests."""
        hits = 0
        for start in range(0, len(digests), LOOKUP_KEYS):
            window = digests[start : start + LOOKUP_KEYS]
            sizes = await self._call("STRLEN", [(_key(digest),) for digest in window], self._limits.budget_s)
            hits += sum(1 for _ in takewhile(self._is_record_size, sizes))
            if hits < start + len(window):
                break
        metrics.PREFIX_BLOCKS.labels("hit").inc(hits)
        metrics.PREFIX_BLOCKS.labels("miss").inc(len(digests) - hits)
        return hits

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests whose records are there and check out."""
        payloads: list[Payload] = []
        for start in range(0, len(digests), self._batch):
            batch = digests[start : start + self._batch]
            records = await self._call("GET", [(_key(digest),) for digest in batch], self._budget(len(batch)))
            payloads += await asyncio.to_thread(self._decode, batch, records)
            if len(payloads) < start + len(batch):
                break
        metrics.PREFIX_BLOCKS.labels("fetched").inc(len(payloads))
        return payloads

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Queue a block for writing; False if the queue is full or Redis is not to be had."""
        if digest in self._queue:
            return True
        size = len(payload)
        if self._closed or not self._breaker.closed or self._queued_bytes + size > self._limits.queue_bytes:
            metrics.PREFIX_BLOCKS.labels("dropped").inc()
            return False
        self._queue[digest] = payload
        self._queued_bytes += size
        self._idle.clear()
        self._news.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="prefix-cache-writer")
        return True

    async def flush(self) -> None:
        """Wait until the queue is written or dropped."""
        await self._idle.wait()

    async def close(self) -> None:
        """Write for at most a second more, then drop the rest and disconnect."""
        self._closed = True
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except TimeoutError:
            metrics.PREFIX_BLOCKS.labels("dropped").inc(len(self._queue))
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer], timeout=_CLOSE_S)
        with suppress(TimeoutError, OSError, RedisError):
            async with asyncio.timeout(_CLOSE_S):
                await self._client.aclose()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            batch = dict(islice(self._queue.items(), self._batch))
            records = await asyncio.to_thread(self._encode, batch)
            sets = [(_key(d), record, "EX", self._limits.ttl_s) for d, record in records.items()]
            replies = await self._call("SET", sets, _WRITE_BUDGET_S + self._budget(len(batch)))
            written = sum(1 for reply in replies if not isinstance(reply, Exception))
            metrics.PREFIX_BLOCKS.labels("written").inc(written)
            metrics.PREFIX_BLOCKS.labels("dropped").inc(len(batch) - written)
            for digest, payload in batch.items():
                del self._queue[digest]
                self._queued_bytes -= len(payload)
            if not self._queue:
                self._news.clear()
                self._idle.set()

    async def _call(self, command: str, calls: Sequence[tuple[Any, ...]], budget_s: float) -> list[Any]:
        """One pipelined round trip: a reply or error for each call, or nothing if Redis can't be had."""
        if not calls or not self._breaker.allows():
            return []
        pipeline = self._client.pipeline(transaction=False)
        for args in calls:
            pipeline.execute_command(command, *args)
        try:
            async with asyncio.timeout(budget_s):
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except Exception as error:  # whatever a broken connection makes the client raise, it is a miss
            if self._breaker.closed:
                _log.warning(
                    "the prefix cache is out of reach, requests go on without it: %s", str(error) or _reason(error)
                )
            self._breaker.failed()
            metrics.PREFIX_FAULTS.labels(_reason(error)).inc()
            return []
        if not self._breaker.closed:
            _log.info("the prefix cache is back")
        self._breaker.succeeded()
        for reply in replies:
            if isinstance(reply, Exception):
                metrics.PREFIX_FAULTS.labels(_reason(reply)).inc()
        return replies

    def _budget(self, records: int) -> float:
        return self._limits.budget_s + records * self._codec.record_bytes / _SLOWEST_BYTES_PER_S

    def _is_record_size(self, size: object) -> bool:
        return size == self._codec.record_bytes

    def _decode(self, digests: Sequence[bytes], records: Sequence[Any]) -> list[Payload]:
        payloads: list[Payload] = []
        for digest, record in zip(digests, records, strict=False):
            if not isinstance(record, bytes):
                break
            try:
                payloads.append(self._codec.decode(digest, record))
            except BadRecord as error:
                metrics.PREFIX_FAULTS.labels(error.reason).inc()
                break
        return payloads

    def _encode(self, batch: dict[bytes, Payload]) -> dict[bytes, bytes]:
        return {digest: self._codec.encode(digest, payload) for digest, payload in batch.items()}


def _key(digest: bytes) -> str:
    return KEY_PREFIX + digest.hex()


def _client(url: str, budget_s: float) -> Redis:
    try:
        # RESP2 spares the handshake; a retry within the client would multiply the budget.
        pool = BlockingConnectionPool.from_url(
            url, protocol=2, max_connections=_CONNECTIONS, timeout=budget_s, retry=Retry(NoBackoff(), 0)
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis: {error}, got {_without_password(url)!r}") from error
    return Redis.from_pool(pool)  # which closes the pool with the client


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _reason(error: Exception) -> str:
    """Metric label of a fault."""
    kinds: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
        ((TimeoutError, RedisTimeoutError), "timeout"),
        (BusyLoadingError, "loading"),
        ((AuthenticationError, NoPermissionError), "auth"),
        (ReadOnlyError, "readonly"),
        (OutOfMemoryError, "oom"),
    )
    for kind, name in kinds:
        if isinstance(error, kind):
            return name
    if isinstance(error, ResponseError):
        return "wrong_type" if str(error).startswith("WRONGTYPE") else "server"
    return "connection"
