"""The pages of a pool: how many owners each has, which are free, and which are taken when pages are allocated.

    allocate ──▶ owned by one ── share ──▶ owned by several
       ▲                  └──────release──────┘
     free ◀── evict ── cached (published, and without owner) ──share──▶ owned

Pages from number `device_pages` on are in host memory (docs/decisions/0021-one-pool-with-pages-in-two-homes.md).
Pure bookkeeping without a lock: the pool calls it with its lock held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.errors import OutOfPages
from baton.kv.cached_blocks import SLICE_NODES, SLICE_PAGES, CachedBlockIndex, Counts, Pages


@dataclass(frozen=True, slots=True)
class PageStates:
    """All pages at one moment: how many owners each has, whether it is cached, and, by home, which ones are free.

    `count` is how many are said to be cached, and `idle` how many of these have no owner, by home.
    """

    owners: Counts
    cached: NDArray[np.bool_]
    free: tuple[Pages, Pages]
    count: int
    idle: tuple[int, int]
    device_pages: int

    def check(self, counts: Counts) -> list[str]:
        """Contradictions, if these are the numbers of owners of all pages; empty if there are none."""
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
        if (found := tuple(int(np.count_nonzero(home)) for home in homes)) != self.idle:
            faults.append(f"{found} pages are cached without owner, counted {self.idle}")
        if (cached := np.count_nonzero(self.cached)) != self.count:
            faults.append(f"{cached} pages are cached, counted {self.count}")
        for page in np.flatnonzero((counts != self.owners) | ((free > 0) != ((counts == 0) & ~self.cached)))[:20]:
            state = "free" if free[page] else "cached" if idle[page] else "not free"
            faults.append(f"page {page}: count {self.owners[page]}, owners {counts[page]}, {state}")
        return faults


class PageAllocator:
    """Allocator of page ids; `block_index` has the cached pages."""

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
        """Pages that can be allocated if the cached ones among `shared` must stay."""
        idle = sum(len(pages) - np.count_nonzero(self._owners[pages]) for pages in shared)
        return self.free + self.block_index.idle_pages - int(idle)

    def allocate(self, count: int) -> Pages:
        """Take `count` pages for one owner; raises OutOfPages, and then changes nothing."""
        if count > (available := self.available()):
            raise OutOfPages(count, available, len(self._owners))
        taken = []
        for host, wanted in enumerate(self._homes_of(count)):
            while (missing := wanted - self._free[host]) > 0:
                self._evict(bool(host), missing)
            self._free[host] = top = self._free[host] - wanted
            taken.append(self._stacks[host][top : top + wanted][::-1])
        pages = np.concatenate(taken)
        self._owners[pages] = 1
        return pages

    def evict_slice(self, count: int, kept: Pages) -> bool:
        """Evict a slice of what `allocate` would evict, but none of the pages `kept`; True if more is left.

        Nothing is evicted if fewer than `count` pages are available beside `kept`, which are owned or cached.
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
            host = self._free[False] >= homes[False]
            self._evict(host, min(homes[host] - self._free[host], most - self.free))
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
        for host, own in enumerate((pages[~in_host], pages[in_host]) if in_host.any() else (pages,)):
            top = self._free[host]
            self._free[host] = end = top + len(own)
            self._stacks[host][top:end] = own

    def are_writable(self, pages: Pages) -> bool:
        """Whether each of the pages has one owner, and is not published."""
        return bool((self._owners[pages] == 1).all()) and not self.block_index.are_cached(pages)

    def new_states(self) -> PageStates:
        """Memory for `states`, made without the lock: the page faults of 3 MB take longer than the copies."""
        free = self._stacks[False].copy(), self._stacks[True].copy()
        cached = np.ones(len(self._owners), np.bool_)
        return PageStates(self._owners.copy(), cached, free, 0, (0, 0), self._device_pages)

    def states(self, room: PageStates) -> PageStates:
        """A copy of the states of all pages in the memory of `room`, which takes a fraction of a millisecond."""
        index = self.block_index
        for copy, stack, top in zip(room.free, self._stacks, self._free, strict=True):
            copy[:top] = stack[:top]
        room.owners[:] = self._owners
        index.cached(room.cached)
        free = room.free[False][: self._free[False]], room.free[True][: self._free[True]]
        idle = index.idle_pages_in(False), index.idle_pages_in(True)
        return PageStates(room.owners, room.cached, free, index.cached_pages, idle, self._device_pages)

    def _homes_of(self, count: int, spared: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """How many of `count` pages are taken on the device, and how many in host memory.

        `spared`: the cached pages of either that are not taken.
        """
        room = (self._free[home] + self.block_index.idle_pages_in(home) - spared[home] for home in (False, True))
        device, host = room
        on_device = count if count <= device else 0 if count <= host else device
        return on_device, count - on_device

    def _has_free(self, homes: tuple[int, int]) -> bool:
        """Whether so many pages are free in either home."""
        return self._free[False] >= homes[False] and self._free[True] >= homes[True]

    def _evict(self, host: bool, count: int) -> None:
        """Evict up to `count` pages from the least recently used node."""
        self.add_free(self.block_index.evict(host, count))
