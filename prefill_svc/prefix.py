"""The cached prefix of a job: hashed, looked up, planned, loaded into its pages, published, written back.

    look_up    ── digests; blocks in the pool; blocks in the cache       before the job has pages
    plan_load  ── blocks that came with the pages; hits to load          when its pages are allocated
    load       ── blocks of the cache, or of a decode worker, into the pages
    publish    ── after the load and after each chunk: others may share the blocks that are final
    save       ── after each chunk of a long prompt: its blocks go to the shared store (`LongPromptSaver`)
    write_back ── new blocks go to the cache, after the job's caller has its answer

The pool is asked twice: at the look-up, so that the cache is asked only for the other blocks, and when pages are
allocated. The second answer counts; blocks that the pool has lost in between are looked up again. A block is loaded
only if fetching it is faster than computing it (`baton.kv.prefix.fetch_cost`). The last token is always computed,
because the next token is sampled from it.

A plan is a list of consecutive runs of blocks, each loaded from one tier. The first run begins at the end of the pool's
hits.

    pool │ host │ redis │ peer │ computed
    have ▲      the cache's hits      ▲ the peer's, after the end of the cache's hits, or earlier if it is faster

Long prompts are saved while they are computed: if this worker dies, another one resumes from the saved blocks.

    after chunk n ── wait for the save of chunk n - 1, at most SAVE_WAIT_S ── begin to save chunk n

So the death of a worker loses at most the chunk that it computes, the chunk before, and blocks that wait for a slow
store. A save that takes longer than the wait goes on, and later chunks are saved after it. If a save fails, the next
one begins at the first block that is not stored. While the store can't be reached, saves fail at once, so no chunk
waits. If the store has lost blocks before the first chunk, they are saved too, because no worker finds a block without
all blocks before it.

A prompt is long if it needs at least `long_chunks` chunks. A chunk takes about half a second of computing
(`prefill_svc.scheduler.chunk_size`), so short prompts, which lose little, never wait. The job does not have the engine
while it waits; other prompts are computed. On a mixed worker no job waits, because the engine goes on with its prompt
anyway. Saves do not pass through the queue of other writes.

A decode worker that has the prefix is one more tier (`PeerFetcher`). If a fetch fails, the tokens are computed.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError, TransferError
from baton.kv.cached_blocks import SLICE_NODES
from baton.kv.prefix.contract import FetchRate, Hits, PrefixCache
from baton.kv.prefix.fetch_cost import FetchCostModel
from baton.process.executors import wait_to_end
from baton.rates import DecayingRate
from baton.request import PrefixSource
from baton.rpc.tls import Tls
from baton.telemetry import metrics
from baton.telemetry.logs import about
from baton.transfer.fetcher import ExportFetcher
from baton.worker.prefix_cache import POOL, BlockCopier
from baton.worker.start import WorkerParts
from prefill_svc.job import PrefillJob, TierRun

_log = logging.getLogger(__name__)


class PrefixLoader:
    """Finds and loads the cached blocks of one worker's jobs; used on the asyncio loop only.

    `peers` fetches them from decode workers. `prefill_rate` returns the number of tokens per second that the worker
    computes, or 0 while it is unknown. Prompts of at least `long_chunks` chunks are saved while they are computed; if
    it is 0, no prompt is.
    """

    def __init__(
        self, parts: WorkerParts, peers: PeerFetcher, prefill_rate: Callable[[], float], long_chunks: int
    ) -> None:
        self._engine = engine = parts.engine
        self._cache, self._cache_admin, self._peers = parts.cache, parts.cache_admin, peers
        self._prefill_rate = prefill_rate
        self._block_size = engine.spec.kv_format.block_size
        self._unit_tokens = math.lcm(engine.spec.page_size, self._block_size)
        self._block_bytes = engine.spec.kv_format.block_bytes
        self._layers = engine.spec.kv_format.layers
        self._fetch_cost = FetchCostModel(self._block_bytes, self._block_size)
        self._blocks = BlockCopier(engine, parts.cache)
        self._saver = LongPromptSaver(parts.cache, self._blocks, self._block_size, long_chunks)

    def stop(self) -> None:
        """End loads and write-backs soon."""
        self._blocks.stop()

    async def look_up(self, job: PrefillJob) -> None:
        """Hash the job's blocks, and find out which of them are in the pool and in the cache."""
        request = job.request
        if not request.uses_cache:
            return
        job.prefix.digests = await self._blocks.hash_blocks(job.token_ids, request.cache_salt)
        if request.reads:
            found = self._engine.match_prefix(job.prefix.digests[: self._useful_blocks(job)])
            job.prefix.looked_up_from = found // self._block_size
            await self._look_up_in_cache(job)

    def estimate_cached_tokens(self, job: PrefillJob) -> tuple[int, bool]:
        """Leading tokens that will probably be cached, judging from the look-up; whether some must be loaded."""
        runs = self._runs(job, job.prefix.looked_up_from)
        return self._useful_tokens(job, runs[-1].blocks.stop if runs else job.prefix.looked_up_from), bool(runs)

    def evict(self, job: PrefillJob) -> bool:
        """Evict a slice of the cached blocks that the job's pages replace; False if only the last slice is left."""
        new_tokens = len(job.token_ids) - job.prefix.looked_up_from * self._block_size
        if self._engine.spec.pages_for(new_tokens) <= SLICE_NODES:
            return False
        return self._engine.evict_for(len(job.token_ids), job.readable_digests, len(job.token_ids) - 1)

    def plan_load(self, job: PrefillJob) -> None:
        """Count the blocks that came with the job's pages, and decide which of the hits to load."""
        if not job.request.reads:
            return
        tokens = job.allocated_handle.cached_tokens
        if job.request.in_place:
            # Other prompts may have published blocks since its pages were reserved.
            most = len(job.token_ids) - 1
            tokens = max(tokens, self._engine.share_prefix(job.allocated_handle, job.readable_digests, most))
        if tokens:
            job.prefix.origins.append((POOL, tokens))
        blocks = -(-tokens // self._block_size)
        if not job.request.in_place:
            # Otherwise decode has counted the blocks of the reservation.
            self._cache_admin.record_lookup(blocks, self._useful_blocks(job))
        self._cache.touch(job.prefix.digests[:blocks])
        if not self.has_lost_blocks(job):
            self._plan(job)

    def has_lost_blocks(self, job: PrefillJob) -> bool:
        """Whether the pool has lost blocks since the look-up that the cache may have."""
        return self._blocks_in_pages(job) < job.prefix.looked_up_from and self._cache.enabled

    async def look_up_again(self, job: PrefillJob) -> None:
        """Look up the blocks that the pool has lost, and plan again."""
        job.prefix.looked_up_from = self._blocks_in_pages(job)
        await self._look_up_in_cache(job)
        self._plan(job)

    def planned_tokens(self, job: PrefillJob) -> int:
        """Leading tokens that are in the pages or planned to be loaded."""
        plan = job.prefix.load_plan
        return self._useful_tokens(job, plan[-1].blocks.stop) if plan else job.cached_tokens

    async def load(self, job: PrefillJob) -> None:
        """Load the planned blocks into the pages; blocks that can't be loaded will be computed."""
        at = self._blocks_in_pages(job)
        for from_peer, group in itertools.groupby(job.prefix.load_plan, lambda run: run.tier == PEER):
            runs = list(group)
            start, stop = at, runs[-1].blocks.stop
            if from_peer:
                at = await self._load_from_peer(job, range(at, stop))
            elif at == runs[0].blocks.start:
                at = await self._load_from_cache(job, range(at, stop))
            for run in runs:
                if (got := min(at, run.blocks.stop) - start) > 0:
                    job.prefix.origins.append((run.tier, got * self._block_size))
                    start += got

    def publish(self, job: PrefillJob) -> None:
        """Publish the job's final blocks, so that others can share them."""
        if job.handle is not None and job.request.cache.writes:
            self._engine.publish(job.handle, job.prefix.digests[: job.computed_tokens // self._block_size])

    async def publish_loaded(self, job: PrefillJob) -> None:
        """Publish the job's final blocks after a load, in slices between which the event loop runs."""
        if job.request.cache.writes:
            await self._blocks.publish(
                job.allocated_handle, job.prefix.digests[: job.computed_tokens // self._block_size]
            )

    async def save(self, job: PrefillJob, *, waits: bool) -> None:
        """Save the final blocks of a long prompt during its next chunk.

        If it `waits`, waits up to SAVE_WAIT_S seconds for the previous save first; otherwise awaits nothing.
        """
        await self._saver.save(job, waits=waits)

    async def write_back(self, job: PrefillJob) -> None:
        """Put the job's new blocks into the cache; the caller must keep its pages meanwhile."""
        await self._saver.finish(job)
        if job.request.cache.writes and job.prefix.saved < len(job.prefix.digests):
            hits = job.cached_tokens // self._block_size
            await self._blocks.write_back(
                job.allocated_handle, job.prefix.digests, hits, lambda: True, skip_blocks=job.prefix.saved
            )

    async def unsaved_digests(self, job: PrefillJob) -> Sequence[bytes]:
        """Finish the save of a job whose pages others own; returns the digests of its blocks if some must be copied."""
        await self._saver.finish(job)
        needed = job.request.cache.writes and self._cache.enabled and job.prefix.saved < len(job.prefix.digests)
        return job.prefix.digests if needed else ()

    async def give_up(self, job: PrefillJob) -> None:
        """Stop the save of a job that failed. Remove its saved blocks if its KV may be wrong."""
        await self._saver.stop(job)
        if isinstance(job.error, EngineError):
            await self._saver.remove(job)

    def mark_final(self, job: PrefillJob, tokens: int) -> None:
        """Tell the export that the first `tokens` tokens are final.

        The last token of the prompt is never among them: it is computed again.
        """
        if job.export is not None:
            for layer in range(self._layers):
                job.export.mark_final(layer, min(tokens, len(job.token_ids) - 1))

    def should_defer(self, job: PrefillJob, other: PrefillJob, behind: float) -> bool:
        """Whether `job` should wait for `other`, which will publish at least half of the tokens that `job` still needs.

        `behind` is the number of tokens by which `other` comes after `job` in the scheduler's order. If that is more
        than the wait would save, only tokens of the running chunk of `other` count: a short job does not wait for all
        of a long one.
        """
        if not (job.request.reads and other.request.cache.writes):
            return False
        done, unit = job.scheduled.covered_tokens, self._unit_tokens
        blocks = common_blocks(job.prefix.digests, other.prefix.digests)
        common = min(blocks * self._block_size, len(other.token_ids) // unit * unit)
        if behind > common - done:
            common = min(common, other.computing_end // unit * unit)
        if 2 * (min(common, len(job.token_ids) - 1) - done) < job.scheduled.remaining:
            return False
        return self._engine.match_prefix(job.prefix.digests[: common // self._block_size]) < common

    async def _look_up_in_cache(self, job: PrefillJob) -> None:
        wanted = job.prefix.digests[job.prefix.looked_up_from : self._useful_blocks(job)]
        job.prefix.hits = await self._cache.lookup(wanted) if wanted and self._cache.enabled else Hits()

    def _useful_blocks(self, job: PrefillJob) -> int:
        """Number of leading blocks that are worth loading: not one that has only the last token."""
        return min(len(job.prefix.digests), -(-(len(job.token_ids) - 1) // self._block_size))

    def _useful_tokens(self, job: PrefillJob, blocks: int) -> int:
        """Number of tokens that need not be computed if the first `blocks` blocks are loaded."""
        return min(blocks * self._block_size, len(job.token_ids) - 1)

    def _blocks_in_pages(self, job: PrefillJob) -> int:
        """Number of leading blocks whose KV is in the pages.

        If the cached tokens end within a block, nothing more can be loaded, and all useful blocks count.
        """
        tokens = sum(tokens for _, tokens in job.prefix.origins)
        ends_within_block = tokens % self._block_size or job.cached_tokens == len(job.token_ids) - 1
        return self._useful_blocks(job) if ends_within_block else tokens // self._block_size

    def _runs(self, job: PrefillJob, have: int) -> list[TierRun]:
        runs = cached_runs(job.prefix.hits, job.prefix.looked_up_from, have)
        source = job.request.peer_prefix
        if source is None or not job.request.reads:
            return runs
        peer_blocks = min(source.tokens // self._block_size, self._useful_blocks(job))
        return add_peer(runs, have, peer_blocks, self._rates(), self._block_bytes)

    def _rates(self) -> Mapping[str, FetchRate]:
        rate = self._peers.rate
        return self._cache.fetch_rates() if rate is None else {**self._cache.fetch_rates(), PEER: rate}

    def _plan(self, job: PrefillJob) -> None:
        """Plan to load those hits that are worth it."""
        have = self._blocks_in_pages(job)
        runs = self._runs(job, have)
        if runs or self._cache.enabled:
            decision = self._fetch_cost.decide(to_hits(runs), self._rates(), self._prefill_rate(), time.monotonic())
            metrics.PREFIX_DECISIONS.labels(decision.name).inc()
            name = job.request.name
            _log.debug("%s: of %s after %d blocks: %s", name, runs, have, decision, extra=about(name))
            runs = truncate(runs, decision.blocks)
        job.prefix.load_plan = runs

    async def _load_from_cache(self, job: PrefillJob, blocks: range) -> int:
        return await self._blocks.load(
            job.allocated_handle,
            job.prefix.digests,
            blocks,
            job.is_active,
            lambda end: self.mark_final(job, end * self._block_size),
        )

    async def _load_from_peer(self, job: PrefillJob, blocks: range) -> int:
        source = job.request.peer_prefix
        tokens = range(blocks.start * self._block_size, blocks.stop * self._block_size)
        if source is None or not tokens:
            return blocks.start
        # A source that claims to have more than the prompt has no prefix of it.
        last = source.tokens // self._block_size - 1
        digest = job.prefix.digests[last] if last < len(job.prefix.digests) else b"\0"
        return blocks.stop if await self._peers.fetch(job.allocated_handle, source, tokens, digest) else blocks.start


PEER = "peer"


def cached_runs(hits: Hits, looked_up_from: int, have: int) -> list[TierRun]:
    """Runs of the cache's hits from block `have` on; the look-up began at block `looked_up_from`.

    There are none if `have` is less than `looked_up_from`, because the blocks between them were not looked up.
    """
    runs, at = [], looked_up_from
    for tier, blocks in hits.runs:
        start, at = max(at, have), at + blocks
        if looked_up_from <= have and start < at:
            runs.append(TierRun(tier, range(start, at)))
    return runs


def add_peer(
    runs: Sequence[TierRun], have: int, peer_blocks: int, rates: Mapping[str, FetchRate], block_bytes: int
) -> list[TierRun]:
    """Add a peer that has the first `peer_blocks` blocks to the runs of the cache's hits; returns the new runs.

    The peer supplies its blocks after the end of the runs. It also supplies its blocks of the first run whose tier is
    known to be slower, and of all runs after that one. Blocks before `have` are in the pages.
    """
    kept: list[TierRun] = []
    for run in runs:
        at = run.blocks.start
        if at < peer_blocks and _is_faster(
            rates.get(PEER), rates.get(run.tier), min(run.blocks.stop, peer_blocks) - at, block_bytes
        ):
            break
        kept.append(run)
    at = kept[-1].blocks.stop if kept else have
    if at >= peer_blocks:
        return list(runs)
    beyond = (
        TierRun(run.tier, range(max(peer_blocks, run.blocks.start), run.blocks.stop)) for run in runs[len(kept) :]
    )
    return [*kept, TierRun(PEER, range(at, peer_blocks)), *(run for run in beyond if run.blocks)]


def truncate(runs: Sequence[TierRun], blocks: int) -> list[TierRun]:
    """The first `blocks` blocks of a plan."""
    cut = []
    for run in runs:
        if blocks > 0:
            cut.append(TierRun(run.tier, run.blocks[:blocks]))
        blocks -= len(run.blocks)
    return cut


def to_hits(runs: Sequence[TierRun]) -> Hits:
    """Convert a plan to hits: the tier and the number of blocks of each run."""
    return Hits(tuple((run.tier, len(run.blocks)) for run in runs))


def _is_faster(rate: FetchRate | None, than: FetchRate | None, blocks: int, block_bytes: int) -> bool:
    if rate is None or than is None:
        return False
    return _seconds(rate, blocks * block_bytes) < _seconds(than, blocks * block_bytes)


def _seconds(rate: FetchRate, size: int) -> float:
    return rate.latency_s + size / rate.bytes_per_s


def common_blocks(digests: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Number of leading blocks that two chains have in common."""
    shorter = min(len(digests), len(others))
    return bisect.bisect_left(range(shorter), True, key=lambda block: digests[block] != others[block])


SAVE_WAIT_S = 2.0
"""Longest wait, in seconds, of a chunk for the save of the chunk before it; a slow store delays a prompt no longer."""


class LongPromptSaver:
    """Saves blocks of prompts of at least `long_chunks` chunks (0: none) on one worker; on the asyncio loop only."""

    def __init__(self, cache: PrefixCache, blocks: BlockCopier, block_size: int, long_chunks: int) -> None:
        self._cache, self._blocks, self._block_size = cache, blocks, block_size
        self._long_chunks, self._wait_s = long_chunks, SAVE_WAIT_S

    async def save(self, job: PrefillJob, *, waits: bool = True) -> None:
        """Start to save the final blocks of a job if its prompt is long; call it after each chunk except the last.

        If the previous save still runs after the wait, none is started. Without `waits`, there is no wait.
        """
        if job.prefix.saving is None and not self._is_long(job):
            return
        if waits:
            await self._wait(job)
        if job.prefix.saving is None or job.prefix.saving.done():
            job.prefix.saving = asyncio.create_task(self._save(job), name=f"save {job.request.name}")

    async def finish(self, job: PrefillJob) -> None:
        """Save the rest of a computed job in at most 2 SAVE_WAIT_S; then `prefix.saved` blocks need no write-back."""
        if job.prefix.saving is not None:
            await self.save(job)
            await self._wait(job)
            await self.stop(job)

    async def stop(self, job: PrefillJob) -> None:
        """Stop the save of a job; returns when nothing reads its pages any more."""
        if job.prefix.saving is not None:
            job.prefix.saving.cancel()
            await wait_to_end(job.prefix.saving)

    async def remove(self, job: PrefillJob) -> None:
        """Remove the saved blocks of a job."""
        final = range(job.computed_tokens // self._block_size if job.prefix.to_save else 0)
        await self._cache.remove([job.prefix.digests[block] for block in final if job.prefix.to_save[block]])

    def _own_blocks(self, job: PrefillJob) -> int:
        """Number of leading blocks that came from this process, so that no shared store was asked for them."""
        own_tiers = {POOL, *self._cache.local_tiers}
        own = itertools.takewhile(lambda origin: origin[0] in own_tiers, job.prefix.origins)
        return sum(tokens for _, tokens in own) // self._block_size

    def _is_long(self, job: PrefillJob) -> bool:
        missing, computed = len(job.token_ids) - job.cached_tokens, job.computed_tokens - job.cached_tokens
        return job.request.cache.writes and 0 < self._long_chunks * computed <= missing

    async def _wait(self, job: PrefillJob) -> None:
        # A save that has ended needs no wait: in even one turn of the loop, another prompt could get the engine.
        if job.prefix.saving is not None and not job.prefix.saving.done():
            await asyncio.wait({job.prefix.saving}, timeout=self._wait_s)

    async def _save(self, job: PrefillJob) -> None:
        blocks = range(job.prefix.saved, job.computed_tokens // self._block_size)
        try:
            if not job.prefix.to_save:
                job.prefix.to_save = await self._cache.select_saves(job.prefix.digests, self._own_blocks(job))
                if not job.prefix.to_save:
                    return
            prefix = job.prefix
            prefix.saved = await self._blocks.save(job.allocated_handle, prefix.digests, prefix.to_save, blocks)
        except Exception:
            if job.allocated_handle.alive:
                _log.exception("%s: blocks could not be saved", job.request.name, extra=about(job.request.name))


_MIN_BYTES_PER_S = 100e6


class PeerFetcher:
    """Fetches prefixes from decode workers; used on the asyncio loop only.

    `consumer` is the name of this worker in its tickets. A fetch may take `budget_s` seconds plus the time that its
    bytes take at 100 MB/s. It fails if the exporter sends nothing for `budget_s` seconds.
    """

    def __init__(self, engine: Engine, tls: Tls | None, consumer: str, budget_s: float) -> None:
        self._token_bytes = engine.spec.kv_format.token_bytes
        self._exports = ExportFetcher(engine, tls, consumer, budget_s, role="decode")
        self._budget_s = budget_s
        self._bytes_per_s = DecayingRate()

    @property
    def rate(self) -> FetchRate | None:
        """The measured rate of recent fetches that were not cancelled; None before the first one that succeeded."""
        bytes_per_s = self._bytes_per_s.value
        return FetchRate(0.0, bytes_per_s) if bytes_per_s else None

    async def fetch(self, handle: KvHandle, source: PrefixSource, tokens: range, digest: bytes) -> bool:
        """Fetch the KV of `tokens` of the source's prefix into the handle; returns whether all of it arrived.

        `digest` is the digest that this worker has computed for the last full block of the source's prefix. The call
        ends only after its last write has ended, also if it is cancelled.
        """
        size, arrived, began = len(tokens) * self._token_bytes, 0, time.monotonic()
        timeout_s = self._budget_s + size / _MIN_BYTES_PER_S
        try:
            await self._exports.fetch_prefix(
                source.export, handle, tokens=tokens, length=source.tokens, digest=digest, timeout_s=timeout_s
            )
            arrived = size
        except TransferError as error:
            owner = handle.owner
            _log.info("%s: the prefix could not be fetched, and is computed: %s", owner, error, extra=about(owner))
        # A fetch that is cancelled says nothing about the peer.
        self._bytes_per_s.add(arrived, time.monotonic() - began)
        return arrived == size

    async def close(self) -> None:
        """Close all channels; no fetch may be running."""
        await self._exports.close()
