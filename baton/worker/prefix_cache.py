"""A worker's prefix cache: its tiers in their order, copies between them and KV pages, and their statistics.

`BlockCopier` hashes a sequence's blocks, loads cached ones, and writes new ones back. Copies run in threads, beside the
engine and the asyncio loop, in slices of SLICE_BYTES. So memory never holds a second copy of a long prefix: one slice
is fetched while the one before is copied. Threads can't be cancelled. When a job has ended, or after `stop`, a load or
a save ends after COPY_BYTES and a write-back after its slice; the caller keeps the handle until they have returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from baton.config.worker import WorkerConfig
from baton.engine.contract import Engine, KvHandle
from baton.kv.format import KvFormat
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix.contract import Payload, PrefixCache
from baton.kv.prefix.host import HostPrefixCache
from baton.kv.prefix.redis.address import check_url
from baton.kv.prefix.tiered import StoreTier, TieredPrefixCache, WriteFilter
from baton.ledger import CacheTier
from baton.process import executors
from baton.process.executors import COPIES, WORK, wait_to_end
from baton.telemetry import metrics

if TYPE_CHECKING:
    from baton.kv.prefix.redis.cache import RedisLimits

P = ParamSpec("P")
T = TypeVar("T")

SLICE_BYTES = 16 << 20
COPY_BYTES = 4 << 20
MAX_WRITE_BACKS = 4
PUBLISH_BLOCKS = 1024
"""Blocks that are published before other tasks run."""
LONG_TOKENS = 8192
"""From this number on, hashing runs in a thread. Below, it takes less time than the way to a thread and back."""

_log = logging.getLogger(__name__)


def open_worker_cache(config: WorkerConfig, kv_format: KvFormat, *, cache_memory: int = 0) -> PrefixCache:
    """The worker's prefix cache: `cache_memory` bytes of host memory, then Redis.

    Raises ConfigError for a bad URL.
    """
    limits = None
    if config.redis not in ("", "none"):
        from baton.kv.prefix.redis.cache import RedisLimits

        limits = RedisLimits(budget_s=config.cache_budget_s, ttl_s=config.cache_ttl_s)
    return open_prefix_cache(
        config.redis,
        kv_format,
        config.fleet_secret,
        cache_memory=cache_memory,
        limits=limits,
        writes=config.cache_writes,
    )


def open_prefix_cache(
    url: str,
    kv_format: KvFormat,
    fleet_secret: str,
    *,
    cache_memory: int = 0,
    limits: RedisLimits | None = None,
    writes: str = "first",
) -> PrefixCache:
    """A cache of `cache_memory` bytes of host memory, then the store at `url`; 0 and "none" or "" leave them out.

    `writes` says when blocks go to the store: "first", "second" or "never". Raises ConfigError for a URL that can't
    be used. Connects at the first use; without a Redis there, look-ups miss.
    """
    check_url(url)
    host, stores = HostPrefixCache(cache_memory), list[StoreTier]()
    if url not in ("", "none"):
        if not fleet_secret:
            _log.warning("no fleet secret is set: whoever can write to Redis can plant cached blocks")
        from baton.kv.prefix.redis.cache import RedisPrefixCache

        known = WriteFilter()
        redis = RedisPrefixCache(
            url, kv_format, fleet_secret, limits, lost=known.mark_missed, refused=known.mark_refused
        )
        stores.append(StoreTier(redis, writes, known))
    if stores:
        return TieredPrefixCache(host, stores)
    return host if host.enabled else PrefixCache()


class BlockCopier:
    """Hashes, loads, publishes, saves and writes back prefix blocks of one worker. Use it on the event loop only."""

    def __init__(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine = engine
        self._format = engine.spec.kv_format
        self._fingerprint = engine.spec.fingerprint
        self._slice = max(1, SLICE_BYTES // self._format.block_bytes)
        self._copy = max(1, COPY_BYTES // self._format.block_bytes)
        self._cache = cache
        self._writing_back = 0
        self._stopped = False

    def stop(self) -> None:
        """Let `load`, `write_back` and `save` return soon."""
        self._stopped = True

    async def hash_blocks(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """The digests of all full blocks of `ids`; uses a thread if there are many."""
        if len(ids) < LONG_TOKENS:
            return self.digests(ids, salt)
        return await executors.run(WORK, self.digests, ids, salt)

    def digests(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """As `hash_blocks`, on the calling thread; takes about a microsecond for each block."""
        root = chain_root(self._fingerprint, self._format.digest, salt)
        return block_digests(root, ids, self._format.block_size)

    async def publish(self, handle: KvHandle, digests: Sequence[bytes]) -> None:
        """Publish blocks (`Engine.publish`) in slices: there may be tens of thousands, and other tasks run between."""
        for blocks in range(PUBLISH_BLOCKS, len(digests), PUBLISH_BLOCKS):
            self._engine.publish(handle, digests[:blocks])
            await asyncio.sleep(0)
        self._engine.publish(handle, digests)

    async def load(
        self,
        handle: KvHandle,
        digests: Sequence[bytes],
        blocks: range,
        should_continue: Callable[[], bool],
        on_loaded: Callable[[int], object] = lambda _: None,
    ) -> int:
        """Write the cached `blocks` of the chain `digests` into the handle's pages, up to the first that is gone.

        Returns the end of the blocks loaded, and calls `on_loaded` with it after each slice. Returns or raises, also
        when cancelled, only after the last write has ended.
        """
        at, fetching = blocks.start, self._fetch(digests, blocks)
        try:
            while fetching is not None:
                wanted = min(blocks.stop - at, self._slice)
                payloads, start = await fetching, at
                rest, fetching = range(start + len(payloads), blocks.stop), None
                if not payloads or not self._should_continue(should_continue):
                    break
                if len(payloads) == wanted:
                    fetching = self._fetch(digests, rest)
                await _in_thread(self._write, handle, start, payloads, should_continue)
                if not self._should_continue(should_continue):
                    break
                at = rest.start
                on_loaded(at)
        finally:
            if fetching is not None:
                fetching.cancel()
                await wait_to_end(fetching)
        return at

    async def write_back(
        self,
        handle: KvHandle,
        digests: Sequence[bytes],
        hit_blocks: int,
        should_continue: Callable[[], bool],
        *,
        skip_blocks: int = 0,
    ) -> None:
        """Put the blocks of the chain that the cache wants, until it refuses one. All blocks must be final.

        The first `hit_blocks` blocks were cache hits. The first `skip_blocks` are never put: they are stored already,
        or prefill puts them. The caller keeps the handle meanwhile. At most MAX_WRITE_BACKS run at a time; further ones
        are dropped.
        """
        if not self._cache.enabled:
            return
        wants = await self._cache.select_writes(digests, hit_blocks)
        wanted = [block for block in range(skip_blocks, len(digests)) if wants[block]]
        if self._writing_back >= MAX_WRITE_BACKS:
            metrics.PREFIX_BLOCKS.labels("any", "dropped").inc(len(wanted))
            return
        self._writing_back += 1
        try:
            for blocks in _slices(wanted, self._slice):
                if not self._should_continue(should_continue):
                    return
                payloads = await _in_thread(self._read, handle, blocks)
                for block, payload in zip(blocks, payloads, strict=True):
                    if not self._cache.put(digests[block], payload):
                        return
        finally:
            self._writing_back -= 1

    async def save(
        self,
        handle: KvHandle,
        digests: Sequence[bytes],
        wanted: Sequence[bool],
        blocks: range,
    ) -> int:
        """Save the `blocks` of the chain that are `wanted`, in slices of COPY_BYTES. All of them must be final.

        Returns the index of the first wanted block that is not stored, or the end of `blocks`. Returns or raises, also
        when cancelled, only after the last read has ended.
        """
        for run in _slices([block for block in blocks if wanted[block]], self._copy):
            if self._stopped:
                return run.start
            payloads = await _in_thread(self._read, handle, run)
            saved = await self._cache.save(digests[run.start : run.stop], payloads)
            if saved < len(run):
                return run.start + saved
        return blocks.stop

    def _should_continue(self, should_continue: Callable[[], bool]) -> bool:
        return should_continue() and not self._stopped

    def _fetch(self, digests: Sequence[bytes], blocks: range) -> asyncio.Task[list[Payload]] | None:
        if not blocks:
            return None
        return asyncio.ensure_future(self._cache.fetch(digests[blocks.start : blocks.stop][: self._slice]))

    def _write(
        self, handle: KvHandle, block: int, payloads: Sequence[Payload], should_continue: Callable[[], bool]
    ) -> None:
        for start in range(0, len(payloads), self._copy):
            if not self._should_continue(should_continue):
                return
            token = (block + start) * self._format.block_size
            self._engine.write_blocks(handle, token, payloads[start : start + self._copy])

    def _read(self, handle: KvHandle, blocks: range) -> list[bytes]:
        return self._engine.read_blocks(handle, blocks.start * self._format.block_size, len(blocks))


async def _in_thread(copy: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a copy in a thread. Returns or raises, also when cancelled, only after the copy has ended."""
    copying = executors.run(COPIES, copy, *args, **kwargs)
    await wait_to_end(copying)
    return copying.result()


def _slices(blocks: Sequence[int], max_blocks: int) -> list[range]:
    """Group ascending numbers into runs of consecutive ones, each of at most `max_blocks`."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block and len(runs[-1]) < max_blocks:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


POOL = "pool"


class CacheAdmin:
    """The cache tiers for the Admin service: the engine's cached pages, and the tiers of `cache`."""

    def __init__(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine = engine
        self._cache = cache
        self._page_bytes = engine.spec.page_size * engine.spec.kv_format.token_bytes
        self._hits = self._misses = 0

    def record_lookup(self, hits: int, blocks: int) -> None:
        """Count a prompt whose pages were reserved: `hits` of its `blocks` full blocks were cached in pages."""
        self._hits += hits
        self._misses += blocks - hits
        metrics.PREFIX_BLOCKS.labels(POOL, "hit").inc(hits)
        metrics.PREFIX_BLOCKS.labels(POOL, "miss").inc(blocks - hits)

    async def list_tiers(self) -> list[CacheTier]:
        """All tiers with their statistics, nearest first."""
        stats = self._engine.stats()
        pool = self._pool(stats.cached)
        pool = replace(pool, capacity_bytes=stats.total * self._page_bytes, hits=self._hits, misses=self._misses)
        return [pool, *await self._cache.stats()]

    async def clear(self, shared: bool) -> list[CacheTier]:
        """Drop all cached blocks, in Redis too if `shared`; returns the tiers with the dropped blocks and bytes."""
        pages = await executors.run(WORK, self._engine.drop_cached)
        return [self._pool(pages), *await self._cache.clear(shared=shared)]

    def _pool(self, pages: int) -> CacheTier:
        spec = self._engine.spec
        blocks = pages * spec.page_size // spec.kv_format.block_size
        return CacheTier(POOL, blocks, pages * self._page_bytes)
