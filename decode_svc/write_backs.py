"""Write-back: blocks of ended sequences are copied to the cache that workers share, behind everybody's back.

    sequence ends ─ publish ─ free        its blocks stay in the pool, as cached pages
         └ begin ── waits ── pinned ── copied, slice by slice ── free

What waits holds nothing: its pages may be evicted, and then there is less to copy. What is copied is pinned by a handle
of its own, which the ledger lists and no slot knows. `give_up` frees those handles: whoever wants pages for a request
comes first, and all that is lost is a copy. For the same reason nothing is pinned while the batch lacks pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError, OutOfPages
from baton.ledger import LedgerEntry
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.worker.blocks import MOST_WRITE_BACKS, Blocks

MOST_WAITING = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Work:
    owner: str
    digests: Sequence[bytes]
    first: int


class WriteBacks:
    """Copies MOST_WRITE_BACKS sequences at a time; lives on the asyncio loop, but for `give_up`.

    With `enabled` False all that comes is ignored. `short_of_pages` says whether the batch lacks pages; `changed` is
    called when a copy has ended.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: Blocks,
        *,
        enabled: bool,
        short_of_pages: Callable[[], bool],
        changed: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._enabled = enabled
        self._short_of_pages = short_of_pages
        self._changed = changed
        self._waiting: deque[_Work] = deque()
        self._going: dict[asyncio.Task[None], tuple[KvHandle, float]] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._going)

    def begin(self, owner: str, digests: Sequence[bytes], first: int) -> None:
        """Copy blocks `[first, len(digests))` of a chain that `owner` has published, soon and as far as possible."""
        if not self._enabled or first >= len(digests):
            return
        if len(self._waiting) >= MOST_WAITING:
            _drop(len(digests) - first)
            return
        self._waiting.append(_Work(f"{owner}/write_back", digests, first))
        self._next()

    def give_up(self) -> bool:
        """Free the pages of all copies, from any thread; they return with the reads in progress. True if there were
        any."""
        pinned = [handle for handle, _ in list(self._going.values()) if handle.alive]
        for handle in pinned:
            self._engine.free(handle)
        return bool(pinned)

    def entries(self, now: float) -> list[LedgerEntry]:
        """One entry for each handle."""
        spec, entries = self._engine.spec, []
        for handle, since in self._going.values():
            pages = spec.pages_for(handle.capacity)
            size = pages * spec.page_size * spec.kv_format.token_bytes
            entries.append(LedgerEntry(handle.owner, "write_back", State.ENDED.value, pages, size, now - since))
        return entries

    async def finished(self) -> None:
        """Return once nothing waits or is being copied."""
        while self._going:
            await asyncio.wait(list(self._going))

    async def close(self) -> None:
        """Copy no more, and return when nothing is being read."""
        self._enabled = False
        self._waiting.clear()
        self._blocks.stop()
        self.give_up()
        await self.finished()

    def _next(self) -> None:
        while self._waiting and len(self._going) < MOST_WRITE_BACKS:
            work = self._waiting.popleft()
            if (handle := self._pinned(work)) is not None:
                task = asyncio.create_task(self._copy(work, handle), name=handle.owner)
                self._going[task] = handle, self._loop.time()

    def _pinned(self, work: _Work) -> KvHandle | None:
        """A handle on as many of the blocks as are still there; None if there is none that is new."""
        if not self._short_of_pages():
            # What is evicted in between would be replaced by empty pages.
            with contextlib.suppress(OutOfPages):
                handle = self._engine.reserve(work.owner, self._engine.match_prefix(work.digests), work.digests)
                if self._pinned_blocks(handle) > work.first:
                    return handle
                self._engine.free(handle)
        _drop(len(work.digests) - work.first)
        return None

    def _pinned_blocks(self, handle: KvHandle) -> int:
        return handle.cached // self._engine.spec.kv_format.block_size

    async def _copy(self, work: _Work, handle: KvHandle) -> None:
        digests = work.digests[: self._pinned_blocks(handle)]
        try:
            await self._blocks.write_back(handle, digests, work.first, lambda: handle.alive, least=work.first)
        except EngineError as error:
            if handle.alive:
                _log.error("%s failed: %s", handle.owner, error)
        except Exception:
            _log.exception("%s failed", handle.owner)
        finally:
            self._engine.free(handle)
            task = asyncio.current_task()
            if task is not None:
                del self._going[task]
            self._next()
            self._changed()


def _drop(blocks: int) -> None:
    metrics.PREFIX_BLOCKS.labels("any", "dropped").inc(blocks)
