"""Ends of prompts (`baton.kv.prefix.end`): which are looked for, and which are kept.

A prompt of which all blocks and the end are cached needs no chunk, but its first token alone. Most prompts are asked
once, and their ends are of use to no longer prompt. So an end, which takes the place of a block, is put at once behind
AT_ONCE new blocks or more, and behind fewer when this worker computes it for the second time. And it is looked for
where that costs no round trip of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.kv.prefix import PrefixCache
from baton.kv.prefix.contract import Hits
from baton.kv.prefix.end import PromptEnd
from baton.kv.prefix.sightings import Seen, Sightings
from baton.telemetry import metrics
from baton.worker.blocks import Blocks, EndOf
from prefill_svc.job import Job

AT_ONCE = 32
_REMEMBERED = 1 << 14


class Ends:
    """The ends of one worker's prompts; lives on the asyncio loop. `pays`: whether hits are worth being fetched.

    `fetching` ends are on their way to their jobs.
    """

    def __init__(self, cache: PrefixCache, blocks: Blocks, pays: Callable[[Hits], bool]) -> None:
        self._cache = cache
        self._blocks = blocks
        self._pays = pays
        self._computed = Sightings(_REMEMBERED)
        self.fetching = 0

    async def look_up(self, job: Job, wanted: Sequence[bytes]) -> tuple[Hits, PromptEnd | None]:
        """Ask the cache for `wanted`, the last blocks of a job, and for its end: the last hit, if it is returned.

        It is fetched at once, since what pages are taken depends on whether it is there.
        """
        if not self._blocks.end_fits(len(job.ids)):
            return await self._cache.lookup(wanted), None
        name = self._name(job)
        hits = await self._cache.lookup(wanted, name)
        if hits.blocks <= len(wanted) or not self._pays(hits):
            return hits, None
        self.fetching += 1
        try:
            return hits, await self._blocks.fetch_end(name, len(job.ids))
        finally:
            self.fetching -= 1

    async def write_back(self, job: Job, hidden: bytes) -> None:
        """Put the blocks of a finished job into the cache, and its end, given its last token's hidden state.

        That is empty if nothing was computed.
        """
        if job.pages is None:
            return
        found, name = job.found // self._blocks.size, self._name(job)
        end = EndOf(name, len(job.ids), hidden) if self._due(job, name, found, hidden) else None
        if await self._blocks.write_back(job.pages.handle, job.digests, found, lambda: True, end=end):
            metrics.PREFIX_ENDS.labels("put").inc()

    def _due(self, job: Job, name: bytes, found: int, hidden: bytes) -> bool:
        if not self._blocks.end_fits(len(job.ids)):
            return False
        if not hidden:
            return True
        again = self._computed.sighted([name])[0] is not Seen.ONCE
        return again or len(job.digests) - found >= AT_ONCE

    def _name(self, job: Job) -> bytes:
        return self._blocks.end_name(job.ids, job.digests, job.task.cache_salt)
