"""The cache tiers of a worker, as an operator sees them: its own pages first, then the other tiers."""

from __future__ import annotations

from dataclasses import replace

from baton import executors
from baton.cache_report import CacheTier
from baton.engine.contract import Engine
from baton.executors import WORK
from baton.kv.prefix import PrefixCache
from baton.telemetry import metrics

POOL = "pool"


class CacheTiers:
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
