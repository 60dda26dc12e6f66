"""The cached blocks of a page pool: runs of pages, found again by the digests of what they hold.

A *run* is the least number of tokens that is both whole pages and whole blocks: lcm(page, block) tokens. Its key is the
digest of its last block, whose chain (`baton.kv.hashing`) covers every token before. Runs form trees, and one is here
only while the one before it in its chain is, so a look-up may end at its first miss. The beginning of
a run is found by its inner blocks. Several runs may contain the same inner blocks. The beginning is always copied,
because sequences that continue differently can't share a page of the run. When a sequence ends within a run, it leaves
such a beginning as a *part* of a run, which has inner blocks only.

A run that has pages without an owner is *idle*, and may be evicted: the least recently used goes first, of those on the
device or of those in host memory, as is asked for (a run counts as where its first page is). When an owner
frees its pages, the runs of its chain become the most recently used, from the last to the first. So the end of a chain
is evicted before its beginning. If two sequences have computed the same run, the first that publishes it is cached,
and the copy of the second is not. The second may then own the end of a chain whose beginning is idle. When that
beginning is evicted, all runs after it are removed with it; their owner may publish them again, in its own pages.

Pure bookkeeping without a lock: the pool calls it with its lock held, and counts the owners of each page.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

PrefixesChanged = Callable[[Sequence[bytes], Sequence[bytes]], object]
"""Called with the digests of blocks that were added, and of those that were removed."""


class CachedRun:
    """Consecutive `blocks`, by their digests, in `pages`; the last digest is its key.

    `idle` counts its pages without owner. `inner` are the blocks by which its beginning is found: all of a part's. The
    runs that follow it are a list through `child` and their `next` and `previous`.
    """

    __slots__ = ("blocks", "child", "idle", "inner", "next", "pages", "parent", "previous")

    def __init__(
        self, blocks: tuple[bytes, ...], pages: tuple[int, ...], parent: CachedRun | None, *, part: bool = False
    ) -> None:
        self.blocks = blocks
        self.inner = blocks if part else blocks[:-1]
        self.pages = pages
        self.idle = 0
        self.parent = parent
        self.child: CachedRun | None = None
        self.next: CachedRun | None = None
        self.previous: CachedRun | None = None
        if parent is not None:
            if parent.child is not None:
                self.next = parent.child
                parent.child.previous = self
            parent.child = self

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole run, and not a part."""
        return len(self.inner) < len(self.blocks)

    def unlink(self) -> None:
        """Leave the list of its parent."""
        if self.next is not None:
            self.next.previous = self.previous
        if self.previous is not None:
            self.previous.next = self.next
        elif self.parent is not None:
            self.parent.child = self.next
        self.parent = self.next = self.previous = None


class CachedBlockIndex:
    """Runs by key, and in which order idle ones are evicted. `owners` is the pool's count for each page.

    Pages from number `device_pages` on are in host memory.
    """

    def __init__(self, owners: Sequence[int], page_size: int, block_size: int, device_pages: int) -> None:
        self.run_tokens = math.lcm(page_size, block_size)
        self._idle = [0, 0]
        self._owners = owners
        self._device_pages = device_pages
        self._page_size = page_size
        self._block_size = block_size
        self._run_pages = self.run_tokens // page_size
        self._run_blocks = self.run_tokens // block_size
        self._runs: dict[bytes, CachedRun] = {}
        self._inner: dict[bytes, CachedRun] = {}
        self._others: dict[bytes, dict[CachedRun, None]] = {}
        """Further runs that contain an inner block, where there are several."""
        self._run_of: list[CachedRun | None] = [None] * len(owners)
        self._lrus: tuple[OrderedDict[CachedRun, None], OrderedDict[CachedRun, None]] = (OrderedDict(), OrderedDict())
        self._stored: list[bytes] = []
        self._dropped: list[bytes] = []
        self._changed: PrefixesChanged | None = None

    @property
    def idle_pages(self) -> int:
        """Cached pages without owner."""
        return sum(self._idle)

    def idle_pages_in(self, host: bool) -> int:
        """Cached pages on the device, or in host memory."""
        return self._idle[host]

    def is_cached(self, page: int) -> bool:
        """Whether the page belongs to a run, and so must not be written."""
        return self._run_of[page] is not None

    def count_tokens(self, digests: Sequence[bytes]) -> int:
        """The number of leading tokens of the chain that are cached."""
        runs, _, blocks = self._match(digests, len(digests))
        return len(runs) * self.run_tokens + blocks * self._block_size

    def match_prefix(self, digests: Sequence[bytes], max_tokens: int) -> tuple[list[int], list[int], int]:
        """The pages of the chain's leading cached tokens, up to `max_tokens`, and the number of these tokens.

        First the pages of whole runs, then those of the run of which only the beginning matches.
        """
        wanted = -(-max_tokens // self.run_tokens) * self._run_blocks
        runs, part, blocks = self._match(digests, wanted)
        tokens = min(max_tokens, len(runs) * self.run_tokens + blocks * self._block_size)
        whole, rest = divmod(tokens, self.run_tokens)
        if whole < len(runs):
            part = runs[whole]
        cut = [] if part is None else list(part.pages[: -(-rest // self._page_size)])
        return [page for run in runs[:whole] for page in run.pages], cut, tokens

    def whole_run(self, pages: Sequence[int]) -> list[int]:
        """All pages of the run that begins with `pages`; none if these are none."""
        run = self._run_of[pages[0]] if pages else None
        return [] if run is None else list(run.pages)

    def insert(self, pages: Sequence[int], digests: Sequence[bytes], *, ends: bool = False) -> None:
        """Cache the runs of a sequence that owns `pages`; runs that are already cached stay in their pages.

        Only whole runs, unless the sequence `ends`: then nothing is written after its last block any more.
        """
        size, width = self._run_blocks, self._run_pages
        whole = min(len(digests) // size, len(pages) // width)
        # A run is cached only while the one before it is, so stop at the first that is not.
        known = bisect.bisect_left(range(1, whole + 1), True, key=lambda end: digests[end * size - 1] not in self._runs)
        parent = self._runs[digests[known * size - 1]] if known else None
        for index in range(known, whole):
            own, blocks = pages[index * width : (index + 1) * width], digests[index * size : (index + 1) * size]
            parent = self._index(CachedRun(tuple(blocks), tuple(own), parent))
            if parent is None:
                return
        blocks = digests[whole * size : (whole + 1) * size] if ends else ()
        own = pages[whole * width :][: -(-len(blocks) * self._block_size // self._page_size)]
        if not 0 < len(blocks) < size or len(own) * self._page_size < len(blocks) * self._block_size:
            return
        if blocks[-1] not in self._inner and blocks[-1] not in self._runs:
            self._index(CachedRun(tuple(blocks), tuple(own), parent, part=True))

    def acquire(self, pages: Sequence[int]) -> None:
        """Note that pages have their first owner."""
        for page in pages:
            run = self._run_of[page]
            if run is not None:
                self._idle[self._in_host(page)] -= 1
                run.idle -= 1
                if not run.idle:
                    del self._lru_of(run)[run]

    def release(self, pages: Sequence[int]) -> list[int]:
        """Note that an owner of `pages`, in token order, has freed them; returns those neither owned nor cached."""
        owners, run_of = self._owners, self._run_of
        last: CachedRun | None = None
        uncached = []
        for page in reversed(pages):
            run = run_of[page]
            if run is not None:
                last = last or run
            if not owners[page]:
                if run is None:
                    uncached.append(page)
                else:
                    self._idle[self._in_host(page)] += 1
                    run.idle += 1
                    self._lru_of(run)[run] = None
        while last is not None:
            # Also mark idle runs in pages of other sequences: the whole chain was in use.
            if last.idle:
                self._lru_of(last).move_to_end(last)
            last = last.parent
        return uncached

    def evict(self, host: bool) -> list[int]:
        """Remove the least recently used run with a page without owner there; returns its pages without owner.

        Those of the runs after it too, wherever they are. The caller knows that there is one.
        """
        lru = self._lrus[host] or self._lrus[not host]
        return self._remove(next(iter(lru)))

    def remove(self, pages: Sequence[int]) -> list[int]:
        """Remove the runs in these pages, and all runs after them; returns their pages without owner."""
        freed: list[int] = []
        for page in pages:
            run = self._run_of[page]
            if run is not None:
                freed += self._remove(run)
        return freed

    def clear(self) -> list[int]:
        """Remove all runs; returns their pages without owner."""
        begins = [run for run in self._runs.values() if run.parent is None]
        return [page for run in begins for page in self._remove(run)]

    def watch(self, changed: PrefixesChanged | None) -> None:
        """See `Engine.watch_prefixes`."""
        self.notify()
        self._changed = changed
        if changed is not None and self._runs:
            changed([*self._inner, *(name for name, run in self._runs.items() if run.is_whole)], [])

    def notify(self) -> None:
        """Report the changes since the last call to the watcher."""
        if self._stored or self._dropped:
            stored, self._stored = self._stored, []
            dropped, self._dropped = self._dropped, []
            if self._changed is not None:
                self._changed(stored, dropped)

    def check_integrity(self) -> list[str]:
        """Contradictions between keys, pages and the order of eviction; empty if there are none."""
        faults, idle_pages = [], 0
        for name, run in self._runs.items():
            idle = sum(not self._owners[page] for page in run.pages)
            idle_pages += idle
            is_idle = run in self._lru_of(run)
            if run.idle != idle or is_idle != (idle > 0):
                faults.append(f"run {name.hex()[:16]}: {idle} idle pages, counted {run.idle}, {is_idle=}")
            if run.blocks[-1] != name or any(self._run_of[page] is not run for page in run.pages):
                faults.append(f"run {name.hex()[:16]}: its pages {run.pages} belong to another")
            if run.parent is not None and self._runs.get(run.parent.blocks[-1]) is not run.parent:
                faults.append(f"run {name.hex()[:16]}: the run before it is gone")
        cached = sum(run is not None for run in self._run_of)
        if cached != (listed := sum(len(run.pages) for run in self._runs.values())):
            faults.append(f"{cached} pages are in runs, {len(self._runs)} runs have {listed}")
        idle_runs = [run for lru in self._lrus for run in lru]
        if idle_pages != self.idle_pages or any(self._runs.get(run.blocks[-1]) is not run for run in idle_runs):
            faults.append(f"{idle_pages} idle pages, counted {self.idle_pages}, {len(idle_runs)} idle runs")
        return faults

    def _in_host(self, page: int) -> bool:
        return page >= self._device_pages

    def _lru_of(self, run: CachedRun) -> OrderedDict[CachedRun, None]:
        return self._lrus[self._in_host(run.pages[0])]

    def _index(self, run: CachedRun) -> CachedRun | None:
        """Add a new run; does nothing and returns None if one of its pages is in another run.

        This happens because a fork may share only the first pages of a run.
        """
        if any(self._run_of[page] is not None for page in run.pages):
            run.unlink()
            return None
        self._runs[run.blocks[-1]] = run
        for page in run.pages:
            self._run_of[page] = run
        self._stored += self._add_blocks(run)
        return run

    def _add_blocks(self, run: CachedRun) -> list[bytes]:
        """Enter the run's blocks in the index; returns the digests that no other run has."""
        new, inner = [], self._inner
        for digest in run.inner:
            if digest in inner:
                self._others.setdefault(digest, {})[run] = None
            else:
                inner[digest] = run
                new.append(digest)
        return [*new, *run.blocks[len(run.inner) :]]

    def _drop_blocks(self, run: CachedRun) -> list[bytes]:
        """Undo `_add_blocks`; returns the digests that no other run has."""
        gone, inner = [], self._inner
        for digest in run.inner:
            others = self._others.get(digest)
            if others is None:
                del inner[digest]
                gone.append(digest)
                continue
            listed = run
            if inner[digest] is run:
                inner[digest] = listed = next(iter(others))
            del others[listed]
            if not others:
                del self._others[digest]
        return [*gone, *run.blocks[len(run.inner) :]]

    def _match(self, digests: Sequence[bytes], wanted: int) -> tuple[list[CachedRun], CachedRun | None, int]:
        """The leading runs of the chain; then one that begins with the next blocks, and how many of these.

        Looks at the first `wanted` digests only.
        """
        runs, size, found = self._runs, self._run_blocks, list[CachedRun]()
        last: CachedRun | None = None
        for name in digests[size - 1 : wanted : size]:
            run = runs.get(name)
            # Digests that are not a chain count as unknown.
            if run is None or run.parent is not last or not run.is_whole:
                break
            found.append(run)
            last = run
        begun = len(found) * size
        for blocks in range(min(size - 1, min(wanted, len(digests)) - begun), 0, -1):
            name = digests[begun + blocks - 1]
            part = self._inner.get(name)
            if part is not None and part.parent is last and part.blocks[blocks - 1 : blocks] == (name,):
                return found, part, blocks
        return found, None, 0

    def _remove(self, first: CachedRun) -> list[int]:
        """Remove a run and all runs after it; returns their pages without owner."""
        runs, run_of, owners = self._runs, self._run_of, self._owners
        first.unlink()
        freed, pending = [], [first]
        while pending:
            run = pending.pop()
            while run.child is not None:
                pending.append(run.child)
                run.child.unlink()
            del runs[run.blocks[-1]]
            for page in run.pages:
                run_of[page] = None
                if not owners[page]:
                    freed.append(page)
                    self._idle[self._in_host(page)] -= 1
            if run.idle:
                del self._lru_of(run)[run]
            self._dropped += self._drop_blocks(run)
        return freed
