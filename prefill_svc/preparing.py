"""From admission to READY: a job's prefix is named and looked for, its pages are taken, cached blocks loaded.

    begin ── digests, pool and cache asked ── pages taken (pool hits are in them), export opened ── load ── ready
             └ at once without a cache, else a task                                                └ a task, if need be

The pool is asked twice: at the look-up, so that the cache is asked only for the rest, and at the taking of pages,
which alone counts. What it lost in between is looked up again. Only what is quicker to fetch than to compute is
loaded (`baton.kv.prefix.worth`). A job whose prefix another is computing at the moment waits for that one instead of
computing the same beside it.

`grant` runs whenever a job may have become able to take pages; it never waits.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.engine.contract import Engine, KvHandle
from baton.errors import BatonError, EngineError, OutOfPages
from baton.kv.prefix import PrefixCache
from baton.kv.prefix.contract import FetchRate, Hits
from baton.kv.prefix.worth import Worth
from baton.telemetry import metrics
from baton.transfer.exports import Exports
from baton.worker.blocks import LONG_TOKENS, Blocks
from baton.worker.caches import POOL, Caches
from prefill_svc.beside import Beside
from prefill_svc.job import Job, SharedPages, by_tier
from prefill_svc.peers import Peers
from prefill_svc.plan import PEER, Run, as_hits, cached_runs, common_blocks, leading, with_peer
from prefill_svc.scheduler import Scheduler, Work

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where cached KV beside the engine's pages is, and the report of how all tiers fare."""

    cache: PrefixCache
    report: Caches
    peers: Peers


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What the worker does about a job: `ready` may be computed, `ended` ends it, `freed` has lost its pages, and
    `closed` its export."""

    ready: Callable[[Job], object]
    ended: Callable[[Job, BatonError], object]
    freed: Callable[[Job], object]
    closed: Callable[[Job], None]


class Preparing:
    """Prepares one worker's `jobs`; those with pages are `holders`. Lives on the asyncio loop."""

    def __init__(
        self,
        engine: Engine,
        tiers: Tiers,
        exports: Exports,
        scheduler: Scheduler,
        beside: Beside,
        jobs: Mapping[Work, Job],
        outcomes: Outcomes,
    ) -> None:
        self._engine = engine
        self._cache, self._report, self._peers = tiers.cache, tiers.report, tiers.peers
        self._exports = exports
        self._scheduler = scheduler
        self._beside = beside
        self._jobs = jobs
        self._outcomes = outcomes
        self._block = engine.spec.kv_format.block_size
        self._unit = math.lcm(engine.spec.page_size, self._block)
        self._block_bytes = engine.spec.kv_format.block_bytes
        self._worth = Worth(self._block_bytes, self._block)
        self._closing = False
        self.blocks = Blocks(engine, tiers.cache)
        self.holders: dict[Job, None] = {}

    def close(self) -> None:
        """Give no more pages, and end loads soon."""
        self._closing = True
        self.blocks.stop()

    def begin(self, job: Job) -> None:
        """Prepare a job that was just admitted."""
        task = job.task
        if (task.reads and self._cache.stores) or (task.uses_cache and len(job.ids) >= LONG_TOKENS):
            job.preparing = self._beside.spawn(job, self._look_up)
            return
        if task.uses_cache:
            job.digests = self.blocks.digests(job.ids, task.cache_salt)
            self._ask_pool(job)
        self._looked_up(job)

    def grant(self) -> None:
        """Give pages to the jobs whose turn it is, and load or ready them."""
        if self._closing:
            return
        for work in self._scheduler.grant(time.monotonic(), self._take_pages, self._later):
            job = self._jobs[work]
            if job.error is not None:
                self._outcomes.ended(job, job.error)
            elif job.pages is not None and (job.plan or self._shrunk(job)):
                job.preparing = self._beside.spawn(job, self._load, job.pages)
            else:
                self._ready(job)

    def publish(self, job: Job) -> None:
        """Let others use the job's blocks as far as they are final."""
        if job.pages is not None and job.task.cache.writes:
            self._engine.publish(job.pages.handle, job.digests[: job.computed // self._block])

    # The look-up.

    async def _look_up(self, job: Job) -> None:
        job.digests = await self.blocks.names(job.ids, job.task.cache_salt)
        self._ask_pool(job)
        if job.task.reads:
            await self._ask_cache(job)
        if not job.over:
            self._looked_up(job)

    def _ask_pool(self, job: Job) -> None:
        if job.task.reads:
            job.sought = self._engine.held(job.digests[: self._useful(job)]) // self._block

    async def _ask_cache(self, job: Job) -> None:
        wanted = job.digests[job.sought : self._useful(job)]
        job.hits = await self._cache.lookup(wanted) if wanted and self._cache.stores else Hits()

    def _looked_up(self, job: Job) -> None:
        runs = self._runs(job, job.sought)
        self._scheduler.looked_up(job.work, self._tokens(job, runs[-1].blocks.stop if runs else job.sought))
        self.grant()

    def _useful(self, job: Job) -> int:
        """Blocks that spare computing: all, or all but one of a single token, since the last token is computed."""
        return min(len(job.digests), -(-(len(job.ids) - 1) // self._block))

    def _tokens(self, job: Job, blocks: int) -> int:
        """Tokens that so many leading blocks spare."""
        return min(blocks * self._block, len(job.ids) - 1)

    # Pages.

    def _take_pages(self, work: Work) -> bool:
        """Reserve all pages of a job and open its export; what refuses the export is left in `job.error`."""
        job = self._jobs[work]
        prefix = job.digests if job.task.reads else ()
        try:
            handle = self._engine.reserve(job.task.name, len(job.ids), prefix, len(job.ids) - 1)
        except OutOfPages:
            return False
        job.pages = SharedPages(handle, lambda: self._free(job, handle))
        self.holders[job] = None
        if job.task.reads:
            self._in_pages(job, handle.cached)
        if job.task.transfer_id:
            try:
                job.export = self._exports.open(
                    job.task.transfer_id, handle, len(job.ids), on_closed=lambda: self._outcomes.closed(job)
                )
                job.pages.share()
            except BatonError as error:
                job.error = error
        return True

    def _free(self, job: Job, handle: KvHandle) -> None:
        """All owners are gone; what waits for pages may get them now."""
        self._engine.free(handle)
        del self.holders[job]
        self.grant()
        self._outcomes.freed(job)

    def _later(self, work: Work) -> bool:
        """Whether another job is about to compute, and to publish, at least half of what is left of this one.

        Of one that comes later by more than that would spare, only the chunk in progress counts: a short job does not
        wait for a long one.
        """
        job = self._jobs[work]
        if not job.task.reads:
            return False
        unit, rank, now = self._unit, self._scheduler.rank, time.monotonic()
        for other in self.holders:
            if other.over or other.error is not None or not other.task.cache.writes:
                continue
            shared = common_blocks(job.digests, other.digests) * self._block
            common = min(shared, len(other.ids) // unit * unit)
            if rank(other.work, now) - rank(work, now) > common - work.done:
                common = min(common, other.computing // unit * unit)
            spared = min(common, len(job.ids) - 1) - work.done
            if other.computed < -(-common // unit) * unit and 2 * spared >= work.left:
                return True
        return False

    # What is loaded, and from where.

    def _in_pages(self, job: Job, tokens: int) -> None:
        """So many leading tokens came with the pages."""
        if tokens:
            job.sources.append((POOL, tokens))
        blocks = -(-tokens // self._block)
        self._report.reserved(blocks, self._useful(job))
        self._cache.touch(job.digests[:blocks])
        if self._shrunk(job):
            self._scheduler.expects(job.work, tokens)
        else:
            self._decide(job)

    def _have(self, job: Job) -> int:
        """Leading blocks that came with the pages; all of use if they end within one, which can't be loaded."""
        tokens = sum(tokens for _, tokens in job.sources)
        return self._useful(job) if tokens % self._block or job.found == len(job.ids) - 1 else tokens // self._block

    def _shrunk(self, job: Job) -> bool:
        """Whether the pool lost blocks since the look-up that the cache may have."""
        return self._have(job) < job.sought and self._cache.stores

    def _runs(self, job: Job, have: int) -> list[Run]:
        runs = cached_runs(job.hits, job.sought, have)
        source = job.task.source
        if source is None or not job.task.reads:
            return runs
        held = min(source.tokens // self._block, self._useful(job))
        return with_peer(runs, have, held, self._rates(), self._block_bytes)

    def _rates(self) -> Mapping[str, FetchRate]:
        rate = self._peers.rate
        return self._cache.rates() if rate is None else {**self._cache.rates(), PEER: rate}

    def _decide(self, job: Job) -> None:
        """Set what is loaded of what is there, and tell the scheduler."""
        have = self._have(job)
        runs = self._runs(job, have)
        if runs or self._cache.stores:
            rate = self._scheduler.rate.value
            decision = self._worth.decide(as_hits(runs), self._rates(), rate, time.monotonic())
            metrics.PREFIX_DECISIONS.labels(decision.name).inc()
            _log.debug("%s: of %s after %d blocks: %s", job.task.name, runs, have, decision)
            runs = leading(runs, decision.blocks)
        job.plan = runs
        self._scheduler.expects(job.work, self._tokens(job, runs[-1].blocks.stop) if runs else job.found)

    async def _load(self, job: Job) -> None:
        if self._shrunk(job):
            job.sought = self._have(job)
            await self._ask_cache(job)
            self._decide(job)
        at = self._have(job)
        for peers, group in itertools.groupby(job.plan, lambda run: run.tier == PEER):
            runs = list(group)
            begun, stop = at, runs[-1].blocks.stop
            if peers:
                at = await self._load_from_peer(job, range(at, stop))
            elif at == runs[0].blocks.start:
                at = await self._load_from_cache(job, range(at, stop))
            for run in runs:
                if (got := min(at, run.blocks.stop) - begun) > 0:
                    job.sources.append((run.tier, got * self._block))
                    begun += got
        if not job.over:
            self._ready(job)

    async def _load_from_cache(self, job: Job, blocks: range) -> int:
        return await self.blocks.load(
            _handle(job), job.digests, blocks, lambda: not job.over, lambda end: self._advance(job, end * self._block)
        )

    async def _load_from_peer(self, job: Job, blocks: range) -> int:
        source = job.task.source
        tokens = range(blocks.start * self._block, blocks.stop * self._block)
        if job.over or source is None or not tokens:
            return blocks.start
        # A prefix that is said to be longer than the prompt is no prefix of it.
        last = source.tokens // self._block - 1
        digest = job.digests[last] if last < len(job.digests) else b"\0"
        return blocks.stop if await self._peers.fetch(_handle(job), source, tokens, digest) else blocks.start

    def _advance(self, job: Job, tokens: int) -> None:
        """The first `tokens` are in place, but for the last, which is written again when it is computed."""
        if job.export is not None:
            for layer in range(self._engine.spec.kv_format.layers):
                job.export.advance(layer, min(tokens, len(job.ids) - 1))

    def _ready(self, job: Job) -> None:
        """The job's cached blocks are in its pages; it may be computed."""
        job.computed = job.found
        self._scheduler.ready(job.work, job.computed)
        for tier, tokens in by_tier(job.sources, job.found).items():
            metrics.PREFILL_TOKENS.labels(tier).inc(tokens)
        if job.computed:
            self._advance(job, job.computed)
            self.publish(job)
        job.tell(job.progress())
        self._outcomes.ready(job)


def _handle(job: Job) -> KvHandle:
    if job.pages is None:
        raise EngineError(f"{job.task.name} has no pages")
    return job.pages.handle
