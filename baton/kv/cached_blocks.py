"""The cached blocks of a page pool: a tree of nodes, which are found by the digests of the blocks in their pages.

A *unit* is the shortest span of tokens that fills whole pages and whole blocks: lcm(page, block) tokens. A *node* has
consecutive units of one chain; its children continue the chain in different ways. For example, sequence A publishes ten
units, and B the first six of A and two of its own:

    root ── A1 … A10        then        root ── A1 … A6 ┬─ A7 … A10
                                                        └─ B7 B8

A digest covers every token before it (`baton.kv.hashing`). So a node is found by the last block of its first unit. Then
a binary search counts how many of its units match: of A1 … A10, six match the chain of B. A prompt of a million tokens
is one node, unless others share its beginning. So the work of a look-up, a reservation or an eviction depends on the
number of nodes in a chain; numpy does the rest, for all pages at once.

The beginning of a unit is found by its inner blocks. Several nodes may begin with the same inner blocks. The beginning
is always copied, because sequences that continue differently can't share a page of the unit. When a sequence ends
within a unit, it leaves such a beginning as a *partial node*: a node of inner blocks only, without children.

A node that has pages without an owner is *idle*. An eviction names a home, the device or host memory, and begins at the
end of the least recently used idle node there. A unit belongs to the home of its first page, and all units of a node
are in the same home. When an owner frees its pages, the nodes of its chain become the most recently used, from the last
to the first, so a child is evicted before its parent. The node in which the chain ends is split there, because its rest
was not used; a node and its only child become one. If two sequences have computed the same unit, the first that
publishes it is cached, and the copy of the second is not. The second may then own a node whose parent is idle. When the
parent is evicted, so is the node; its owner may publish it again, in its own pages.

Nodes are numbers, and their fields are in arrays, because the garbage collector would visit objects. Pure
bookkeeping without a lock: the pool calls it with its lock held, and counts the owners of each page.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.kv.hashing import DIGEST_BYTES, PackedDigests

PoolBlocksChanged: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes] | None], object]
"""Called with the digests of added blocks and of removed blocks; the latter are None if all were removed."""

Pages: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int32]

NO_PAGES: Pages = np.empty(0, np.int64)
_ROOT, _UNCACHED, _HEADS, _FIRST = 0, 1, (2, 3), 4
SLICE_NODES, SLICE_PAGES = 32, 1 << 14
"""The most that is evicted, removed or checked at once, which takes about a millisecond."""

_BUCKETS = 256
"""Number of dicts of names, by the last byte of a digest: a single large dict takes many milliseconds to grow."""


class Home(IntEnum):
    """The memory of a page: the device's, or the host's."""

    DEVICE = 0
    HOST = 1


class PrefixPages(NamedTuple):
    """Pages with the first `tokens` tokens of a chain. `shared` has the whole units, in token order.

    The tokens after them are in `cut`, the first pages of the next cached unit, whose pages are `next_unit`.
    """

    shared: Pages
    cut: Pages
    next_unit: Pages
    tokens: int


class _Found(NamedTuple):
    """The place in the tree up to which a chain is cached: `node` is the last node, of which `units` units match.

    `whole` counts these units and all units of the nodes before. The unit that follows in `begun`, which is `node` or
    its child, begins with the next `blocks` blocks of the chain; 0 if there is no such unit.
    """

    node: int
    units: int
    whole: int
    begun: int
    blocks: int


class CachedBlockIndex:
    """The tree, and the order of eviction. `owners` has the number of owners of each page; the pool counts them.

    Pages from number `device_pages` on are in host memory.
    """

    def __init__(self, owners: Counts, page_size: int, block_size: int, device_pages: int) -> None:
        self.unit_tokens = math.lcm(page_size, block_size)
        self._owners = owners
        self._device_pages = device_pages
        self._page_size = page_size
        self._block_size = block_size
        self._width = self.unit_tokens // page_size
        self._size = self.unit_tokens // block_size
        self._idle = [0, 0]
        self.cached_pages = 0
        """Pages in all nodes, with or without an owner."""
        self._node_of = np.zeros(len(owners), np.int32)
        # Fields by the number of a node. The first numbers are not nodes: the root of the tree, the root of the
        # uncached nodes, and the heads of two rings, which link the idle nodes of each home in the order of use.
        self._blocks = [bytearray() for _ in range(_FIRST)]
        self._pages = [NO_PAGES] * _FIRST
        self._numbers = [array("i", [0] * _FIRST) for _ in range(7)]
        self._parent, self._child, self._next, self._previous, self._newer, self._older, self._idle_in = self._numbers
        for head in _HEADS:
            self._newer[head] = self._older[head] = head
        self._unused: list[int] = []
        # Nodes by each block of their first unit.
        self._named: list[dict[bytes, int]] = [{} for _ in range(_BUCKETS)]
        self._others: dict[bytes, dict[int, None]] = {}
        """Further nodes by a block of their first unit that another node has too."""
        self._stored, self._dropped = bytearray(), bytearray()
        self._changed: PoolBlocksChanged | None = None

    @property
    def idle_pages(self) -> int:
        """Cached pages without owner."""
        return sum(self._idle)

    def idle_pages_in(self, home: Home) -> int:
        """Cached pages without owner in this memory."""
        return self._idle[home]

    def are_cached(self, pages: Pages) -> bool:
        """Whether at least one of the pages is cached. A cached page must not be written."""
        return bool(self._node_of[pages].any())

    def cached(self, out: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Whether each page is cached, written to `out` if it is given."""
        return np.greater(self._node_of, 0, out=out)

    def count_tokens(self, digests: Sequence[bytes]) -> int:
        """The number of leading tokens of the chain that are cached."""
        found = self._find(digests, len(digests))
        return found.whole * self.unit_tokens + found.blocks * self._block_size

    def match_prefix(self, digests: Sequence[bytes], max_tokens: int) -> PrefixPages:
        """The pages of the chain's leading cached tokens, up to `max_tokens`."""
        found = self._find(digests, -(-max_tokens // self.unit_tokens) * self._size)
        width, pieces = self._width, [self._pages[found.node][: found.units * self._width]]
        pieces += [self._pages[node] for node in self._nodes_before(found.node)]
        pages = np.concatenate(pieces[::-1])
        tokens = min(max_tokens, found.whole * self.unit_tokens + found.blocks * self._block_size)
        whole, rest = divmod(tokens, self.unit_tokens)
        unit = NO_PAGES
        if rest and whole < found.whole:
            unit = pages[whole * width : (whole + 1) * width]
        elif rest:
            first = found.units * width if found.begun == found.node else 0
            unit = self._pages[found.begun][first : first + width]
        return PrefixPages(pages[: whole * width], unit[: -(-rest // self._page_size)], unit, tokens)

    def insert(self, pages: Pages, digests: Sequence[bytes], *, sequence_ended: bool = False) -> None:
        """Cache the units of a sequence that owns `pages`. Units that are already cached stay in their pages.

        A last unit that is not full is cached only if the `sequence_ended`, because nothing is written after it then.
        Nothing is cached while there are uncached nodes: their blocks would be reported as dropped later.
        """
        if self._child[_UNCACHED]:
            return
        size, width = self._size, self._width
        found = self._find(digests, len(digests))
        whole = min(len(digests) // size, len(pages) // width)
        new = pages[found.whole * width : whole * width]
        if len(taken := np.flatnonzero(self._node_of[new])):
            # A fork may share only the first pages of a unit, and another sequence has published them.
            whole, sequence_ended = found.whole + int(taken[0]) // width, False
        node = found.node
        if whole > found.whole:
            node = self._extend(found, digests[found.whole * size : whole * size], pages[: whole * width])
            found = _Found(node, len(self._pages[node]) // width, whole, node, 0)
        rest = digests[whole * size : (whole + 1) * size] if sequence_ended and whole == found.whole else ()
        own = pages[whole * width :][: -(-len(rest) * self._block_size // self._page_size)]
        fits = len(own) * self._page_size >= len(rest) * self._block_size
        if found.blocks < len(rest) < size and fits and not self.are_cached(own):
            self._add(self._split(node, found.units), bytearray().join(rest), own)

    def acquire(self, pages: Pages) -> None:
        """Note that cached pages have their first owner."""
        self._count_idle(pages, -1)

    def release(self, pages: Pages, unowned: NDArray[np.bool_]) -> Pages:
        """Note that an owner has freed `pages`, in token order; returns those that are neither owned nor cached now.

        `unowned` says for each page whether it has no owner any more. The nodes of the chain become the most recently
        used, up to the last of `pages` that is cached.
        """
        cached = self._node_of[pages] > 0
        if not len(last := np.flatnonzero(cached)[-1:]):
            return pages[unowned]
        self._count_idle(pages[unowned & cached], 1)
        self.touch(pages[last])
        return pages[unowned & ~cached]

    def touch(self, pages: Pages) -> None:
        """Make the nodes of a chain the most recently used, up to the last of `pages` (cached, in token order).

        This includes nodes in pages of other sequences, because the whole chain was in use.
        """
        if not len(pages):
            return
        node, unit = self._locate(pages[-1])
        node = self._split(node, unit + 1)
        while self._pages[node].size:
            self._join(node)
            if self._idle_in[node]:
                self._unlink(node)
                self._link(node, self._head_of(node))
            node = self._parent[node]

    def evict(self, home: Home, count: int) -> Pages:
        """Remove the end of the least recently used idle node in a home: at most `count` pages without owner.

        Removes all nodes after it too, in either home. Returns the removed pages without owner. If the home has no
        idle node, takes one of the other home; there must be one.
        """
        head, other = _HEADS[home], _HEADS[not home]
        node = self._newer[head] if self._newer[head] != head else self._newer[other]
        pages, idle = self._pages[node], self._idle_in[node]
        first = max(0, idle - count)
        if idle < len(pages):
            first = int(np.flatnonzero(self._owners[pages] == 0)[first])
        return self._cut(node, first // self._width)

    def uncache(self, pages: Pages) -> None:
        """Hide the nodes in `pages`, and all after them, from look-ups.

        Their pages come free in `remove_uncached`, slice by slice.
        """
        if len(cached := np.flatnonzero(self._node_of[pages])):
            node, unit = self._locate(pages[cached[0]])
            if unit:
                self._split(node, unit)
            self._detach(node)
            self._attach(node, _UNCACHED)

    def remove_uncached(self) -> tuple[Pages, bool]:
        """Remove a slice of the uncached nodes; returns its pages that have no owner, and whether nodes are left."""
        freed = self._remove_below(_UNCACHED, SLICE_NODES)
        return freed, bool(self._child[_UNCACHED])

    def emptied(self) -> CachedBlockIndex:
        """A new index of the same pages, without cached blocks. It takes over the watcher."""
        index = CachedBlockIndex(self._owners, self._page_size, self._block_size, self._device_pages)
        self._changed, index._changed = None, self._changed
        if index._changed is not None:
            index._changed([], None)
        return index

    def watch(self, changed: PoolBlocksChanged | None) -> None:
        """As `Engine.watch_prefixes`."""
        self.notify()
        self._changed = changed
        if changed is not None and (blocks := dict.fromkeys(PackedDigests(b"".join(self._blocks)))):
            changed([*blocks], [])

    def notify(self) -> None:
        """Report the changes since the last call to the watcher."""
        if self._stored or self._dropped:
            stored, self._stored = PackedDigests(bytes(self._stored)), bytearray()
            dropped, self._dropped = PackedDigests(bytes(self._dropped)), bytearray()
            if self._changed is not None:
                self._changed(stored, dropped)

    def check_nodes(self, first: int) -> tuple[list[str], int]:
        """Contradictions between nodes, their pages and names, their places in the tree, and the order of eviction.

        Checks a slice of the nodes, from number `first` on. Returns also the number after the slice, 0 at the end.
        """
        node, pages, faults = max(first, _FIRST), 0, list[str]()
        stop = min(node + SLICE_NODES, len(self._pages))
        while node < stop and pages < SLICE_PAGES:
            pages += len(self._pages[node])
            faults += self._check_node(node)
            node += 1
        return faults, node if node < len(self._pages) else 0

    def _check_node(self, node: int) -> Iterator[str]:
        pages, blocks = self._pages[node], len(self._blocks[node]) // DIGEST_BYTES
        if not len(pages):
            return
        if (self._node_of[pages] != node).any():
            yield f"node {node}: its pages belong to another"
        if -(-blocks * self._block_size // self._page_size) != len(pages):
            yield f"node {node}: {blocks} blocks in {len(pages)} pages"
        idle, in_ring = len(pages) - np.count_nonzero(self._owners[pages]), self._newer[self._older[node]] == node
        if self._idle_in[node] != idle or in_ring != (idle > 0):
            yield f"node {node}: {idle} idle pages, counted {self._idle_in[node]}, {in_ring=}"
        parent, before = self._parent[node], self._previous[node]
        in_list = (self._next[before] if before else self._child[parent]) == node
        if not in_list or (parent >= _FIRST and not self._is_whole(parent)):
            yield f"node {node}: its parent {parent} is gone"
        for name in self._first_unit(node):
            if self._named[name[-1]].get(name) != node and node not in self._others.get(name, ()):
                yield f"node {node}: block {name.hex()[:16]} does not name it"

    # Nodes.

    def _digest(self, node: int, block: int) -> bytearray:
        return self._blocks[node][block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

    def _is_whole(self, node: int) -> bool:
        """Whether a node has whole units, and is not a partial node."""
        return len(self._blocks[node]) >= self._size * DIGEST_BYTES

    def _in_host(self, node: int) -> bool:
        return bool(self._pages[node][0] >= self._device_pages)

    def _head_of(self, node: int) -> int:
        return _HEADS[self._in_host(node)]

    def _locate(self, page: int) -> tuple[int, int]:
        """The node that has a cached page, and in which of its units."""
        node = int(self._node_of[page])
        return node, int(np.flatnonzero(self._pages[node] == page)[0]) // self._width

    def _nodes_before(self, node: int) -> Iterator[int]:
        while self._pages[node := self._parent[node]].size:
            yield node

    def _child_named(self, parent: int, name: bytes) -> Iterator[int]:
        """The children of a node whose first unit has a block."""
        node = self._named[name[-1]].get(name)
        if node is not None:
            # There may be thousands of others, and the first is nearly always the right one.
            for each in itertools.chain((node,), self._others.get(name, ())):
                if self._parent[each] == parent:
                    yield each

    def _find(self, digests: Sequence[bytes], wanted: int) -> _Found:
        """Follow a chain from the root; looks at the first `wanted` digests only."""
        size, node, units, whole, limit = self._size, _ROOT, 0, 0, min(wanted, len(digests))
        while (whole + 1) * size <= limit and units * self._width == len(self._pages[node]):
            name = digests[(whole + 1) * size - 1]
            child = next((each for each in self._child_named(node, name) if self._digest(each, size - 1) == name), None)
            if child is None:
                break
            most = min(len(self._pages[child]) // self._width, limit // size - whole)
            node, units = child, self._count_units(child, digests, whole, most)
            whole += units
        at, inside = whole * size, units * self._width < len(self._pages[node])
        for blocks in range(min(size - 1, limit - at), 0, -1):
            name = digests[at + blocks - 1]
            for begun in (node,) if inside else self._child_named(node, name):
                if self._digest(begun, (units * size if inside else 0) + blocks - 1) == name:
                    return _Found(node, units, whole, begun, blocks)
        return _Found(node, units, whole, node, 0)

    def _count_units(self, node: int, digests: Sequence[bytes], whole: int, most: int) -> int:
        """Number of a node's units, at most `most`, that continue a chain after `whole` units; the first one does."""
        size = self._size

        def differs(units: int) -> bool:
            return self._digest(node, units * size - 1) != digests[(whole + units) * size - 1]

        return 1 + bisect.bisect_left(range(2, most + 1), True, key=differs)

    def _extend(self, found: _Found, digests: Sequence[bytes], pages: Pages) -> int:
        """Cache the blocks `digests` after `found`, in the last of `pages`; returns the node of the last block."""
        node, size, width = found.node, self._size, self._width
        if found.units:
            node = self._split(node, found.units)
        homes = pages[found.whole * width :: width] >= self._device_pages
        begin = 0
        for end in (*np.flatnonzero(np.diff(homes)) + 1, len(homes)):
            blocks = bytearray().join(digests[begin * size : end * size])
            own = pages[(found.whole + begin) * width : (found.whole + end) * width]
            if node != _ROOT and not self._child[node] and self._in_host(node) == homes[begin]:
                self._blocks[node] += blocks
                self._pages[node] = np.concatenate([self._pages[node], own])
                self._node_of[own] = node
                self._stored += blocks
                self.cached_pages += len(own)
            else:
                node = self._add(node, blocks, own)
            begin = end
        return node

    def _add(self, parent: int, blocks: bytearray, pages: Pages) -> int:
        """Add a node whose pages all have an owner."""
        node = self._new(blocks, pages)
        self.cached_pages += len(pages)
        self._attach(node, parent)
        for name in self._name(node):
            self._stored += name
        self._stored += blocks[self._size * DIGEST_BYTES :]
        return node

    def _new(self, blocks: bytearray, pages: Pages) -> int:
        if self._unused:
            node = self._unused.pop()
        else:
            node = len(self._pages)
            self._pages.append(NO_PAGES)
            self._blocks.append(bytearray())
            for numbers in self._numbers:
                numbers.append(0)
        self._blocks[node], self._pages[node] = blocks, pages.copy()
        self._node_of[pages] = node
        return node

    def _split(self, node: int, units: int) -> int:
        """Make a node end after some of its units; a child of it gets the others, with its number."""
        if not units or units * self._width >= len(self._pages[node]):
            return node
        at, pages, blocks = units * self._size * DIGEST_BYTES, self._pages[node], self._blocks[node]
        self._unname(node)
        # One of the two keeps the memory, since there may be megabytes.
        if 2 * at > len(blocks):
            self._blocks[node] = blocks[at:]
            del blocks[at:]
        else:
            self._blocks[node], blocks = blocks, blocks[:at]
            del self._blocks[node][:at]
        upper = self._new(blocks, pages[: units * self._width])
        self._pages[node] = pages[units * self._width :].copy()
        parent = self._parent[node]
        self._detach(node)
        self._attach(upper, parent)
        self._attach(node, upper)
        self._name(upper)
        self._name(node)
        if idle := int(np.count_nonzero(self._owners[self._pages[upper]] == 0)):
            self._link(upper, self._newer[node])
            self._idle_in[upper] = idle
            self._idle_in[node] -= idle
            if not self._idle_in[node]:
                self._unlink(node)
        return upper

    def _join(self, node: int) -> None:
        """Merge a node with the nodes before it, up to one that has another child or lies in another memory."""
        nodes = [node]
        # An uncached node may begin with the same blocks, which must stay named.
        if self._is_whole(node) and not self._child[_UNCACHED]:
            for parent in self._nodes_before(node):
                last = nodes[-1]
                if self._next[last] or self._previous[last] or self._in_host(parent) != self._in_host(node):
                    break
                nodes.append(parent)
        if len(nodes) == 1:
            return
        before = self._parent[nodes[-1]]
        blocks = self._blocks[nodes[-1]]
        for each in reversed(nodes[:-1]):
            blocks += self._blocks[each]
        pages = np.concatenate([self._pages[each] for each in reversed(nodes)])
        for each in nodes:
            self._unname(each)
            self._detach(each)
        for each in nodes[1:]:
            if idle := self._idle_in[each]:
                if not self._idle_in[node]:
                    self._link(node, self._newer[each])
                self._idle_in[node] += idle
            self._node_of[self._pages[each]] = node
            self._discard(each)
        self._blocks[node], self._pages[node] = blocks, pages
        self._attach(node, before)
        self._name(node)

    def _cut(self, node: int, units: int) -> Pages:
        """Remove a node's units from number `units` on, and all nodes after it; returns their pages without owner."""
        freed = [self._remove_below(node, len(self._pages))]
        if not units:
            return np.concatenate([*freed, self._remove(node)])
        at, end = units * self._size * DIGEST_BYTES, self._pages[node][units * self._width :]
        idle = end[self._owners[end] == 0]
        self._dropped += self._blocks[node][at:]
        self._count_idle(idle, -1)
        self._node_of[end] = 0
        self.cached_pages -= len(end)
        del self._blocks[node][at:]
        self._pages[node] = self._pages[node][: units * self._width]
        return np.concatenate([*freed, idle])

    def _remove_below(self, node: int, count: int) -> Pages:
        """Remove up to `count` nodes below one, leaves first; returns their pages without owner."""
        freed, at = [NO_PAGES], node
        while len(freed) <= count and (at != node or self._child[at]):
            if child := self._child[at]:
                at = child
            else:
                at, leaf = self._parent[at], at
                freed.append(self._remove(leaf))
        return np.concatenate(freed)

    def _remove(self, node: int) -> Pages:
        """Remove a node without children; returns its pages without owner."""
        pages = self._pages[node]
        idle: Pages = pages[self._owners[pages] == 0]
        self._count_idle(idle, -1)
        self._node_of[pages] = 0
        self.cached_pages -= len(pages)
        for name in self._unname(node):
            self._dropped += name
        self._dropped += self._blocks[node][self._size * DIGEST_BYTES :]
        self._detach(node)
        self._discard(node)
        return idle

    def _discard(self, node: int) -> None:
        """Forget a node that is neither in the tree nor named."""
        if self._idle_in[node]:
            self._idle_in[node] = 0
            self._unlink(node)
        self._blocks[node], self._pages[node] = bytearray(), NO_PAGES
        self._unused.append(node)

    def _attach(self, node: int, parent: int) -> None:
        first = self._child[parent]
        self._parent[node], self._child[parent] = parent, node
        self._previous[node], self._next[node] = 0, first
        if first:
            self._previous[first] = node

    def _detach(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        if after:
            self._previous[after] = before
        if before:
            self._next[before] = after
        else:
            self._child[self._parent[node]] = after
        self._previous[node] = self._next[node] = 0

    # Names.

    def _first_unit(self, node: int) -> list[bytes]:
        blocks = bytes(self._blocks[node][: self._size * DIGEST_BYTES])
        return [blocks[at : at + DIGEST_BYTES] for at in range(0, len(blocks), DIGEST_BYTES)]

    def _name(self, node: int) -> list[bytes]:
        """Enter the blocks of a node's first unit; returns those that no other node has."""
        new = []
        for digest in self._first_unit(node):
            if self._named[digest[-1]].setdefault(digest, node) == node:
                new.append(digest)
            else:
                self._others.setdefault(digest, {})[node] = None
        return new

    def _unname(self, node: int) -> list[bytes]:
        """Undo `_name`; returns the blocks that no other node has."""
        gone = []
        for digest in self._first_unit(node):
            named, others = self._named[digest[-1]], self._others.get(digest)
            if others is None:
                del named[digest]
                gone.append(digest)
                continue
            if named[digest] == node:
                # The last one: a dict looks for its first one among all that were removed.
                named[digest], _ = others.popitem()
            else:
                del others[node]
            if not others:
                del self._others[digest]
        return gone

    # Idle nodes.

    def _count_idle(self, pages: Pages, sign: int) -> None:
        """Note that cached pages have lost their last owner (1), or are no longer idle (-1)."""
        if not pages.size:
            return
        in_host = int(np.count_nonzero(pages >= self._device_pages))
        self._idle[Home.HOST] += sign * in_host
        self._idle[Home.DEVICE] += sign * (len(pages) - in_host)
        nodes, begin = self._node_of[pages], 0
        for end in (*np.flatnonzero(np.diff(nodes)) + 1, len(nodes)):
            node = int(nodes[begin])
            before = self._idle_in[node]
            self._idle_in[node] = after = before + sign * int(end - begin)
            if not before:
                self._link(node, self._head_of(node))
            elif not after:
                self._unlink(node)
            begin = end

    def _link(self, node: int, newer: int) -> None:
        """Put an idle node into its ring, before a newer one or the head."""
        older = self._older[newer]
        self._newer[older] = self._older[newer] = node
        self._older[node], self._newer[node] = older, newer

    def _unlink(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        self._newer[older], self._older[newer] = newer, older
        self._older[node] = self._newer[node] = 0
