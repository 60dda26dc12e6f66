"""Long prompts are saved while they are computed: if this worker dies, another one resumes from the saved blocks.

    after chunk n ── wait for the save of chunk n - 1, at most SAVE_WAIT_S ── begin to save chunk n

So a death loses at most the chunk that was being computed, the one before it, and what a slow store has not taken yet.
Nothing is dropped while the prompt is computed: if the wait is over, the save goes on, and later chunks find it further
behind. After a failure of the store, the next chunk continues at the first block that is not stored. While the store
can't be reached, saves fail at once, so nobody waits. The blocks before the first chunk are saved as well if the store
has lost them: without them, no worker would find those after them.

A prompt is long if it needs at least `long_chunks` chunks. A chunk takes about half a second of computing
(`prefill_svc.scheduler.chunk_size`), so short prompts, which lose little, never wait. The job does not have the engine
while it waits; other prompts are computed. Saves do not pass through the queue of other writes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from baton.kv.prefix import PrefixCache
from baton.kv.prefix.host import TIER as HOST
from baton.tasks import wait_to_end
from baton.worker.block_copier import BlockCopier
from baton.worker.cache_tiers import POOL
from prefill_svc.job import PrefillJob

SAVE_WAIT_S = 2.0
"""A few chunks' time: a store that takes KV more slowly than the engine computes it may slow a prompt down so far."""

_OWN_TIERS = (POOL, HOST)

_log = logging.getLogger(__name__)


class ChunkSaver:
    """Saves the blocks of one worker's long prompts; used on the asyncio loop only. `long_chunks` 0 saves none."""

    def __init__(self, cache: PrefixCache, blocks: BlockCopier, block_size: int, long_chunks: int) -> None:
        self._cache, self._blocks, self._block = cache, blocks, block_size
        self._long_chunks, self._wait_s = long_chunks, SAVE_WAIT_S

    async def save(self, job: PrefillJob) -> None:
        """Begin to save the final blocks of a job, if it is long; call it after each chunk but the last."""
        if job.saving is None and not self._is_long(job):
            return
        await self._wait(job)
        if job.saving is None or job.saving.done():
            job.saving = asyncio.create_task(self._save(job), name=f"save {job.task.name}")

    async def finish(self, job: PrefillJob) -> None:
        """Save the rest of a job that has been computed, for at most two waits; `job.saved` blocks need no write."""
        if job.saving is not None:
            await self.save(job)
            await self._wait(job)
            await self.stop(job)

    async def stop(self, job: PrefillJob) -> None:
        """End the save of a job; returns when its pages are not read any more."""
        if job.saving is not None:
            job.saving.cancel()
            await wait_to_end(job.saving)

    async def remove(self, job: PrefillJob) -> None:
        """Remove what was saved of a job."""
        final = range(job.computed // self._block if job.to_save else 0)
        await self._cache.remove([job.digests[block] for block in final if job.to_save[block]])

    def _own_blocks(self, job: PrefillJob) -> int:
        """Leading blocks that this process had itself: the store was not asked for them."""
        own = itertools.takewhile(lambda source: source[0] in _OWN_TIERS, job.sources)
        return sum(tokens for _, tokens in own) // self._block

    def _is_long(self, job: PrefillJob) -> bool:
        missing, computed = len(job.ids) - job.cached_tokens, job.computed - job.cached_tokens
        return job.task.cache.writes and 0 < self._long_chunks * computed <= missing

    async def _wait(self, job: PrefillJob) -> None:
        # Not even for a turn of the loop if it has ended: another prompt would get the engine out of its turn.
        if job.saving is not None and not job.saving.done():
            await asyncio.wait({job.saving}, timeout=self._wait_s)

    async def _save(self, job: PrefillJob) -> None:
        blocks = range(job.saved, job.computed // self._block)
        try:
            if not job.to_save:
                job.to_save = await self._cache.select_saves(job.digests, self._own_blocks(job))
                if not job.to_save:
                    return
            job.saved = await self._blocks.save(job.pages, job.digests, job.to_save, blocks)
        except Exception:
            _log.exception("%s: blocks could not be saved", job.task.name)
