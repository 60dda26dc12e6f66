"""The prefix cache in Redis or Valkey, shared by all workers of a fleet.

Each block has one key, `baton:kv:2:<first 8 hex digits of the KV format's digest>:<digest in hex>`, whose value is one
record (`record.py`). It expires after `ttl_s` without use; the server's own policy may evict it earlier. The store is
one server, the master that sentinels name, or a cluster (`address.py`).

A look-up is one round trip to each node concerned, all at once, for each LOOKUP_KEYS blocks; several go on at a time.
It is a pipeline of STRLEN, because a key of another type or size is not a block. A fetch is one round trip too, a
pipeline of GETRANGE: if somebody has written a larger value since the look-up, no more than the size of a record is
read. Records are encoded and checked in threads. One background task writes, from a queue bounded in bytes. A record
that is refused is a miss, is counted, and stays until the next computation overwrites it.

Every look-up, fetch and write has a time budget, and one failure opens the circuit breaker of the node. So a Redis that
is slow, full or gone costs one budget now and then; all other calls are misses at once. Logged are the opening and the
closing of the breaker, not each failure. Nothing here raises after construction.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any, TypeVar

from baton.breaker import Breaker
from baton.kv.format import KvFormat
from baton.kv.prefix.contract import FetchRate, Hits, Payload, PrefixCache
from baton.kv.prefix.fetch_cost import Throughput
from baton.kv.prefix.redis.address import parse_redis_url
from baton.kv.prefix.redis.nodes import Command, Node, RedisCalls, count_fault, fault_label, open_topology
from baton.kv.prefix.redis.record import BadRecord, RecordCodec
from baton.ledger import CacheTier
from baton.telemetry import metrics

T = TypeVar("T")

REDIS = "redis"
KEY_PREFIX = "baton:kv:2:"
LOOKUP_KEYS = 256
"""Keys of a round trip that only asks about them. The client needs about 4 µs for each, on the event loop."""
LOOKUP_LANES = 4
"""Round trips of a look-up at a time, once the first has found all of its blocks."""
TOUCH_KEYS = 4096
"""Most keys whose expiry one touch renews."""
MAX_RECORDS = 128
"""Records of a round trip that reads or writes them. The client needs about 15 µs for each, on the event loop."""
BATCH_BYTES = 4 << 20
WINDOW_BYTES = 4 << 20
LANES = 2
"""A fetch asks each node for LANES windows at a time: one is received while another one is checked."""
_MIN_BYTES_PER_S = 100e6
_MAX_KEY_S = 50e-6
_WRITE_BUDGET_S = 1.0
_CLOSE_S = 1.0
_THREADS = 2
CLEAR_KEYS = 250
"""Keys of a batch of deletions."""

_log = logging.getLogger(__name__)


Write = Callable[[Sequence[tuple[bytes, Payload]]], Awaitable[Sequence[bool]]]
"""Writes (digest, payload) pairs and returns which of them were stored."""

OnLost = Callable[[Sequence[bytes]], object]
"""Called with the digests of blocks that a store had accepted, but does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLimits:
    """Limits of the cache. `budget_s` is the time of a call, to which time for its keys and payload is added.

    `ttl_s` is the lifetime of a block without use. `queue_bytes` limits the blocks that wait to be written.
    A node that failed is tried again after `pause_s`, which doubles with each failure up to `max_pause_s`.
    """

    budget_s: float = 0.5
    ttl_s: int = 24 * 3600
    queue_bytes: int = 256 << 20
    pause_s: float = 1.0
    max_pause_s: float = 10.0


@dataclass(slots=True)
class _CheckedRecords:
    """The result of checking `asked` consecutive records: payloads up to the first unusable one, and its fault."""

    asked: int
    payloads: list[Payload] = field(default_factory=list)
    gone: Sequence[bytes] = ()
    refused: str = ""

    @property
    def complete(self) -> bool:
        """Whether all records are usable."""
        return len(self.payloads) == self.asked


class RedisPrefixCache(PrefixCache):
    """`PrefixCache` over the servers at a URL; raises ConfigError for a URL that can't be used.

    `lost` is called with blocks that `put` accepted but that were not stored, and with blocks that a fetch or a touch
    found to be gone. `refused` is called with blocks whose records are not valid.
    """

    def __init__(
        self,
        url: str,
        kv_format: KvFormat,
        fleet_secret: str,
        limits: RedisLimits | None = None,
        lost: OnLost = lambda _: None,
        refused: OnLost = lambda _: None,
    ) -> None:
        self._limits = limits or RedisLimits()
        self._codec = RecordCodec(kv_format, fleet_secret)
        self._prefix = key_prefix(kv_format).encode()
        breaker = partial(Breaker, self._limits.pause_s, self._limits.max_pause_s)
        self._topology = open_topology(parse_redis_url(url), self._limits.budget_s, breaker)
        self._calls = RedisCalls(self._topology, self._limits.budget_s)
        self._threads = ThreadPoolExecutor(_THREADS, "prefix-records")
        self._lost, self._refused = lost, refused
        self._queue = WriteQueue(REDIS, self._write, self._limits.queue_bytes, BATCH_BYTES, lost)
        self._throughput = Throughput()
        self._hits = self._misses = 0
        self._touch_task: asyncio.Task[None] | None = None
        self._clear_jobs: set[ClearJob] = set()
        self._closed = False

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """Send one PING to each node."""
        await self._call_all([("PING",)])

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading hits."""
        started, wanted, found = time.monotonic(), self._codec.record_bytes, len(digests)
        until = started + self._limits.budget_s + len(digests) * _MAX_KEY_S
        starts, missed = iter(range(0, len(digests), LOOKUP_KEYS)), dict[int, list[Any]]()

        async def lane(most: int | None = None) -> None:
            for start in islice(starts, most):
                sizes = await self._get_sizes(digests[start : start + LOOKUP_KEYS], until - time.monotonic())
                if start == 0 and all(isinstance(size, int) for size in sizes):
                    self._throughput.record_lookup(time.monotonic() - started)
                if sizes.count(wanted) < len(sizes):
                    missed[start] = sizes
                    deque(starts, 0)  # later blocks are useless

        await lane(1)
        if len(digests) > LOOKUP_KEYS and not missed:
            await asyncio.gather(*(lane() for _ in range(LOOKUP_LANES)))
        if missed:
            start, sizes = min(missed.items())
            found = start + sum(1 for _ in takewhile(lambda size: size == wanted, sizes))
            if isinstance(size := sizes[found - start], int) and size > 0:
                count_fault("truncated")
        self._hits += found
        self._misses += len(digests) - found
        metrics.PREFIX_BLOCKS.labels(REDIS, "hit").inc(found)
        metrics.PREFIX_BLOCKS.labels(REDIS, "miss").inc(len(digests) - found)
        return Hits(((REDIS, found),)) if found else Hits()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests whose records exist and are valid."""
        keys, started = self._keys(digests), time.monotonic()
        size, until = self._codec.record_bytes, started + self._budget(len(keys))
        window = min(max(1, WINDOW_BYTES * max(1, len(self._topology.masters)) // size), MAX_RECORDS)
        starts, parts = iter(range(0, len(keys), window)), dict[int, _CheckedRecords]()

        async def lane() -> None:
            for start in starts:
                wanted = slice(start, start + window)
                records = await self._get_records(keys[wanted], until - time.monotonic())
                parts[start] = await self._in_thread(self._check, digests[wanted], records)
                if not parts[start].complete:
                    deque(starts, 0)  # later windows are useless

        await asyncio.gather(*(lane() for _ in range(LANES)))
        payloads = self._accept_records(digests, [parts[start] for start in sorted(parts)])
        self._throughput.record_fetch(len(payloads) * size, time.monotonic() - started)
        metrics.PREFIX_BLOCKS.labels(REDIS, "fetched").inc(len(payloads))
        return payloads

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """All blocks that are not being written already, and whose node can be reached."""
        return [
            not self._closed and digest not in self._queue and self._calls.can_write(self._key(digest))
            for digest in digests
        ]

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Queue a block for writing; False if the queue is full or its node can't be reached."""
        return self._queue.put(digest, payload, not self._closed and self._calls.can_write(self._key(digest)))

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """True for each block: every block of a saved prompt is written."""
        return [True] * len(digests)

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Write the blocks, MAX_RECORDS in a round trip to each node; returns how many leading ones are stored."""
        stored = await self._write(list(zip(digests, payloads, strict=True)))
        metrics.PREFIX_BLOCKS.labels(REDIS, "written").inc(sum(stored))
        return sum(1 for _ in takewhile(bool, stored))

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Delete the blocks; one round trip for each LOOKUP_KEYS digests."""
        for start in range(0, len(digests), LOOKUP_KEYS):
            keys = self._keys(digests[start : start + LOOKUP_KEYS])
            commands = [("UNLINK", key) for key in keys]
            await self._calls.call_keys("write", keys, commands.__getitem__, self._limits.budget_s)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Renew their expiry in the background; does nothing if such a call is still running."""
        there = [digest for digest in digests[:TOUCH_KEYS] if digest not in self._queue]
        if there and not self._closed and (self._touch_task is None or self._touch_task.done()):
            self._touch_task = asyncio.create_task(self._renew_expiry(there), name="prefix-cache-touch")

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """The rate measured over the fetches of this process."""
        return {REDIS: rate} if (rate := self._throughput.rate) else {}

    async def stats(self) -> list[CacheTier]:
        """The statistics of the servers: blocks are all keys of the database, bytes all memory in use."""
        blocks = used = most = 0
        for keys, info in await self._call_all([("DBSIZE",), ("INFO", "memory")]):
            blocks += keys if isinstance(keys, int) else 0
            used += _number(info, "used_memory")
            most += _number(info, "maxmemory")
        rate = self._throughput.rate
        speed = rate.bytes_per_s if rate else 0.0
        return [CacheTier(REDIS, blocks, used, most, self._hits, self._misses, speed, self._state())]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Delete the blocks of this KV format on all nodes, if `shared`.

        Works in batches, each with a time budget of its own. If a batch fails, the rest of that node is left as it is,
        and `state` says so.
        """
        if not shared:
            return []
        self._queue.clear()
        jobs = [ClearJob(node) for node in await self._calls.masters()]
        self._clear_jobs.update(jobs)
        budget_s = _WRITE_BUDGET_S + self._budget(0)
        try:
            await asyncio.gather(*(job.run(self._calls, self._prefix + b"*", budget_s) for job in jobs))
        finally:
            self._clear_jobs.difference_update(jobs)
        blocks = sum(job.deleted for job in jobs)
        refused = next((f"refused: {job.refused}" for job in jobs if job.refused), "")
        unfinished = "" if all(job.done for job in jobs) else "not all of it"
        state = "; ".join(filter(None, (unfinished, refused, self._describe_faults())))
        return [CacheTier(REDIS, blocks, blocks * self._codec.record_bytes, state=state)]

    async def flush(self) -> None:
        """Wait until queued blocks are written or dropped."""
        await self._queue.flush()

    async def close(self) -> None:
        """Write for at most one more second, then drop the rest and disconnect."""
        if self._closed:
            return
        self._closed = True
        await self._queue.close(_CLOSE_S)
        if self._touch_task is not None:
            self._touch_task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._calls.aclose()
        self._threads.shutdown(wait=False)

    async def _get_sizes(self, digests: Sequence[bytes], budget_s: float) -> list[Any]:
        keys = self._keys(digests)
        return await self._calls.call_keys("look", keys, lambda index: ("STRLEN", keys[index]), budget_s)

    async def _get_records(self, keys: Sequence[bytes], budget_s: float) -> list[Any]:
        # One byte more than a record, so that a longer value is noticed.
        last = self._codec.record_bytes
        return await self._calls.call_keys("fetch", keys, lambda index: ("GETRANGE", keys[index], 0, last), budget_s)

    def _check(self, digests: Sequence[bytes], records: Sequence[Any]) -> _CheckedRecords:
        """Check records in order; runs in a thread."""
        checked = _CheckedRecords(len(records))
        for digest, record in zip(digests, records, strict=True):
            try:
                # Errors were counted already, and a missing reply is a fault of the node.
                payload = self._codec.decode(digest, record) if record and isinstance(record, bytes) else None
            except BadRecord as error:
                checked.refused = error.reason
                break
            if payload is None:
                checked.gone = [name for name, found in zip(digests, records, strict=True) if found == b""]
                break
            checked.payloads.append(payload)
        return checked

    def _accept_records(self, digests: Sequence[bytes], parts: Sequence[_CheckedRecords]) -> list[Payload]:
        """The payloads before the first missing one; reports the missing ones, or the first refused one."""
        payloads: list[Payload] = []
        for part in parts:
            payloads += part.payloads
            if part.gone:
                count_fault("evicted")
                self._lost(part.gone)
            if part.refused:
                count_fault(part.refused)
                self._refused([digests[len(payloads)]])
            if not part.complete:
                break
        return payloads

    async def _write(self, blocks: Sequence[tuple[bytes, Payload]]) -> list[bool]:
        keys = self._keys([digest for digest, _ in blocks])
        records = await self._in_thread(lambda: [self._codec.encode(digest, payload) for digest, payload in blocks])
        budget_s = _WRITE_BUDGET_S + self._budget(len(keys))
        commands = [("SET", key, record, "EX", self._limits.ttl_s) for key, record in zip(keys, records, strict=True)]
        replies, until = list[Any](), time.monotonic() + budget_s
        for start in range(0, len(keys), MAX_RECORDS):
            if until <= time.monotonic():
                break
            part = commands[start : start + MAX_RECORDS]
            named = keys[start : start + MAX_RECORDS]
            replies += await self._calls.call_keys("write", named, part.__getitem__, until - time.monotonic())
        return [reply is True for reply in replies] + [False] * (len(keys) - len(replies))

    async def _renew_expiry(self, digests: Sequence[bytes]) -> None:
        for start in range(0, len(digests), LOOKUP_KEYS):
            part = digests[start : start + LOOKUP_KEYS]
            keys = self._keys(part)
            commands = [("EXPIRE", key, self._limits.ttl_s) for key in keys]
            there = await self._calls.call_keys("look", keys, commands.__getitem__, self._limits.budget_s)
            self._lost([digest for digest, reply in zip(part, there, strict=True) if reply is False])

    async def _call_all(self, commands: Sequence[Command]) -> list[list[Any]]:
        """The replies of each node that answered."""
        asked = [
            self._calls.call_node(node, "look", commands, self._limits.budget_s) for node in await self._calls.masters()
        ]
        return [replies for replies in await asyncio.gather(*asked) if replies is not None]

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        except RuntimeError:  # closed meanwhile, so its threads are gone
            return work(*args)
        return await done

    def _state(self) -> str:
        if self._clear_jobs:
            return f"clearing: {sum(job.deleted for job in self._clear_jobs)} blocks are gone"
        return self._describe_faults()

    def _describe_faults(self) -> str:
        nodes = self._topology.masters
        lost = [node.health for node in nodes if not node.health.is_reachable]
        if not self._topology.health.is_reachable and not nodes:
            lost = [self._topology.health]
        if not lost:
            return ""
        if len(nodes) <= 1:
            return f"out of reach: {lost[0].last_error}"
        return f"{len(lost)} of {len(nodes)} nodes out of reach: {lost[0].last_error}"

    def _budget(self, records: int) -> float:
        return self._limits.budget_s + records * self._codec.record_bytes / _MIN_BYTES_PER_S

    def _key(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _keys(self, digests: Sequence[bytes]) -> list[bytes]:
        return [self._key(digest) for digest in digests]


class WriteQueue:
    """Blocks that wait to be written. Each counts towards `queue_bytes` until it is written or dropped.

    `lost` is called with the digests of dropped blocks.
    """

    def __init__(
        self, tier: str, write: Write, queue_bytes: int, batch_bytes: int, lost: OnLost = lambda _: None
    ) -> None:
        self._write, self._queue_bytes, self._batch_bytes, self._lost = write, queue_bytes, batch_bytes, lost
        self._queue: dict[bytes, Payload] = {}
        self._bytes = 0
        self._has_blocks, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self._tier = tier
        self._written = metrics.PREFIX_BLOCKS.labels(tier, "written")
        self._dropped = metrics.PREFIX_BLOCKS.labels(tier, "dropped")

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._queue

    def put(self, digest: bytes, payload: Payload, accepted: bool = True) -> bool:
        """Queue a block; False if `accepted` is False or the queue is full."""
        if digest in self._queue:
            return True
        if self._closed or not accepted or self._bytes + len(payload) > self._queue_bytes:
            self._dropped.inc()
            return False
        self._queue[digest] = payload
        self._bytes += len(payload)
        self._idle.clear()
        self._has_blocks.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._run(), name="prefix-cache-writer")
        return True

    async def flush(self) -> None:
        """Wait until the queue is written or dropped."""
        await self._idle.wait()

    def clear(self) -> None:
        """Drop all queued blocks; a batch that is being written may still be stored."""
        self._drop(list(self._queue))

    async def close(self, within_s: float) -> None:
        """Write for at most `within_s` seconds more, then drop the rest."""
        self._closed = True
        try:
            async with asyncio.timeout(within_s):
                await self.flush()
        except TimeoutError:
            self.clear()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})

    async def _run(self) -> None:
        while True:
            await self._has_blocks.wait()
            batch = self._batch()
            try:
                written = await self._write(batch)
            except Exception:  # otherwise `flush` would wait for ever
                _log.exception("blocks could not be written to %s", self._tier)
                written = [False] * len(batch)
            self._written.inc(sum(written))
            left = [self._queue.get(digest) is payload for digest, payload in batch]  # not cleared meanwhile
            ended = list(zip(batch, left, written, strict=True))
            self._forget([digest for (digest, _), here, stored in ended if here and stored])
            self._drop([digest for (digest, _), here, stored in ended if here and not stored])

    def _batch(self) -> list[tuple[bytes, Payload]]:
        batch: list[tuple[bytes, Payload]] = []
        size = 0
        for digest, payload in self._queue.items():
            if batch and size + len(payload) > self._batch_bytes:
                break
            batch.append((digest, payload))
            size += len(payload)
        return batch

    def _drop(self, digests: Sequence[bytes]) -> None:
        self._dropped.inc(len(digests))
        self._lost(digests)
        self._forget(digests)

    def _forget(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._bytes -= len(self._queue.pop(digest))
        if not self._queue:
            self._has_blocks.clear()
            self._idle.set()


@dataclass(slots=True, eq=False)
class ClearJob:
    """The deletion of all our keys at one node: its progress, and the first error."""

    node: Node
    deleted: int = 0
    done: bool = False
    refused: Exception | None = None

    async def run(self, calls: RedisCalls, pattern: bytes, budget_s: float) -> None:
        """Delete the keys that match `pattern`, until all keys were scanned or a batch fails."""
        cursor, scan = 0, ("MATCH", pattern, "COUNT", CLEAR_KEYS)
        # In the lane of writes, so that it does not delay look-ups.
        ask = partial(calls.call_node, self.node, "write", budget_s=budget_s)
        while not self.done and not self.refused:
            replies = await ask([("SCAN", cursor, *scan)])
            if replies is None:
                return
            if isinstance(replies[0], Exception):
                self.refused = replies[0]
                count_fault(fault_label(replies[0]))
                return
            cursor, keys = replies[0]
            deleted = await ask([("UNLINK", key) for key in keys]) if keys else []
            if deleted is None:
                return
            self.deleted += sum(reply for reply in deleted if isinstance(reply, int))
            for error in (reply for reply in deleted if isinstance(reply, Exception)):
                count_fault(fault_label(error))
                self.refused = self.refused or error
            self.done = cursor == 0


def key_prefix(kv_format: KvFormat) -> str:
    """The beginning of the keys of all blocks of a KV format."""
    return f"{KEY_PREFIX}{kv_format.digest[:8]}:"


def _number(info: object, name: str) -> int:
    """A field of an INFO reply; 0 if it is missing."""
    value = info.get(name) if isinstance(info, dict) else 0
    return value if isinstance(value, int) else 0
