"""Prefix blocks in this process's memory, bounded in bytes: the least recently used go first.

Blocks are kept in runs, in the order of their chain. Each use of a chain moves its cached blocks
into a new run. A block that is put joins the run of the block before it. Eviction removes the end of the oldest
run. So a chain loses its end before its beginning, and a block that many chains share stays as long as the latest of
them. A chain that is too long for the memory keeps its beginning: a block that would evict its own predecessors is
refused, and so are all blocks after it.

Methods that look at many blocks let others run between slices of them; no method waits for anything else.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import AsyncIterator, Generator, Sequence
from itertools import takewhile
from typing import TypeVar

from baton.kv.prefix.contract import BlocksChanged, Hits, Payload, PrefixCache
from baton.ledger import CacheTier
from baton.telemetry import metrics

T = TypeVar("T")

HOST = "host"

_MAX_PARENTS = 1 << 16
_STALE_ENTRIES = 4096

SLICE_BLOCKS = 512
"""Blocks that are looked at before other tasks run: a long prompt has tens of thousands, and each may take two
microseconds. One iteration of the event loop may process slices of several prompts."""

_HIT, _MISS, _FETCHED, _EVICTED = (
    metrics.PREFIX_BLOCKS.labels(HOST, outcome) for outcome in ("hit", "miss", "fetched", "evicted")
)


@types.coroutine
def _yield_to_loop() -> Generator[None, None, None]:
    """The same as `asyncio.sleep(0)`; pure modules beside this one must not load asyncio."""
    yield


async def slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """The items in slices of at most SLICE_BLOCKS; other tasks run between slices."""
    for start in range(0, len(items), SLICE_BLOCKS):
        if start:
            await _yield_to_loop()
        yield items[start : start + SLICE_BLOCKS]


class _ChainRun:
    """Blocks of one use of a chain, in its order. Blocks that have moved to a later run since must be skipped."""

    __slots__ = ("digests",)

    def __init__(self) -> None:
        self.digests: list[bytes] = []


class HostPrefixCache(PrefixCache):
    """`PrefixCache` of at most `capacity_bytes` of payload; 0 keeps nothing.

    Blocks are not saved for other workers, do not expire, and are fetched in no time.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._bytes = 0
        self._payloads: dict[bytes, Payload] = {}
        self._run_of: dict[bytes, _ChainRun] = {}
        self._runs: deque[_ChainRun] = deque()
        self._entries = 0
        self._parents: dict[bytes, bytes] = {}
        self._hits = self._misses = 0
        self._changed: BlocksChanged | None = None

    @property
    def enabled(self) -> bool:
        """Whether the capacity is above 0."""
        return self._capacity > 0

    @property
    def local_tiers(self) -> frozenset[str]:
        """The single tier."""
        return frozenset((HOST,))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._payloads

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The leading hits; marks them as used."""
        found = sum(1 for _ in takewhile(self._payloads.__contains__, digests))
        await self.mark_used(digests[:found])
        self.count_lookup(found, len(digests) - found)
        return Hits(((HOST, found),) if found else ())

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss."""
        payloads = [self._payloads[digest] for digest in takewhile(self._payloads.__contains__, digests)]
        self.count_fetched(len(payloads))
        return payloads

    def get(self, digest: bytes) -> Payload | None:
        """A block's payload, or None."""
        return self._payloads.get(digest)

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Whether each block is wanted: it is not cached here and was no hit. Marks the chain as used."""
        wanted: list[bool] = []
        async for part in slices(digests):
            wanted += self.select_missing(part, hits - len(wanted))
        await self.mark_used(digests, wanted)
        return wanted

    def select_missing(self, digests: Sequence[bytes], hits: int) -> list[bool]:
        """The same as `select_writes`, without marking the chain as used."""
        held, enabled = self._payloads, self.enabled
        return [enabled and index >= hits and digest not in held for index, digest in enumerate(digests)]

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Keep the block; False if it would have to evict the blocks before it in its chain."""
        if digest in self._payloads:
            return True
        parent, size = self._parents.pop(digest, None), len(payload)
        if size > self._capacity or (parent is not None and parent not in self._payloads):
            return False
        run = _ChainRun() if parent is None else self._run_of[parent]
        dropped = self._evict(size, run)
        kept = self._bytes + size <= self._capacity
        if kept:
            self._payloads[digest] = payload
            self._bytes += size
            self._place(run, digest)
        self._notify((digest,) if kept else (), dropped)
        return kept

    async def mark_used(self, digests: Sequence[bytes], will_put: Sequence[bool] | None = None) -> None:
        """Mark consecutive blocks of a chain as used; `will_put` says which missing ones will be put (default: all).

        A block that is put later is kept only if the block before it is still cached then.
        """
        if not self.enabled:
            return
        run, parent = _ChainRun(), None
        async for part in slices(range(len(digests))):
            for index in part:
                digest = digests[index]
                if digest in self._payloads:
                    self._place(run, digest)
                    parent = digest
                    continue
                self._parents.pop(digest, None)
                put_later = will_put is None or will_put[index]
                if put_later and parent is not None:
                    self._parents[digest] = parent
                parent = digest if put_later else None
        while len(self._parents) > _MAX_PARENTS:
            del self._parents[next(iter(self._parents))]
        if self._entries > 2 * len(self._payloads) + _STALE_ENTRIES:
            self._compact()

    def count_fetched(self, blocks: int) -> None:
        """Count fetched blocks."""
        _FETCHED.inc(blocks)

    def count_lookup(self, hits: int, misses: int) -> None:
        """Count the hits and misses of a look-up."""
        self._hits += hits
        self._misses += misses
        _HIT.inc(hits)
        _MISS.inc(misses)

    def watch(self, changed: BlocksChanged | None) -> None:
        """Report each block."""
        self._changed = changed
        self._notify(tuple(self._payloads), ())

    async def stats(self) -> list[CacheTier]:
        """One entry, `host`: blocks, bytes, capacity in bytes, and hits and misses since the start."""
        return [CacheTier(HOST, len(self._payloads), self._bytes, self._capacity, self._hits, self._misses)]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks."""
        dropped, size = tuple(self._payloads), self._bytes
        self._payloads.clear()
        self._run_of.clear()
        for run in self._runs:
            # A `mark_used` that lets others run may still hold it.
            run.digests.clear()
        self._runs.clear()
        self._bytes = self._entries = 0
        self._notify((), dropped)
        return [CacheTier(HOST, len(dropped), size)]

    async def close(self) -> None:
        """Drop all blocks."""
        await self.clear(shared=False)

    def _place(self, run: _ChainRun, digest: bytes) -> None:
        if not run.digests:
            self._runs.append(run)
        run.digests.append(digest)
        self._run_of[digest] = run
        self._entries += 1

    def _evict(self, size: int, keep: _ChainRun) -> list[bytes]:
        """Evict until `size` fits, or `keep` is the oldest run; returns the evicted digests."""
        dropped: list[bytes] = []
        while self._bytes + size > self._capacity and self._runs and self._runs[0] is not keep:
            run = self._runs[0]
            digest = run.digests.pop()
            if not run.digests:
                self._runs.popleft()
            self._entries -= 1
            if self._run_of.get(digest) is run:
                del self._run_of[digest]
                self._bytes -= len(self._payloads.pop(digest))
                dropped.append(digest)
        if dropped:
            _EVICTED.inc(len(dropped))
        return dropped

    def _compact(self) -> None:
        """Remove the entries of blocks that have moved to other runs."""
        for run in self._runs:
            run.digests = [digest for digest in run.digests if self._run_of.get(digest) is run]
        self._runs = deque(run for run in self._runs if run.digests)
        self._entries = len(self._payloads)

    def _notify(self, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        if self._changed is not None and (stored or dropped):
            self._changed(stored, dropped)
