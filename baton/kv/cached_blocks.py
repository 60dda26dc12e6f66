"""What a page pool keeps for its prefixes: runs of pages, found again by the digests of what they hold.

A *unit* is the least run of tokens that is both whole pages and whole blocks: lcm(page, block) tokens. It is named by
the digest of the block that ends it, whose chain (`baton.kv.hashing`) covers every token before. Units form trees, and
one is here only while the one before it in its chain is: a look-up that ends at its first miss has missed nothing. The
beginning of a unit is found by its inner blocks, which several units may have in common, but it is only ever copied:
sequences that go on differently have no page of the unit in common. What a sequence leaves of its last unit at its end
is such a beginning, in a *part* of a unit, which has inner blocks only.

A unit with pages that nobody owns is *idle*, and stands in the line of eviction: least recently used first. Whenever an
owner leaves, the units of its chain go to the line's end from the last to the first, so that the end of a chain is
evicted before its beginning. If two sequences have computed the same unit, the first to publish it is named, and the
second owns a copy without a name. Such a sequence may own the end of a chain whose beginning is idle. When that
beginning is evicted, the names of all that follows it go with it; its owner may publish them again, in its own pages.

Pure bookkeeping without a lock: the pool has it, and counts the owners of its pages.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

PrefixesChanged = Callable[[Sequence[bytes], Sequence[bytes]], object]
"""Gets the digests of blocks that are found from now on, and of those that are no longer."""


class _Unit:
    """`blocks` are the digests of its blocks, the last of which is its name; `idle` counts its pages without owner.

    `inner` are those by which its beginning is found: all of a part's. The units that follow it are a list through
    `child` and their `next` and `previous`.
    """

    __slots__ = ("blocks", "child", "idle", "inner", "next", "pages", "parent", "previous")

    def __init__(
        self, blocks: tuple[bytes, ...], pages: tuple[int, ...], parent: _Unit | None, *, part: bool = False
    ) -> None:
        self.blocks = blocks
        self.inner = blocks if part else blocks[:-1]
        self.pages = pages
        self.idle = 0
        self.parent = parent
        self.child: _Unit | None = None
        self.next: _Unit | None = None
        self.previous: _Unit | None = None
        if parent is not None:
            if parent.child is not None:
                self.next = parent.child
                parent.child.previous = self
            parent.child = self

    @property
    def whole(self) -> bool:
        """Whether it is no part."""
        return len(self.inner) < len(self.blocks)

    def leave(self) -> None:
        """Leave the list of its parent."""
        if self.next is not None:
            self.next.previous = self.previous
        if self.previous is not None:
            self.previous.next = self.next
        elif self.parent is not None:
            self.parent.child = self.next
        self.parent = self.next = self.previous = None


class Published:
    """Units by name, and the line of those that can be evicted. `owners` is the pool's count for each page."""

    def __init__(self, owners: Sequence[int], page_size: int, block_size: int) -> None:
        self.unit_tokens = math.lcm(page_size, block_size)
        self.idle_pages = 0
        self._owners = owners
        self._page_size = page_size
        self._block_size = block_size
        self._unit_pages = self.unit_tokens // page_size
        self._unit_blocks = self.unit_tokens // block_size
        self._units: dict[bytes, _Unit] = {}
        self._inner: dict[bytes, dict[_Unit, None]] = {}
        self._unit_of: list[_Unit | None] = [None] * len(owners)
        self._line: OrderedDict[_Unit, None] = OrderedDict()
        self._stored: list[bytes] = []
        self._dropped: list[bytes] = []
        self._changed: PrefixesChanged | None = None

    def named(self, page: int) -> bool:
        """Whether the page belongs to a unit, and so must not be written."""
        return self._unit_of[page] is not None

    def count(self, digests: Sequence[bytes]) -> int:
        """Leading tokens of the chain that are here."""
        run, _, blocks = self._run(digests)
        return len(run) * self.unit_tokens + blocks * self._block_size

    def find(self, digests: Sequence[bytes], most: int) -> tuple[list[int], list[int], int]:
        """Where the leading tokens of the chain are, `most` of them, and how many they are.

        First the pages of whole units, then those of the unit of which only the beginning is wanted.
        """
        wanted = -(-most // self.unit_tokens) * self._unit_blocks
        run, part, blocks = self._run(digests[:wanted])
        tokens = min(most, len(run) * self.unit_tokens + blocks * self._block_size)
        whole, rest = divmod(tokens, self.unit_tokens)
        if whole < len(run):
            part = run[whole]
        cut = [] if part is None else list(part.pages[: -(-rest // self._page_size)])
        return [page for unit in run[:whole] for page in unit.pages], cut, tokens

    def add(self, pages: Sequence[int], digests: Sequence[bytes], *, ends: bool = False) -> None:
        """Name the units of a sequence that owns `pages`; known names stay where they are.

        As far as they are whole, unless the sequence `ends`, so that nothing is written behind its last block.
        """
        size, width = self._unit_blocks, self._unit_pages
        whole = min(len(digests) // size, len(pages) // width)
        # A unit is here only while the one before it is, so none behind the first that lacks.
        known = bisect.bisect_left(
            range(1, whole + 1), True, key=lambda end: digests[end * size - 1] not in self._units
        )
        parent = self._units[digests[known * size - 1]] if known else None
        for index in range(known, whole):
            own, blocks = pages[index * width : (index + 1) * width], digests[index * size : (index + 1) * size]
            parent = self._name(_Unit(tuple(blocks), tuple(own), parent))
            if parent is None:
                return
        blocks = digests[whole * size : (whole + 1) * size] if ends else ()
        own = pages[whole * width :][: -(-len(blocks) * self._block_size // self._page_size)]
        if not 0 < len(blocks) < size or len(own) * self._page_size < len(blocks) * self._block_size:
            return
        if blocks[-1] not in self._inner and blocks[-1] not in self._units:
            self._name(_Unit(tuple(blocks), tuple(own), parent, part=True))

    def taken(self, pages: Sequence[int]) -> None:
        """Pages have their first owner."""
        unit_of, line = self._unit_of, self._line
        for page in pages:
            unit = unit_of[page]
            if unit is not None:
                self.idle_pages -= 1
                unit.idle -= 1
                if not unit.idle:
                    del line[unit]

    def left(self, pages: Sequence[int]) -> list[int]:
        """An owner of `pages`, in token order, has left: those without owner or name, to be freed."""
        owners, unit_of, line = self._owners, self._unit_of, self._line
        last: _Unit | None = None
        nameless = []
        for page in reversed(pages):
            unit = unit_of[page]
            if unit is not None:
                last = last or unit
            if not owners[page]:
                if unit is None:
                    nameless.append(page)
                else:
                    self.idle_pages += 1
                    unit.idle += 1
                    line[unit] = None
        while last is not None:
            # Also what is idle in pages that were another's: the whole chain was in use.
            if last.idle:
                line.move_to_end(last)
            last = last.parent
        return nameless

    def evict(self, count: int) -> list[int]:
        """Forget the units that are first in line; their pages without owner, `count` or more if there are as many."""
        freed: list[int] = []
        while len(freed) < count and self._line:
            freed += self._forget(next(iter(self._line)))
        return freed

    def forget(self, pages: Sequence[int]) -> list[int]:
        """Forget the units in these pages, and all that follow them; their pages without owner."""
        freed: list[int] = []
        for page in pages:
            unit = self._unit_of[page]
            if unit is not None:
                freed += self._forget(unit)
        return freed

    def forget_all(self) -> list[int]:
        """Forget all units; their pages without owner."""
        begins = [unit for unit in self._units.values() if unit.parent is None]
        return [page for unit in begins for page in self._forget(unit)]

    def watch(self, changed: PrefixesChanged | None) -> None:
        """See `Engine.watch_prefixes`."""
        self.tell()
        self._changed = changed
        if changed is not None and self._units:
            changed([*self._inner, *(name for name, unit in self._units.items() if unit.whole)], [])

    def tell(self) -> None:
        """Tell the watcher of what has changed since the last call."""
        if self._stored or self._dropped:
            stored, self._stored = self._stored, []
            dropped, self._dropped = self._dropped, []
            if self._changed is not None:
                self._changed(stored, dropped)

    def faults(self) -> list[str]:
        """Where names, pages and the line don't agree."""
        faults, idle_pages = [], 0
        for name, unit in self._units.items():
            idle = sum(not self._owners[page] for page in unit.pages)
            idle_pages += idle
            if unit.idle != idle or (unit in self._line) != (idle > 0):
                faults.append(f"unit {name.hex()[:16]}: {idle} idle pages, counted {unit.idle}, {unit in self._line=}")
            if unit.blocks[-1] != name or any(self._unit_of[page] is not unit for page in unit.pages):
                faults.append(f"unit {name.hex()[:16]}: its pages {unit.pages} are named otherwise")
            if unit.parent is not None and self._units.get(unit.parent.blocks[-1]) is not unit.parent:
                faults.append(f"unit {name.hex()[:16]}: the unit before it is gone")
        named = sum(unit is not None for unit in self._unit_of)
        if named != (listed := sum(len(unit.pages) for unit in self._units.values())):
            faults.append(f"{named} pages have names, {len(self._units)} units have {listed}")
        if idle_pages != self.idle_pages or any(self._units.get(unit.blocks[-1]) is not unit for unit in self._line):
            faults.append(f"{idle_pages} pages are cached, counted {self.idle_pages}, {len(self._line)} units in line")
        return faults

    def _name(self, unit: _Unit) -> _Unit | None:
        """Take a new unit; None, and nothing is done, if one of its pages is in another.

        That is so because a fork may share no more than the first pages of one.
        """
        if any(self._unit_of[page] is not None for page in unit.pages):
            unit.leave()
            return None
        self._units[unit.blocks[-1]] = unit
        for page in unit.pages:
            self._unit_of[page] = unit
        self._stored += self._enter(unit)
        return unit

    def _enter(self, unit: _Unit) -> list[bytes]:
        """Digests of the blocks that no other unit has."""
        new = []
        for digest in unit.inner:
            holders = self._inner.get(digest)
            if holders is None:
                self._inner[digest] = {unit: None}
                new.append(digest)
            else:
                holders[unit] = None
        return [*new, *unit.blocks[len(unit.inner) :]]

    def _strike(self, unit: _Unit) -> list[bytes]:
        """Undo `_enter`."""
        gone = []
        for digest in unit.inner:
            holders = self._inner[digest]
            del holders[unit]
            if not holders:
                del self._inner[digest]
                gone.append(digest)
        return [*gone, *unit.blocks[len(unit.inner) :]]

    def _run(self, digests: Sequence[bytes]) -> tuple[list[_Unit], _Unit | None, int]:
        """The units that are here, from the first on, of the chain with these blocks; then a unit that begins with the
        next blocks of the chain, and how many of them."""
        units, size, run = self._units, self._unit_blocks, list[_Unit]()
        last: _Unit | None = None
        for name in digests[size - 1 :: size]:
            unit = units.get(name)
            # Digests that are no chain lead nowhere, as if they were unknown.
            if unit is None or unit.parent is not last or not unit.whole:
                break
            run.append(unit)
            last = unit
        begun = len(run) * size
        for blocks in range(min(size - 1, len(digests) - begun), 0, -1):
            name = digests[begun + blocks - 1]
            part = next(iter(self._inner.get(name, ())), None)
            if part is not None and part.parent is last and part.blocks[blocks - 1 : blocks] == (name,):
                return run, part, blocks
        return run, None, 0

    def _forget(self, first: _Unit) -> list[int]:
        """Forget a unit and all that follow it; those of their pages that nobody owns."""
        units, unit_of, owners = self._units, self._unit_of, self._owners
        first.leave()
        freed, going = [], [first]
        while going:
            unit = going.pop()
            while unit.child is not None:
                going.append(unit.child)
                unit.child.leave()
            del units[unit.blocks[-1]]
            for page in unit.pages:
                unit_of[page] = None
                if not owners[page]:
                    freed.append(page)
            if unit.idle:
                del self._line[unit]
                self.idle_pages -= unit.idle
            self._dropped += self._strike(unit)
        return freed
