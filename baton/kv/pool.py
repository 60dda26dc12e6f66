"""The page pool: who owns which page of a worker's KV memory.

    reserve ──▶ handle ──▶ free
                  └ pin … unpin   around every read, write and forward pass on its pages

A handle has an *allocation*, which is a list of pages. `free` ends the handle at once, but the pages return to the pool
only when all pins on the allocation have ended. So a late frame or a running forward pass never touches pages that have
a new owner. Allocations share full pages: a fork shares full pages of its parent, and a handle that was reserved with a
prefix shares the published pages of this prefix (`baton.kv.cached_blocks`). So each page has a reference count
(`PageAllocator`), and a page that is shared or published is never written. `audit` checks this invariant: each page is
free, cached (published, and without owner), or its count equals the number of allocations that list it. Cached pages
are evicted when no page is free. `watch_pages` reports every return of pages, also a late one.

Pure bookkeeping: pages are numbers, and the memory behind them belongs to the engine. Every method may be called from
any thread. No method holds the lock for more than about a millisecond, whatever the number of pages: what takes longer
takes the lock several times.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineError, OutOfPages
from baton.kv.cached_blocks import (
    NO_PAGES,
    SLICE_NODES,
    SLICE_PAGES,
    CachedBlockIndex,
    Counts,
    Home,
    Pages,
    PoolBlocksChanged,
    PrefixPages,
)

DRAINING = " (draining)"
"""Suffix of an owner's name in the audit if it freed pages that are still pinned."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of a pool: `used + free + cached == total`."""

    used: int
    free: int
    cached: int
    total: int


@dataclass(eq=False, slots=True)
class _Allocation:
    """`pages` are replaced, never changed: others read them without the lock."""

    owner: str
    pages: array[int]
    pins: int = 0
    active: bool = True

    @property
    def listed(self) -> Pages:
        """A view of its pages."""
        return np.asarray(self.pages)


class PageHandle:
    """The right to the pages of one sequence; see `baton.engine.contract.KvHandle`."""

    __slots__ = ("_allocation", "_device_pages", "_page_size", "cached_tokens")

    def __init__(self, allocation: _Allocation, page_size: int, device_pages: int, cached_tokens: int = 0) -> None:
        self._allocation = allocation
        self._page_size = page_size
        self._device_pages = device_pages
        self.cached_tokens = cached_tokens
        """Leading tokens whose KV was there when its pages were reserved."""

    @property
    def owner(self) -> str:
        """Name of its owner, for the ledger."""
        return self._allocation.owner

    @property
    def capacity(self) -> int:
        """Number of tokens for which it has pages."""
        return len(self._allocation.pages) * self._page_size

    @property
    def alive(self) -> bool:
        """False from the moment it was freed."""
        return self._allocation.active

    @property
    def in_host(self) -> bool:
        """Whether some of its pages are in host memory."""
        return bool((self._allocation.listed >= self._device_pages).any())

    @property
    def pages(self) -> array[int]:
        """Its pages in token order; not to be changed."""
        return self._allocation.pages

    def check_alive(self) -> None:
        """Raise EngineError if it was freed."""
        if not self.alive:
            raise EngineError(f"{self.owner}: its KV was freed")


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy that a new handle needs: the first `tokens` of page `source` go to page `target`."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PageStates:
    """The states of all pages at one moment: owners, which pages are cached, and the free pages of each home.

    `counted_cached` is the number of cached pages as the index counts them. `counted_idle` is the same for cached pages
    without owner in each home.
    """

    owners: Counts
    cached: NDArray[np.bool_]
    free: tuple[Pages, Pages]
    counted_cached: int
    counted_idle: tuple[int, int]
    device_pages: int

    def check(self, counts: Counts) -> list[str]:
        """Compare with `counts`, each page's number of owners by the handles; returns a text for each contradiction."""
        faults = []
        free = np.bincount(np.concatenate(self.free), minlength=len(counts))
        if (
            free.max() > 1
            or (self.free[False] >= self.device_pages).any()
            or (self.free[True] < self.device_pages).any()
        ):
            faults.append("a page is twice among the free ones, or in the wrong home")
        idle = self.cached & (counts == 0)
        homes = (idle[: self.device_pages], idle[self.device_pages :])
        if (found := tuple(int(np.count_nonzero(home)) for home in homes)) != self.counted_idle:
            faults.append(f"{found} pages are cached without owner, counted {self.counted_idle}")
        if (cached := np.count_nonzero(self.cached)) != self.counted_cached:
            faults.append(f"{cached} pages are cached, counted {self.counted_cached}")
        for page in np.flatnonzero((counts != self.owners) | ((free > 0) != ((counts == 0) & ~self.cached)))[:20]:
            state = "free" if free[page] else "cached" if idle[page] else "not free"
            faults.append(f"page {page}: count {self.owners[page]}, owners {counts[page]}, {state}")
        return faults


class PageAllocator:
    """The number of owners of each page, and the free pages; `block_index` has the cached ones. Has no lock.

        allocate ──▶ owned by one ── share ──▶ owned by several
           ▲                  └──────release──────┘
         free ◀── evict ── cached (published, and without owner) ──share──▶ owned

    Pages from number `device_pages` on are in host memory (docs/decisions/0021-one-pool-with-pages-in-two-homes.md).
    """

    def __init__(self, pages: int, page_size: int, block_size: int, device_pages: int) -> None:
        self._device_pages = device_pages
        # On the device, and in host memory: stacks, of which the first so many pages are free.
        self._stacks = [np.arange(device_pages, dtype=np.int64), np.arange(device_pages, pages, dtype=np.int64)]
        self._free = [device_pages, pages - device_pages]
        for stack in self._stacks:
            stack[:] = stack[::-1].copy()
        self._owners = np.zeros(pages, np.int32)
        self.block_index = CachedBlockIndex(self._owners, page_size, block_size, device_pages)

    @property
    def free(self) -> int:
        """Number of pages that are neither owned nor cached."""
        return sum(self._free)

    def available(self, *shared: Pages) -> int:
        """Number of pages that `allocate` could take: free ones, and cached ones without owner outside `shared`."""
        idle = sum(len(pages) - np.count_nonzero(self._owners[pages]) for pages in shared)
        return self.free + self.block_index.idle_pages - int(idle)

    def allocate(self, count: int) -> Pages:
        """Take `count` pages for one owner; raises OutOfPages, and then changes nothing."""
        if count > (available := self.available()):
            raise OutOfPages(count, available, len(self._owners))
        taken = []
        for home, wanted in zip(Home, self._homes_of(count), strict=True):
            while (missing := wanted - self._free[home]) > 0:
                self._evict(home, missing)
            self._free[home] = top = self._free[home] - wanted
            taken.append(self._stacks[home][top : top + wanted][::-1])
        pages = np.concatenate(taken)
        self._owners[pages] = 1
        return pages

    def evict_slice(self, count: int, kept: Pages) -> bool:
        """Evict a part of the pages that `allocate(count)` would evict, but none of `kept`; True if more are left.

        `kept` are owned or cached pages. If fewer than `count` pages are available beside them, evicts nothing.
        """
        idle = kept[self._owners[kept] == 0]
        in_host = int(np.count_nonzero(idle >= self._device_pages))
        homes = self._homes_of(count, (len(idle) - in_host, in_host))
        if self._has_free(homes) or count > self.free + self.block_index.idle_pages - len(idle):
            return False
        # They become the last in the order of eviction.
        self.block_index.touch(kept)
        nodes, most = SLICE_NODES, self.free + SLICE_PAGES
        while nodes and self.free < most:
            home = Home.HOST if self._free[Home.DEVICE] >= homes[Home.DEVICE] else Home.DEVICE
            self._evict(home, min(homes[home] - self._free[home], most - self.free))
            if self._has_free(homes):
                return False
            nodes -= 1
        return True

    def drop_cached(self) -> int:
        """Forget all cached blocks; returns how many pages this frees."""
        freed = np.flatnonzero(self.block_index.cached() & (self._owners == 0))
        self.block_index = self.block_index.emptied()
        self.add_free(freed)
        return len(freed)

    def share(self, pages: Pages) -> None:
        """Add an owner to each of `pages`, which are owned or cached."""
        counts = self._owners[pages]
        self.block_index.acquire(pages[counts == 0])
        self._owners[pages] = counts + 1

    def release(self, pages: Pages) -> int:
        """Take one owner from each of `pages`, in token order; returns how many of them have none left."""
        self._owners[pages] = counts = self._owners[pages] - 1
        self.add_free(self.block_index.release(pages, counts == 0)[::-1])
        return len(counts) - int(np.count_nonzero(counts))

    def add_free(self, pages: Pages) -> None:
        """Make pages free that are neither owned nor cached any more."""
        in_host = pages >= self._device_pages
        for home, own in enumerate((pages[~in_host], pages[in_host]) if in_host.any() else (pages,)):
            top = self._free[home]
            self._free[home] = end = top + len(own)
            self._stacks[home][top:end] = own

    def are_writable(self, pages: Pages) -> bool:
        """Whether each of the pages has one owner, and is not published."""
        return bool((self._owners[pages] == 1).all()) and not self.block_index.are_cached(pages)

    def new_buffers(self) -> tuple[Counts, NDArray[np.bool_], tuple[Pages, Pages]]:
        """Memory for `copy_states`, made without the lock: the page faults of 3 MB take longer than the copies."""
        free = self._stacks[Home.DEVICE].copy(), self._stacks[Home.HOST].copy()
        return self._owners.copy(), np.ones(len(self._owners), np.bool_), free

    def copy_states(self, owners: Counts, cached: NDArray[np.bool_], stacks: tuple[Pages, Pages]) -> PageStates:
        """A copy of the states of all pages in these buffers, which takes a fraction of a millisecond."""
        index = self.block_index
        for copy, stack, top in zip(stacks, self._stacks, self._free, strict=True):
            copy[:top] = stack[:top]
        owners[:] = self._owners
        index.cached(cached)
        on_device, in_host = (stacks[home][: self._free[home]] for home in Home)
        idle = index.idle_pages_in(Home.DEVICE), index.idle_pages_in(Home.HOST)
        return PageStates(owners, cached, (on_device, in_host), index.cached_pages, idle, self._device_pages)

    def _homes_of(self, count: int, spared: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """The numbers of pages, `count` together, to take on the device and in host memory.

        `spared` has, for device and host memory, the number of cached pages that must not be evicted.
        """
        room = (self._free[home] + self.block_index.idle_pages_in(home) - spared[home] for home in Home)
        device, host = room
        on_device = count if count <= device else 0 if count <= host else device
        return on_device, count - on_device

    def _has_free(self, homes: tuple[int, int]) -> bool:
        """Whether so many pages are free in either home."""
        return all(self._free[home] >= homes[home] for home in Home)

    def _evict(self, home: Home, count: int) -> None:
        """Evict up to `count` pages from the least recently used node."""
        self.add_free(self.block_index.evict(home, count))


class PagePool:
    """A pool of `pages` pages of `page_size` tokens each, numbered from 0; `block_size` is `page_size` by default.

    The last `host_pages` of them are in host memory.
    """

    def __init__(self, pages: int, page_size: int, block_size: int | None = None, host_pages: int = 0) -> None:
        if pages < 1 or page_size < 1:
            raise EngineError(f"a pool needs a page of a token or more, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._lock = threading.Lock()
        self._device_pages = pages - host_pages
        self._allocator = PageAllocator(pages, page_size, block_size or page_size, self._device_pages)
        self._allocations: set[_Allocation] = set()
        self._returns = 0
        self._on_returned: Callable[[], object] | None = None

    def watch_pages(self, on_returned: Callable[[], object] | None) -> None:
        """Call `on_returned`, from any thread and without a lock, when pages have returned; None ends this."""
        with self._lock:
            self._on_returned = on_returned

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def reserve(
        self,
        owner: str,
        tokens: int,
        prefix: Sequence[bytes] = (),
        max_cached_tokens: int | None = None,
        copy: Callable[[PageCopy], object] | None = None,
    ) -> PageHandle:
        """Reserve a handle of at least `tokens` tokens. Raises OutOfPages, and then allocates nothing.

        The handle begins with the leading blocks of the chain `prefix` that are published, up to `max_cached_tokens`
        tokens. Whole units (`baton.kv.cached_blocks`) are shared pages. The rest is copied by calls of `copy`, without
        any lock held, if `copy` is given and a page is free for it.
        """
        while self.evict_for(tokens, prefix, max_cached_tokens):
            pass
        with self._locked():
            found = self._match(owner, tokens, prefix, max_cached_tokens)
            (shared, cut, _, cached), need = found, self.pages_for(tokens) - len(found.shared)
            if copy is None or need > self._allocator.available(shared, cut):
                cut, cached = NO_PAGES, len(shared) * self.page_size
            if need > (available := self._allocator.available(shared)):
                raise OutOfPages(need + len(shared), available + len(shared), self.pages)
            self._allocator.share(shared)
            self._allocator.share(cut)
            own = self._allocator.allocate(need)
            handle = self._handle(owner, np.concatenate([shared, own]), cached)
            if not len(cut) or copy is None:
                return handle
            source = self._allocation(owner, cut)
            source.pins, source.active = 1, False
        try:
            with self.pin(handle):
                for index, (page, target) in enumerate(zip(cut.tolist(), own.tolist(), strict=False)):
                    rest = cached - (len(shared) + index) * self.page_size
                    copy(PageCopy(page, target, min(rest, self.page_size)))
        except BaseException:
            self.free(handle)
            raise
        finally:
            with self._locked():
                self._unpin(source)
        return handle

    def evict_for(self, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None) -> bool:
        """As `Engine.evict_for`."""
        with self._locked():
            found = self._match("", tokens, prefix, max_cached_tokens)
            # `reserve` will copy the beginning of the unit, so all of it must stay, and pages that it will not copy.
            need, kept = self.pages_for(tokens) - len(found.shared), np.concatenate([found.shared, found.next_unit])
            return self._allocator.evict_slice(need, kept)

    def publish(self, handle: PageHandle, digests: Sequence[bytes]) -> None:
        """As `Engine.publish`."""
        with self._locked():
            if handle.alive:
                self._block_index.insert(handle._allocation.listed, digests)

    def match_prefix(self, digests: Sequence[bytes]) -> int:
        """As `Engine.match_prefix`."""
        with self._lock:
            return self._block_index.count_tokens(digests)

    def drop_cached(self) -> int:
        """As `Engine.drop_cached`."""
        # Deleted after the lock's release: it may have many nodes.
        dropped = self._block_index
        with self._locked():
            freed = self._allocator.drop_cached()
        del dropped
        return freed

    def uncache(self, handle: PageHandle) -> None:
        """As `Engine.uncache`."""
        with self._locked():
            if handle.alive:
                self._block_index.uncache(handle._allocation.listed)
        left = True
        while left:
            with self._locked():
                freed, left = self._block_index.remove_uncached()
                self._allocator.add_free(freed)

    def watch_prefixes(self, changed: PoolBlocksChanged | None) -> None:
        """As `Engine.watch_prefixes`."""
        with self._lock:
            self._block_index.watch(changed)

    def extend(self, handle: PageHandle, tokens: int) -> None:
        """Grow the handle to at least `tokens` tokens. Raises OutOfPages, and then changes nothing."""
        while self._evict_to_extend(handle, tokens):
            pass
        with self._locked():
            handle.check_alive()
            pages = handle._allocation.listed
            if (more := self.pages_for(tokens) - len(pages)) > 0:
                handle._allocation.pages = _array(np.concatenate([pages, self._allocator.allocate(more)]))

    def fork(
        self, handle: PageHandle, owner: str, shared_tokens: int, tokens: int, spare: PageHandle | None = None
    ) -> tuple[PageHandle, PageCopy | None]:
        """A new handle of capacity `tokens` that shares the full pages of the first `shared_tokens`.

        The caller must copy the partly filled page after them, if any. The pages of `spare`, which is freed, are
        used before free ones. Raises OutOfPages, and then changes nothing.
        """
        with self._locked():
            handle.check_alive()
            if not 0 <= shared_tokens <= min(tokens, handle.capacity):
                asked = f"{shared_tokens} tokens of {handle.capacity}"
                raise EngineError(f"{owner}: can't share {asked} in a fork of {tokens}")
            full, rest = divmod(shared_tokens, self.page_size)
            need, pages = self.pages_for(tokens) - full, handle._allocation.listed
            own = self._allocator.allocate(need) if spare is None else self._reuse_pages(spare, need)
            self._allocator.share(pages[:full])
            copy = PageCopy(int(pages[full]), int(own[0]), rest) if rest else None
            return self._handle(owner, np.concatenate([pages[:full], own])), copy

    def share_prefix(self, handle: PageHandle, prefix: Sequence[bytes], max_tokens: int) -> int:
        """As `Engine.share_prefix`."""
        with self._locked():
            allocation, pages = handle._allocation, handle._allocation.listed
            if not handle.alive or allocation.pins:
                return 0
            shared = self._match(handle.owner, max_tokens, prefix, None).shared
            differs = pages[: len(shared)] != shared
            own = pages[: len(shared)][differs]
            if not self._allocator.are_writable(own):
                return 0
            self._allocator.share(shared[differs])
            self._returns += self._allocator.release(own)
            allocation.pages = _array(np.concatenate([shared, pages[len(shared) :]]))
            return len(shared) * self.page_size

    @contextmanager
    def pin(self, handle: PageHandle, writes: range = range(0)) -> Iterator[array[int]]:
        """Keep the handle's pages from returning to the pool; yields them in token order.

        `writes` are the tokens about to be written. Raises EngineError if the handle is dead, or if a page to
        be written has other owners or is published.
        """
        with self._lock:
            handle.check_alive()
            allocation = handle._allocation
            if writes:
                self._check_writable(allocation, writes)
            allocation.pins += 1
        try:
            yield allocation.pages
        finally:
            with self._locked():
                self._unpin(allocation)

    @contextmanager
    def pin_batch(self, handles: Sequence[PageHandle], writes: Sequence[range]) -> Iterator[list[PageHandle]]:
        """Pin all of `handles`, each about to write the positions of its entry in `writes`, or none if some are dead.

        Yields the dead ones. Raises EngineError if a position lies outside its handle or in a shared or published page.
        """
        with self._lock:
            dead = [handle for handle in handles if not handle.alive]
            allocations = [] if dead else [handle._allocation for handle in handles]
            self._check_batch(allocations, writes)
            for allocation in allocations:
                allocation.pins += 1
        try:
            yield dead
        finally:
            with self._locked():
                for allocation in allocations:
                    self._unpin(allocation)

    def free(self, handle: PageHandle, digests: Sequence[bytes] = ()) -> None:
        """Free the handle; its pages return once unpinned. Caches `digests` (`Engine.free`)."""
        with self._locked():
            if handle.alive:
                self._block_index.insert(handle._allocation.listed, digests, sequence_ended=True)
                self._end_allocation(handle._allocation)

    def free_all(self) -> None:
        """Free every handle, and remove all published blocks."""
        self.drop_cached()
        with self._locked():
            for allocation in [allocation for allocation in self._allocations if allocation.active]:
                self._end_allocation(allocation)

    def stats(self) -> PoolStats:
        """Count pages."""
        with self._lock:
            free, cached = self._allocator.free, self._block_index.idle_pages
        return PoolStats(used=self.pages - free - cached, free=free, cached=cached, total=self.pages)

    def audit(self) -> dict[str, int]:
        """Check that pages are conserved; returns the number of pages by owner. A shared page counts for each owner.

        Owners that freed pages which are still pinned are listed with the suffix DRAINING. Raises EngineError with the
        ledger.
        """
        buffers = self._allocator.new_buffers()
        with self._lock:
            allocations = [(each.owner, each.active, each.pins, each.listed) for each in self._allocations]
            states = self._allocator.copy_states(*buffers)
        ledger: dict[str, int] = {}
        counts, faults = np.zeros(self.pages, np.int32), []
        for owner, active, pins, pages in allocations:
            name = owner if active else owner + DRAINING
            ledger[name] = ledger.get(name, 0) + len(pages)
            counts[pages] += 1
            if not active and pins <= 0:
                faults.append(f"{owner} freed {len(pages)} pages that did not return")
        faults += states.check(counts)
        node = 1
        while node:
            with self._lock:
                found, node = self._block_index.check_nodes(node)
            faults += found
        if faults:
            raise EngineError(f"page audit failed: {'; '.join(faults[:20])}; ledger {ledger}")
        return ledger

    @property
    def _block_index(self) -> CachedBlockIndex:
        return self._allocator.block_index

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and report changed blocks in it; after its release, report returned pages to the watcher."""
        with self._lock:
            before = self._returns
            yield
            self._block_index.notify()
            on_returned = self._on_returned if self._returns != before else None
        if on_returned is not None:
            on_returned()

    def _allocation(self, owner: str, pages: Pages) -> _Allocation:
        allocation = _Allocation(owner, _array(pages))
        self._allocations.add(allocation)
        return allocation

    def _handle(self, owner: str, pages: Pages, cached: int = 0) -> PageHandle:
        return PageHandle(self._allocation(owner, pages), self.page_size, self._device_pages, cached)

    def _match(self, owner: str, tokens: int, prefix: Sequence[bytes], max_cached_tokens: int | None) -> PrefixPages:
        """The cached beginning of a handle of `tokens` tokens."""
        most = tokens if max_cached_tokens is None else min(max_cached_tokens, tokens)
        if most < 0:
            raise EngineError(f"{owner}: can't reserve {tokens} tokens, {max_cached_tokens} of them cached")
        return self._block_index.match_prefix(prefix, most)

    def _evict_to_extend(self, handle: PageHandle, tokens: int) -> bool:
        """Evict a part of the pages that `extend` would evict; True if more are left."""
        with self._locked():
            more = self.pages_for(tokens) - len(handle.pages)
            return more > 0 and self._allocator.evict_slice(more, NO_PAGES)

    def _reuse_pages(self, spare: PageHandle, count: int) -> Pages:
        """Allocate `count` pages, first those of `spare`, which is freed; its other pages return to the pool."""
        spare.check_alive()
        allocation, pages = spare._allocation, spare._allocation.listed
        if allocation.pins or not self._allocator.are_writable(pages):
            raise EngineError(f"{allocation.owner}: its pages are in use, a fork can't use them")
        more = self._allocator.allocate(max(0, count - len(pages)))
        allocation.pages = _array(pages[count:])
        self._end_allocation(allocation)
        return np.concatenate([pages[:count], more])

    def _end_allocation(self, allocation: _Allocation) -> None:
        allocation.active = False
        self._return_pages(allocation)

    def _unpin(self, allocation: _Allocation) -> None:
        allocation.pins -= 1
        self._return_pages(allocation)

    def _return_pages(self, allocation: _Allocation) -> None:
        """Return an allocation's pages to the pool, if it has ended and nothing uses them."""
        if allocation.active or allocation.pins:
            return
        self._allocations.discard(allocation)
        self._returns += self._allocator.release(allocation.listed)

    def _check_writable(self, allocation: _Allocation, tokens: range) -> None:
        first, last = tokens[0] // self.page_size, tokens[-1] // self.page_size
        if last >= len(allocation.pages):
            raise EngineError(f"{allocation.owner}: token {tokens[-1]} lies beyond its {len(allocation.pages)} pages")
        if not self._allocator.are_writable(allocation.listed[first : last + 1]):
            raise EngineError(f"{allocation.owner}: a page is shared or published, {tokens} can't be written")

    def _check_batch(self, allocations: Sequence[_Allocation], writes: Sequence[range]) -> None:
        """As `_check_writable`, for many allocations at once, because every step does it."""
        size, pages, beyond = self.page_size, list[int](), False
        for allocation, tokens in zip(allocations, writes, strict=False):
            first, last, held = tokens.start // size, (tokens.stop - 1) // size, allocation.pages
            if last >= len(held):
                beyond = True
            elif first == last:
                pages.append(held[first])
            else:
                pages += held[first : last + 1]
        if beyond or not self._allocator.are_writable(np.array(pages, np.int64)):
            for allocation, tokens in zip(allocations, writes, strict=True):
                self._check_writable(allocation, tokens)


def _array(pages: Pages) -> array[int]:
    return array("q", pages.tobytes())
