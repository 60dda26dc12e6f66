"""Between prefix cache and KV pages: load a job's cached blocks, write its new ones back. Off the engine thread.

Blocks go in slices of SLICE_BYTES, so that a long prefix is never whole in memory beside the pages. Copies run in
threads, which can't be cancelled: a job that is over, or `stop`, ends a load after the layer in progress and a
write-back after the slice, and the caller keeps the job's pages until they have returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix import Payload, PrefixCache
from baton.kv.prefix.block import block_payloads, layer_parts, payload_bytes
from prefill_svc.job import Job

SLICE_BYTES = 16 << 20


class PrefixBlocks:
    """The prefix blocks of one worker's jobs."""

    def __init__(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine = engine
        self._format = engine.spec.kv_format
        self._fingerprint = engine.spec.fingerprint
        self._slice = max(1, SLICE_BYTES // payload_bytes(self._format))
        self._cache = cache
        self._stopped = False

    @property
    def stores(self) -> bool:
        """Whether there is a cache."""
        return self._cache.stores

    def stop(self) -> None:
        """Make `load` and `write_back` return soon."""
        self._stopped = True

    async def name(self, job: Job) -> None:
        """Compute the digests of the job's full blocks."""
        job.digests = await asyncio.to_thread(self._digests, job.ids, job.task.cache_salt)

    async def look_up(self, job: Job) -> int:
        """Leading blocks that the cache has, not more than leave a token to be computed."""
        await self.name(job)
        useful = -(-(len(job.ids) - 1) // self._format.block_size)
        return await self._cache.lookup(job.digests[:useful])

    async def load(self, job: Job) -> None:
        """Write the job's hits into its pages, as far as they are still there; counts them in `loaded_blocks`.

        Returns or raises, when cancelled as well, only once nothing is being written any more.
        """
        handle = _handle(job)
        while job.loaded_blocks < job.hits and not (job.over or self._stopped):
            start = job.loaded_blocks
            wanted = job.digests[start : min(job.hits, start + self._slice)]
            payloads = await self._cache.fetch(wanted)
            if payloads:
                await self._written(asyncio.to_thread(self._write, job, handle, start, payloads))
            job.loaded_blocks += len(payloads)
            if len(payloads) < len(wanted):
                return

    async def write_back(self, job: Job) -> None:
        """Put the job's full blocks that were not loaded, until the cache takes no more."""
        handle = _handle(job)
        if not job.digests:
            await self.name(job)
        for start in range(job.loaded_blocks, len(job.digests), self._slice):
            if self._stopped:
                return
            digests = job.digests[start : start + self._slice]
            payloads = await asyncio.to_thread(self._read, handle, start, len(digests))
            for digest, payload in zip(digests, payloads, strict=True):
                if not self._cache.put(digest, payload):
                    return

    def _digests(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        root = chain_root(self._fingerprint, self._format.digest, salt)
        return block_digests(root, ids, self._format.block_size)

    async def _written(self, write: Coroutine[Any, Any, None]) -> None:
        """Wait for a write, through a cancel as well, which then ends it after a layer."""
        writing = asyncio.ensure_future(write)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    def _write(self, job: Job, handle: KvHandle, block: int, payloads: Sequence[Payload]) -> None:
        for layer in range(self._format.layers):
            if job.over or self._stopped:
                return
            parts = layer_parts(self._format, payloads, layer)
            self._engine.write_kv(handle, layer, block * self._format.block_size, 0, parts)

    def _read(self, handle: KvHandle, block: int, blocks: int) -> list[bytes]:
        tokens = range(block * self._format.block_size, (block + blocks) * self._format.block_size)
        heads = range(self._format.heads)
        layers = range(self._format.layers)
        return block_payloads(self._format, [self._engine.read_kv(handle, layer, tokens, heads) for layer in layers])


def _handle(job: Job) -> KvHandle:
    if job.pages is None:
        raise EngineError(f"{job.task.name} has no pages")
    return job.pages.handle
