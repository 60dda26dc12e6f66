"""The pages of a pool: how many owners each has, which are free, and which are taken when pages are allocated.

    allocate ──▶ owned by one ── share ──▶ owned by several
       ▲                  └──────release──────┘
     free ◀── evict ── cached (published, and without owner) ──share──▶ owned

Pages from number `device_pages` on are in host memory (docs/decisions/0021-one-pool-with-pages-in-two-homes.md).
Pure bookkeeping without a lock: the pool calls it with its lock held.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import OutOfPages
from baton.kv.cached_blocks import CachedBlockIndex


class PageAllocator:
    """See the module's text; `block_index` has the cached pages."""

    def __init__(self, pages: int, page_size: int, block_size: int, device_pages: int) -> None:
        self._device_pages = device_pages
        # On the device, and in host memory.
        self._free = [list(reversed(range(device_pages))), list(reversed(range(device_pages, pages)))]
        self._owners = [0] * pages
        self.block_index = CachedBlockIndex(self._owners, page_size, block_size, device_pages)

    @property
    def free(self) -> int:
        """Number of pages that are neither owned nor cached."""
        return sum(map(len, self._free))

    def available(self, shared: Sequence[int] = ()) -> int:
        """Pages that can be allocated if the cached ones among `shared` must stay."""
        return self.free + self.block_index.idle_pages - sum(not self._owners[page] for page in shared)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages for one owner; raises OutOfPages, and then changes nothing."""
        if count > (available := self.available()):
            raise OutOfPages(count, available, len(self._owners))
        taken: list[int] = []
        for host, wanted in enumerate(self._homes_of(count)):
            self._evict(bool(host), wanted)
            taken += [self._free[host].pop() for _ in range(wanted)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def missing(self, count: int) -> int:
        """Cached pages that must be evicted before `count` pages are free where `allocate` takes them."""
        return sum(max(0, wanted - len(free)) for wanted, free in zip(self._homes_of(count), self._free, strict=True))

    def evict(self, count: int, size: int) -> bool:
        """Evict `size` of the cached pages that `allocate` would evict or a few more; False if there are fewer."""
        if self.missing(count) <= size or count > self.available():
            return False
        for host, wanted in enumerate(self._homes_of(count)):
            before = len(self._free[host])
            self._evict(bool(host), min(wanted, before + size))
            size -= max(0, len(self._free[host]) - before)
        return True

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to each of `pages`, which are owned or cached."""
        owners = self._owners
        self.block_index.acquire([page for page in pages if not owners[page]])
        for page in pages:
            owners[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Take one owner from each of `pages`, in token order; returns how many of them have none left."""
        owners, without = self._owners, 0
        for page in pages:
            owners[page] -= 1
            without += not owners[page]
        self.add_free(self.block_index.release(pages))
        return without

    def add_free(self, pages: Sequence[int]) -> None:
        """Make pages free that are neither owned nor cached any more."""
        for page in pages:
            self._free[page >= self._device_pages].append(page)

    def is_writable(self, page: int) -> bool:
        """Whether the page has one owner, and is not published."""
        return self._owners[page] == 1 and not self.block_index.is_cached(page)

    def check_integrity(self, counts: Sequence[int]) -> list[str]:
        """Contradictions, if these are the numbers of owners of all pages; empty if there are none."""
        faults = []
        free = {page for pages in self._free for page in pages}
        if len(free) != self.free or any(page >= self._device_pages for page in self._free[False]):
            faults.append("a page is twice in the free lists, or in the wrong one")
        for page, count in enumerate(counts):
            cached = not count and self.block_index.is_cached(page)
            if count != self._owners[page] or (page in free) != (not count and not cached):
                state = "free" if page in free else "cached" if cached else "not free"
                faults.append(f"page {page}: count {self._owners[page]}, owners {count}, {state}")
        return faults + self.block_index.check_integrity()

    def _homes_of(self, count: int) -> tuple[int, int]:
        """How many of `count` pages are taken on the device, and how many in host memory."""
        device, host = (len(self._free[home]) + self.block_index.idle_pages_in(home) for home in (False, True))
        on_device = count if count <= device else 0 if count <= host else device
        return on_device, count - on_device

    def _evict(self, host: bool, count: int) -> None:
        """Evict the least recently used cached pages of the device, or of host memory, until `count` are free there."""
        while len(self._free[host]) < count:
            self.add_free(self.block_index.evict(host))
