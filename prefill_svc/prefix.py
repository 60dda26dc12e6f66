"""The cached prefix of a job: named, looked up, planned, loaded into its pages, published, written back.

    look_up ── digests; blocks in the pool; blocks in the cache          before the job has pages
    plan    ── what came with the pages; which of the hits are loaded    when its pages are allocated
    load    ── cached blocks, or a decode worker's, into the pages
    publish ── after the load and after each chunk: others may share the blocks that are final
    write_back ── new blocks go to the cache, after the job's caller has its answer

The pool is asked twice: at the look-up, so that the cache is asked only for the rest, and when pages are allocated,
which alone counts. What it lost in between is looked up again. Only what is quicker to fetch than to compute is
loaded (`baton.kv.prefix.fetch_cost`). At least one token is always computed: the one whose logits choose the next.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.engine.contract import Engine
from baton.kv.prefix import PrefixCache
from baton.kv.prefix.contract import FetchRate, Hits
from baton.kv.prefix.fetch_cost import FetchCostModel
from baton.telemetry import metrics
from baton.worker.blocks import Blocks
from baton.worker.caches import POOL, Caches
from prefill_svc.job import Job
from prefill_svc.peers import Peers
from prefill_svc.plan import PEER, Run, as_hits, cached_runs, common_blocks, leading, with_peer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where cached KV beside the engine's pages is, and the report of how all tiers fare."""

    cache: PrefixCache
    report: Caches
    peers: Peers


class PrefixLoader:
    """Finds and moves the cached blocks of one worker's jobs; lives on the asyncio loop.

    `prefill_rate` tells the tokens per second that the worker computes, 0 while unknown.
    """

    def __init__(self, engine: Engine, tiers: Tiers, prefill_rate: Callable[[], float]) -> None:
        self._engine = engine
        self._cache, self._report, self._peers = tiers.cache, tiers.report, tiers.peers
        self._prefill_rate = prefill_rate
        self._block = engine.spec.kv_format.block_size
        self._unit = math.lcm(engine.spec.page_size, self._block)
        self._block_bytes = engine.spec.kv_format.block_bytes
        self._layers = engine.spec.kv_format.layers
        self._fetch_cost = FetchCostModel(self._block_bytes, self._block)
        self._blocks = Blocks(engine, tiers.cache)

    def stop(self) -> None:
        """End loads and write-backs soon."""
        self._blocks.stop()

    async def look_up(self, job: Job) -> None:
        """Name the job's blocks, and find out which of them are in the pool and in the cache."""
        task = job.task
        if not task.uses_cache:
            return
        job.digests = await self._blocks.names(job.ids, task.cache_salt)
        if task.reads:
            job.searched_from = self._engine.match_prefix(job.digests[: self._useful(job)]) // self._block
            await self._search(job)

    def expected_at_look_up(self, job: Job) -> int:
        """Leading tokens that the look-up leads to expect."""
        runs = self._runs(job, job.searched_from)
        return self._tokens(job, runs[-1].blocks.stop if runs else job.searched_from)

    def plan(self, job: Job) -> None:
        """Take what came with the job's pages, and decide what of the hits is loaded."""
        if not job.task.reads:
            return
        tokens = job.pages.cached
        if tokens:
            job.sources.append((POOL, tokens))
        blocks = -(-tokens // self._block)
        self._report.reserved(blocks, self._useful(job))
        self._cache.touch(job.digests[:blocks])
        if not self.lost_blocks(job):
            self._decide(job)

    def lost_blocks(self, job: Job) -> bool:
        """Whether the pool lost blocks since the look-up that the cache may have."""
        return self._in_pages(job) < job.searched_from and self._cache.stores

    async def look_up_again(self, job: Job) -> None:
        """Ask the cache for what the pool lost, and decide anew."""
        job.searched_from = self._in_pages(job)
        await self._search(job)
        self._decide(job)

    def expected(self, job: Job) -> int:
        """Leading tokens that are in the pages, or are about to be loaded."""
        return self._tokens(job, job.plan[-1].blocks.stop) if job.plan else job.found

    async def load(self, job: Job) -> None:
        """Bring the planned blocks into the pages; what can't be had is computed."""
        at = self._in_pages(job)
        for from_peer, group in itertools.groupby(job.plan, lambda run: run.tier == PEER):
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

    def publish(self, job: Job) -> None:
        """Let others share the job's blocks as far as they are final."""
        if job.handle is not None and job.task.cache.writes:
            self._engine.publish(job.handle, job.digests[: job.computed // self._block])

    async def write_back(self, job: Job) -> None:
        """Put the job's new blocks into the cache; its pages must stay meanwhile."""
        if job.task.cache.writes:
            await self._blocks.write_back(job.pages, job.digests, job.found // self._block, lambda: True)

    def advance(self, job: Job, tokens: int) -> None:
        """Export the first `tokens`, but for the last, which is written again when it is computed."""
        if job.export is not None:
            for layer in range(self._layers):
                job.export.advance(layer, min(tokens, len(job.ids) - 1))

    def defers(self, job: Job, other: Job, later: float) -> bool:
        """Whether `other` is about to compute, and to publish, at least half of what is left of `job`.

        `later` is by how many tokens the other is ranked behind the job. If that is more than would be spared, only its
        chunk in progress counts: a short job does not wait for a long one.
        """
        if not (job.task.reads and other.task.cache.writes):
            return False
        done, unit = job.entry.done, self._unit
        common = min(common_blocks(job.digests, other.digests) * self._block, len(other.ids) // unit * unit)
        if later > common - done:
            common = min(common, other.computing // unit * unit)
        spared = min(common, len(job.ids) - 1) - done
        return other.computed < -(-common // unit) * unit and 2 * spared >= job.entry.left

    async def _search(self, job: Job) -> None:
        wanted = job.digests[job.searched_from : self._useful(job)]
        job.hits = await self._cache.lookup(wanted) if wanted and self._cache.stores else Hits()

    def _useful(self, job: Job) -> int:
        """Blocks that spare computing: all, or all but one of a single token, since the last token is computed."""
        return min(len(job.digests), -(-(len(job.ids) - 1) // self._block))

    def _tokens(self, job: Job, blocks: int) -> int:
        """Tokens that so many leading blocks spare."""
        return min(blocks * self._block, len(job.ids) - 1)

    def _in_pages(self, job: Job) -> int:
        """Leading blocks that came with the pages; all of use if they end within one, which can't be loaded."""
        tokens = sum(tokens for _, tokens in job.sources)
        whole = tokens % self._block or job.found == len(job.ids) - 1
        return self._useful(job) if whole else tokens // self._block

    def _runs(self, job: Job, have: int) -> list[Run]:
        runs = cached_runs(job.hits, job.searched_from, have)
        source = job.task.source
        if source is None or not job.task.reads:
            return runs
        held = min(source.tokens // self._block, self._useful(job))
        return with_peer(runs, have, held, self._rates(), self._block_bytes)

    def _rates(self) -> Mapping[str, FetchRate]:
        rate = self._peers.rate
        return self._cache.rates() if rate is None else {**self._cache.rates(), PEER: rate}

    def _decide(self, job: Job) -> None:
        """Plan to load what of the hits is worth it."""
        have = self._in_pages(job)
        runs = self._runs(job, have)
        if runs or self._cache.stores:
            decision = self._fetch_cost.decide(as_hits(runs), self._rates(), self._prefill_rate(), time.monotonic())
            metrics.PREFIX_DECISIONS.labels(decision.name).inc()
            _log.debug("%s: of %s after %d blocks: %s", job.task.name, runs, have, decision)
            runs = leading(runs, decision.blocks)
        job.plan = runs

    async def _load_from_cache(self, job: Job, blocks: range) -> int:
        return await self._blocks.load(
            job.pages, job.digests, blocks, job.goes_on, lambda end: self.advance(job, end * self._block)
        )

    async def _load_from_peer(self, job: Job, blocks: range) -> int:
        source = job.task.source
        tokens = range(blocks.start * self._block, blocks.stop * self._block)
        if source is None or not tokens:
            return blocks.start
        # A prefix that is said to be longer than the prompt is no prefix of it.
        last = source.tokens // self._block - 1
        digest = job.digests[last] if last < len(job.digests) else b"\0"
        return blocks.stop if await self._peers.fetch(job.pages, source, tokens, digest) else blocks.start
