"""The cached prefix of a job: hashed, looked up, planned, loaded into its pages, published, written back.

    look_up    ── digests; blocks in the pool; blocks in the cache       before the job has pages
    plan_load  ── blocks that came with the pages; hits to load          when its pages are allocated
    load       ── blocks of the cache, or of a decode worker, into the pages
    publish    ── after the load and after each chunk: others may share the blocks that are final
    save       ── after each chunk of a long prompt: its blocks go to the shared store (`prefill_svc.saver`)
    write_back ── new blocks go to the cache, after the job's caller has its answer

The pool is asked twice. At the look-up, so that the cache is asked only for the other blocks; and when pages are
allocated, which is the answer that counts. Blocks that the pool has lost in between are looked up again. A block is
loaded only if fetching it is faster than computing it (`baton.kv.prefix.fetch_cost`). At least one token is always
computed: the one from which the next token is sampled.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.engine.contract import Engine
from baton.errors import EngineError
from baton.kv.cached_blocks import SLICE_NODES
from baton.kv.prefix import PrefixCache
from baton.kv.prefix.contract import FetchRate, Hits
from baton.kv.prefix.fetch_cost import FetchCostModel
from baton.telemetry import metrics
from baton.worker.block_copier import BlockCopier
from baton.worker.cache_tiers import POOL, CacheTiers
from prefill_svc.job import PrefillJob
from prefill_svc.load_plan import PEER, TierRun, add_peer, cached_runs, common_blocks, to_hits, truncate
from prefill_svc.peers import PeerFetcher
from prefill_svc.saver import ChunkSaver

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixBackends:
    """The sources of cached KV other than the engine's pages, and the statistics of all tiers."""

    cache: PrefixCache
    cache_tiers: CacheTiers
    peers: PeerFetcher


class PrefixLoader:
    """Finds and loads the cached blocks of one worker's jobs; used on the asyncio loop only.

    `prefill_rate` returns the tokens per second that the worker computes, 0 while unknown. Prompts of at least
    `long_chunks` chunks are saved while they are computed; 0: none.
    """

    def __init__(
        self, engine: Engine, backends: PrefixBackends, prefill_rate: Callable[[], float], long_chunks: int
    ) -> None:
        self._engine = engine
        self._cache, self._report, self._peers = backends.cache, backends.cache_tiers, backends.peers
        self._prefill_rate = prefill_rate
        self._block = engine.spec.kv_format.block_size
        self._unit = math.lcm(engine.spec.page_size, self._block)
        self._block_bytes = engine.spec.kv_format.block_bytes
        self._layers = engine.spec.kv_format.layers
        self._fetch_cost = FetchCostModel(self._block_bytes, self._block)
        self._blocks = BlockCopier(engine, backends.cache)
        self._saver = ChunkSaver(backends.cache, self._blocks, self._block, long_chunks)

    def stop(self) -> None:
        """End loads and write-backs soon."""
        self._blocks.stop()

    async def look_up(self, job: PrefillJob) -> None:
        """Hash the job's blocks, and find out which of them are in the pool and in the cache."""
        task = job.task
        if not task.uses_cache:
            return
        job.digests = await self._blocks.hash_blocks(job.ids, task.cache_salt)
        if task.reads:
            job.looked_up_from = self._engine.match_prefix(job.digests[: self._useful_blocks(job)]) // self._block
            await self._search(job)

    def estimate_cached_tokens(self, job: PrefillJob) -> int:
        """Leading tokens that will probably be cached, judging from the look-up."""
        runs = self._runs(job, job.looked_up_from)
        return self._useful_tokens(job, runs[-1].blocks.stop if runs else job.looked_up_from)

    def evict(self, job: PrefillJob) -> bool:
        """Evict a slice of the cached blocks that the job's pages replace; False if only the last slice is left."""
        new_tokens = len(job.ids) - job.looked_up_from * self._block
        if self._engine.spec.pages_for(new_tokens) <= SLICE_NODES:
            return False
        return self._engine.evict_for(len(job.ids), job.readable, len(job.ids) - 1)

    def plan_load(self, job: PrefillJob) -> None:
        """Count the blocks that came with the job's pages, and decide which of the hits to load."""
        if not job.task.reads:
            return
        tokens = job.pages.cached
        if tokens:
            job.sources.append((POOL, tokens))
        blocks = -(-tokens // self._block)
        self._report.record_lookup(blocks, self._useful_blocks(job))
        self._cache.touch(job.digests[:blocks])
        if not self.has_lost_blocks(job):
            self._decide(job)

    def has_lost_blocks(self, job: PrefillJob) -> bool:
        """Whether the pool has lost blocks since the look-up that the cache may have."""
        return self._blocks_in_pages(job) < job.looked_up_from and self._cache.enabled

    async def look_up_again(self, job: PrefillJob) -> None:
        """Look up the blocks that the pool has lost, and plan again."""
        job.looked_up_from = self._blocks_in_pages(job)
        await self._search(job)
        self._decide(job)

    def planned_tokens(self, job: PrefillJob) -> int:
        """Leading tokens that are in the pages or planned to be loaded."""
        return self._useful_tokens(job, job.load_plan[-1].blocks.stop) if job.load_plan else job.cached_tokens

    async def load(self, job: PrefillJob) -> None:
        """Load the planned blocks into the pages; blocks that can't be loaded will be computed."""
        at = self._blocks_in_pages(job)
        for from_peer, group in itertools.groupby(job.load_plan, lambda run: run.tier == PEER):
            runs = list(group)
            start, stop = at, runs[-1].blocks.stop
            if from_peer:
                at = await self._load_from_peer(job, range(at, stop))
            elif at == runs[0].blocks.start:
                at = await self._load_from_cache(job, range(at, stop))
            for run in runs:
                if (got := min(at, run.blocks.stop) - start) > 0:
                    job.sources.append((run.tier, got * self._block))
                    start += got

    def publish(self, job: PrefillJob) -> None:
        """Publish the job's final blocks, so that others can share them."""
        if job.handle is not None and job.task.cache.writes:
            self._engine.publish(job.handle, job.digests[: job.computed // self._block])

    async def publish_loaded(self, job: PrefillJob) -> None:
        """The same after a load, in slices."""
        if job.task.cache.writes:
            await self._blocks.publish(job.pages, job.digests[: job.computed // self._block])

    async def save(self, job: PrefillJob) -> None:
        """Save the final blocks of a long prompt beside its next chunk; waits a while for those of the chunk before."""
        await self._saver.save(job)

    async def write_back(self, job: PrefillJob) -> None:
        """Put the job's new blocks into the cache; the caller must keep its pages meanwhile."""
        await self._saver.finish(job)
        if job.task.cache.writes and job.saved < len(job.digests):
            hits = job.cached_tokens // self._block
            await self._blocks.write_back(job.pages, job.digests, hits, lambda: True, least=job.saved)

    async def give_up(self, job: PrefillJob) -> None:
        """End the save of a job that failed. If its KV may be wrong, remove what was saved."""
        await self._saver.stop(job)
        if isinstance(job.error, EngineError):
            await self._saver.remove(job)

    def advance(self, job: PrefillJob, tokens: int) -> None:
        """Tell the export that the first `tokens` are final, except the last one, which is computed again."""
        if job.export is not None:
            for layer in range(self._layers):
                job.export.advance(layer, min(tokens, len(job.ids) - 1))

    def should_defer(self, job: PrefillJob, other: PrefillJob, behind: float) -> bool:
        """Whether `other` is about to compute and publish at least half of the tokens that `job` still needs.

        `behind` is by how many tokens the other ranks behind the job. If that is more than the job would save, only the
        chunk that the other computes now counts: a short job does not wait for a long one.
        """
        if not (job.task.reads and other.task.cache.writes):
            return False
        done, unit = job.prompt.done, self._unit
        common = min(common_blocks(job.digests, other.digests) * self._block, len(other.ids) // unit * unit)
        if behind > common - done:
            common = min(common, other.computing_end // unit * unit)
        saved = min(common, len(job.ids) - 1) - done
        return other.computed < -(-common // unit) * unit and 2 * saved >= job.prompt.remaining

    async def _search(self, job: PrefillJob) -> None:
        wanted = job.digests[job.looked_up_from : self._useful_blocks(job)]
        job.hits = await self._cache.lookup(wanted) if wanted and self._cache.enabled else Hits()

    def _useful_blocks(self, job: PrefillJob) -> int:
        """Blocks worth loading. The last token is always computed, so a block with only that token is not."""
        return min(len(job.digests), -(-(len(job.ids) - 1) // self._block))

    def _useful_tokens(self, job: PrefillJob, blocks: int) -> int:
        """Tokens that need not be computed if this many leading blocks are loaded."""
        return min(blocks * self._block, len(job.ids) - 1)

    def _blocks_in_pages(self, job: PrefillJob) -> int:
        """Leading blocks that came with the pages; all useful ones if the cached tokens end within a block.

        The rest of such a block can't be loaded.
        """
        tokens = sum(tokens for _, tokens in job.sources)
        whole = tokens % self._block or job.cached_tokens == len(job.ids) - 1
        return self._useful_blocks(job) if whole else tokens // self._block

    def _runs(self, job: PrefillJob, have: int) -> list[TierRun]:
        runs = cached_runs(job.hits, job.looked_up_from, have)
        source = job.task.source
        if source is None or not job.task.reads:
            return runs
        peer_blocks = min(source.tokens // self._block, self._useful_blocks(job))
        return add_peer(runs, have, peer_blocks, self._rates(), self._block_bytes)

    def _rates(self) -> Mapping[str, FetchRate]:
        rate = self._peers.rate
        return self._cache.fetch_rates() if rate is None else {**self._cache.fetch_rates(), PEER: rate}

    def _decide(self, job: PrefillJob) -> None:
        """Plan to load those hits that are worth it."""
        have = self._blocks_in_pages(job)
        runs = self._runs(job, have)
        if runs or self._cache.enabled:
            decision = self._fetch_cost.decide(to_hits(runs), self._rates(), self._prefill_rate(), time.monotonic())
            metrics.PREFIX_DECISIONS.labels(decision.name).inc()
            _log.debug("%s: of %s after %d blocks: %s", job.task.name, runs, have, decision)
            runs = truncate(runs, decision.blocks)
        job.load_plan = runs

    async def _load_from_cache(self, job: PrefillJob, blocks: range) -> int:
        return await self._blocks.load(
            job.pages, job.digests, blocks, job.is_active, lambda end: self.advance(job, end * self._block)
        )

    async def _load_from_peer(self, job: PrefillJob, blocks: range) -> int:
        source = job.task.source
        tokens = range(blocks.start * self._block, blocks.stop * self._block)
        if source is None or not tokens:
            return blocks.start
        # A source that claims to have more than the prompt has no prefix of it.
        last = source.tokens // self._block - 1
        digest = job.digests[last] if last < len(job.digests) else b"\0"
        return blocks.stop if await self._peers.fetch(job.pages, source, tokens, digest) else blocks.start
