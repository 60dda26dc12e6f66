"""Write-backs: copies of the blocks of ended sequences to the shared cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import abc, deque

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError, OutOfPages
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.telemetry.logs import about
from baton.worker.prefix_cache import MAX_WRITE_BACKS, BlockCopier
from decode_svc.attempts import PublishedBlocks
from decode_svc.scheduler import BatchPages

_log = logging.getLogger(__name__)

MAX_WAITING_COPIES = 64
"""Number of sequences whose write-back may wait; the blocks of further ones are not copied."""


class WriteBacks:
    """Copies of ended sequences' blocks to the shared cache, of up to MAX_WRITE_BACKS sequences at a time.

        sequence ends ─ publish ─ free        its blocks stay in the pool, as cached pages
             └ add ── waits ── pinned ── copied, slice by slice ── free

    A waiting write-back holds no pages, so its blocks may be evicted before they are copied. A running write-back pins
    its blocks with a handle, which is in the ledger. Requests that need pages come first: `release_pages` frees these
    handles, and the copies end. For the same reason nothing is pinned while pages are kept for the batch; blocks whose
    turn comes then are dropped. All methods are for the asyncio loop, except `release_pages`.

    If `enabled` is False, nothing is copied. `changed` is called when a copy has ended.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: BlockCopier,
        batch_pages: BatchPages,
        *,
        enabled: bool,
        changed: abc.Callable[[], object],
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._enabled = enabled
        self._batch_pages = batch_pages
        self._changed = changed
        self._waiting: deque[PublishedBlocks] = deque()
        self._running: dict[asyncio.Task[None], tuple[KvHandle, float]] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, published: PublishedBlocks) -> None:
        """Queue the blocks after the context for a copy; they are dropped if too many sequences wait."""
        if not self._enabled or not published.new:
            return
        if len(self._waiting) >= MAX_WAITING_COPIES:
            _count_dropped(published.new)
            return
        self._waiting.append(published)
        self._next()

    def release_pages(self) -> bool:
        """End all running copies, to free their pages; returns whether there were any. Any thread may call it.

        The pages return to the pool when the reads in progress have ended.
        """
        pinned = [handle for handle, _ in list(self._running.values()) if handle.alive]
        for handle in pinned:
            self._engine.free(handle)
        return bool(pinned)

    def entries(self, now: float) -> list[LedgerEntry]:
        """One ledger entry for each handle."""
        spec, entries = self._engine.spec, []
        for handle, since in self._running.values():
            pages = spec.pages_for(handle.capacity)
            size = pages * spec.page_size * spec.kv_format.token_bytes
            entries.append(LedgerEntry(handle.owner, "write_back", State.ENDED.value, pages, size, now - since))
        return entries

    async def wait_finished(self) -> None:
        """Wait until no write-back waits or runs."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """Stop all write-backs, and wait until nothing is being read."""
        self._enabled = False
        self._waiting.clear()
        self._blocks.stop()
        self.release_pages()
        await self.wait_finished()

    def _next(self) -> None:
        while self._waiting and len(self._running) < MAX_WRITE_BACKS:
            published = self._waiting.popleft()
            if (handle := self._pin(published)) is not None:
                task = asyncio.create_task(self._copy(published, handle), name=handle.owner)
                self._running[task] = handle, self._loop.time()

    def _pin(self, published: PublishedBlocks) -> KvHandle | None:
        """Pin the leading blocks that are still cached; returns None if no block after the context is among them."""
        if not self._batch_pages.kept_pages:
            # If a block is evicted in between, the handle has an empty page in its place.
            with contextlib.suppress(OutOfPages, EngineError):
                cached = self._engine.match_prefix(published.digests)
                handle = self._engine.reserve(f"{published.owner}/write_back", cached, published.digests)
                if self._count_pinned(handle) > published.context_blocks:
                    return handle
                self._engine.free(handle)
        _count_dropped(published.new)
        return None

    def _count_pinned(self, handle: KvHandle) -> int:
        return handle.cached_tokens // self._engine.spec.kv_format.block_size

    async def _copy(self, published: PublishedBlocks, handle: KvHandle) -> None:
        digests, first = published.digests[: self._count_pinned(handle)], published.context_blocks
        try:
            await self._blocks.write_back(handle, digests, first, lambda: handle.alive, skip_blocks=first)
        except EngineError as error:
            if handle.alive:
                _log.error("%s failed: %s", handle.owner, error, extra=about(handle.owner))
        except Exception:
            _log.exception("%s failed", handle.owner, extra=about(handle.owner))
        finally:
            self._engine.free(handle)
            task = asyncio.current_task()
            if task is not None:
                del self._running[task]
            self._next()
            self._changed()


def _count_dropped(blocks: int) -> None:
    metrics.PREFIX_BLOCKS.labels("any", "dropped").inc(blocks)
