"""The prefix cache in Redis or Valkey, shared by all workers of a fleet.

One key a block, `baton:kv:2:<first 8 hex digits of the KV format's digest>:<digest in hex>`, one record a key
(`baton.kv.prefix.record`), which expires after `ttl_s` without use and is evicted by the server's own policy before.
It may be one server, a master that sentinels name, or a cluster (`baton.kv.prefix.address`).

A look-up is one round trip to each node concerned, all at once, for each LOOKUP_KEYS blocks: a pipeline of STRLEN,
which also tells a key of another type or size from a block. Fetches are pipelined GETs with at most two windows
asked for ahead, each record checked while others are received. Writes go through one background task, from a
queue bounded in bytes. A record that is refused is deleted (`baton.kv.prefix.removals`), and written again by the next
computation.

    redis      this protocol
    calls      from the asyncio loop to threads, within budgets; faults to misses
    servers    which node has which key; connections of redis-py
    exchange   what is said on a connection
    wire       large values without copies

Every round trip has a time budget, and one failure opens a node's circuit breaker: a Redis that is slow, full or gone
costs one budget now and then, and is otherwise a miss. The breaker's opening and closing are logged, not each failure.
Nothing here raises after construction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from baton.kv.format import KvFormat
from baton.kv.prefix.address import parse_redis_url
from baton.kv.prefix.breaker import Breaker
from baton.kv.prefix.buffers import Buffers
from baton.kv.prefix.calls import Calls
from baton.kv.prefix.contract import CacheTier, FetchRate, Hits, Payload, PrefixesChanged
from baton.kv.prefix.exchange import Clear, Commands, Fetch, Store
from baton.kv.prefix.faults import count
from baton.kv.prefix.pace import Pace
from baton.kv.prefix.record import RecordCodec
from baton.kv.prefix.removals import Removals, removal
from baton.kv.prefix.servers import Node, open_servers
from baton.kv.prefix.wire import pack, wire_size
from baton.kv.prefix.writes import Lost, WriteQueue
from baton.telemetry import metrics

TIER = "redis"
KEY_PREFIX = "baton:kv:2:"
LOOKUP_KEYS = 4096
BATCH_BYTES = 8 << 20
_SLOWEST_BYTES_PER_S = 100e6
_WRITE_BUDGET_S = 1.0
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLimits:
    """Seconds that a round trip may take beside its payload's time; life of a block; bytes queued.

    A node that failed is tried again after `pause_s`, which doubles with each failure up to `longest_pause_s`.
    """

    budget_s: float = 0.5
    ttl_s: int = 24 * 3600
    queue_bytes: int = 256 << 20
    pause_s: float = 1.0
    longest_pause_s: float = 10.0


class RedisPrefixCache:
    """`PrefixCache` over the servers at a URL; raises ConfigError for one that can't be used.

    `lost` gets the blocks that `put` took and that were not stored, and those that a fetch or a touch found to be gone.
    `refused` gets those whose records are not usable.
    """

    def __init__(
        self,
        url: str,
        kv_format: KvFormat,
        fleet_secret: str,
        limits: RedisLimits | None = None,
        lost: Lost = lambda _: None,
        refused: Lost = lambda _: None,
    ) -> None:
        self._limits = limits or RedisLimits()
        self._codec = RecordCodec(kv_format, fleet_secret)
        self._buffers = Buffers(wire_size(self._codec.record_bytes))
        self._prefix = key_prefix(kv_format).encode()
        breaker = partial(Breaker, self._limits.pause_s, self._limits.longest_pause_s)
        self._servers = open_servers(parse_redis_url(url), self._limits.budget_s, breaker)
        self._calls = Calls(self._servers)
        self._lost, self._refused = lost, refused
        self._queue = WriteQueue(TIER, self._write, self._limits.queue_bytes, BATCH_BYTES, lost)
        self._removals = Removals(TIER, self._remove)
        self._pace = Pace()
        self._hits = self._misses = 0
        self._touching: asyncio.Task[None] | None = None
        self._clearing: set[Clear] = set()
        self._closed = False

    @property
    def stores(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """One round trip to each node."""
        await self._ask_all([pack(b"PING")])

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading hits; one round trip for each LOOKUP_KEYS digests."""
        found = 0
        for start in range(0, len(digests), LOOKUP_KEYS):
            keys = self._keys(digests[start : start + LOOKUP_KEYS])
            ask = Commands([pack(b"STRLEN", key) for key in keys])
            await self._calls.keyed("look", keys, ask, self._limits.budget_s)
            found += sum(1 for _ in takewhile(lambda size: size == self._codec.record_bytes, ask.slots))
            if found < start + len(keys):
                if isinstance(size := ask.slots[found - start], int) and size > 0:
                    count("truncated")
                    self._removals.add({digests[found]: b""})
                break
        self._hits += found
        self._misses += len(digests) - found
        metrics.PREFIX_BLOCKS.labels(TIER, "hit").inc(found)
        metrics.PREFIX_BLOCKS.labels(TIER, "miss").inc(len(digests) - found)
        return Hits(((TIER, found),)) if found else Hits()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests whose records are there and check out."""
        keys, started = self._keys(digests), time.monotonic()
        fetch = Fetch(keys, digests, self._codec, self._buffers)
        try:
            await self._calls.keyed("fetch", keys, fetch, self._budget(len(keys)))
        finally:
            fetch.stop()
        self._lost([digests[index] for index in fetch.gone])
        self._refused([digests[index] for index, _ in fetch.refused])
        self._removals.add({digests[index]: header for index, header in fetch.refused})
        payloads = fetch.payloads()
        took_s = time.monotonic() - started
        self._pace.fetched(len(payloads), self._codec.record_bytes, fetch.first_at - started, took_s)
        metrics.PREFIX_BLOCKS.labels(TIER, "fetched").inc(len(payloads))
        return payloads

    def wants(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """All that are not being written already, and whose node is to be had."""
        return [
            not self._closed and digest not in self._queue and self._calls.accepts(self._key(digest))
            for digest in digests
        ]

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Queue a block for writing; False if the queue is full or its node is not to be had."""
        return self._queue.put(digest, payload, not self._closed and self._calls.accepts(self._key(digest)))

    def touch(self, digests: Sequence[bytes]) -> None:
        """Prolong their lives in the background; dropped if another such call is still under way."""
        there = [digest for digest in digests[:LOOKUP_KEYS] if digest not in self._queue]
        if there and not self._closed and (self._touching is None or self._touching.done()):
            self._touching = asyncio.create_task(self._prolong(there), name="prefix-cache-touch")

    def rates(self) -> Mapping[str, FetchRate]:
        """Measured over the fetches of this process."""
        return {TIER: self._pace.rate} if self._pace.rate else {}

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Nothing is held in this process."""

    async def stats(self) -> list[CacheTier]:
        """What the servers say of themselves: blocks are all keys of the database, bytes all memory in use."""
        blocks = used = most = 0
        for keys, info in await self._ask_all([pack(b"DBSIZE"), pack(b"INFO", b"memory")]):
            blocks += keys if isinstance(keys, int) else 0
            used += _number(info, b"used_memory")
            most += _number(info, b"maxmemory")
        rate = self._pace.rate
        speed = rate.bytes_per_s if rate else 0.0
        return [CacheTier(TIER, blocks, used, most, self._hits, self._misses, speed, self._state())]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Delete the blocks of this KV format on all nodes, if `shared`.

        In batches, each with a time budget of its own; a node that fails one is left as it is. `state` says so.
        """
        if not shared:
            return []
        self._queue.clear()
        jobs = {Clear(self._prefix + b"*"): node for node in await self._calls.masters(self._limits.budget_s)}
        self._clearing.update(jobs)
        try:
            await asyncio.gather(*(self._clear(node, job) for job, node in jobs.items()))
        finally:
            self._clearing.difference_update(jobs)
        blocks = sum(job.deleted for job in jobs)
        refused = next((f"refused: {job.refused}" for job in jobs if job.refused), "")
        unfinished = "" if all(job.done for job in jobs) else "not all of it"
        state = "; ".join(filter(None, (unfinished, refused, self._trouble())))
        return [CacheTier(TIER, blocks, blocks * self._codec.record_bytes, state=state)]

    async def flush(self) -> None:
        """Wait until the queue is written or dropped, and refused records are removed."""
        await self._queue.flush()
        await self._removals.finished()

    async def close(self) -> None:
        """Write for at most a second more, then drop the rest and disconnect."""
        if self._closed:
            return
        self._closed = True
        await self._queue.close(_CLOSE_S)
        if self._touching is not None:
            self._touching.cancel()
        await self._removals.close()
        await self._calls.close(_CLOSE_S)

    async def _write(self, blocks: Sequence[tuple[bytes, Payload]]) -> list[bool]:
        keys = self._keys([digest for digest, _ in blocks])
        store = Store(keys, blocks, self._codec, self._limits.ttl_s)
        await self._calls.keyed("write", keys, store, _WRITE_BUDGET_S + self._budget(len(keys)))
        return [reply == b"OK" for reply in store.slots]

    async def _remove(self, refused: Mapping[bytes, bytes]) -> list[object]:
        keys, size = self._keys(list(refused)), self._codec.record_bytes
        commands = [removal(key, size, header) for key, header in zip(keys, refused.values(), strict=True)]
        ask = Commands(commands)
        await self._calls.keyed("write", keys, ask, self._limits.budget_s)
        return ask.slots

    async def _clear(self, node: Node, job: Clear) -> None:
        going = True
        while going and not job.done:
            before = job.batches
            # Not the threads of look-ups: it would keep them waiting.
            await self._calls.at("write", [(node, (), False)], job, _WRITE_BUDGET_S + self._budget(0))
            going = job.batches > before and not job.refused

    async def _prolong(self, digests: Sequence[bytes]) -> None:
        keys = self._keys(digests)
        commands = Commands([pack(b"EXPIRE", key, b"%d" % self._limits.ttl_s) for key in keys])
        await self._calls.keyed("look", keys, commands, self._limits.budget_s)
        self._lost([digest for digest, reply in zip(digests, commands.slots, strict=True) if reply == 0])

    async def _ask_all(self, commands: Sequence[bytes]) -> list[list[object]]:
        """The replies of each node."""
        asked = [(node, Commands(commands)) for node in await self._calls.masters(self._limits.budget_s)]
        everything = range(len(commands))
        calls = (self._calls.at("look", [(node, everything, False)], ask, self._limits.budget_s) for node, ask in asked)
        await asyncio.gather(*calls)
        return [ask.slots for _, ask in asked]

    def _state(self) -> str:
        if self._clearing:
            return f"clearing: {sum(job.deleted for job in self._clearing)} blocks are gone"
        return self._trouble()

    def _trouble(self) -> str:
        nodes = self._servers.masters()
        lost = [node.health for node in nodes if not node.health.well]
        if not self._servers.health.well and not nodes:
            lost = [self._servers.health]
        if not lost:
            return ""
        if len(nodes) <= 1:
            return f"out of reach: {lost[0].trouble}"
        return f"{len(lost)} of {len(nodes)} nodes out of reach: {lost[0].trouble}"

    def _budget(self, records: int) -> float:
        return self._limits.budget_s + records * self._codec.record_bytes / _SLOWEST_BYTES_PER_S

    def _key(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _keys(self, digests: Sequence[bytes]) -> list[bytes]:
        return [self._key(digest) for digest in digests]


def key_prefix(kv_format: KvFormat) -> str:
    """What the keys of all blocks of a KV format begin with."""
    return f"{KEY_PREFIX}{kv_format.digest[:8]}:"


def _number(info: object, name: bytes) -> int:
    """A field of an INFO reply; 0 if it lacks."""
    if isinstance(info, bytes):
        for line in info.splitlines():
            field, _, value = line.partition(b":")
            if field == name and value.isdigit():
                return int(value)
    return 0
