"""The pool's cached pages: found, shared, cut by a copy, evicted from the end of the chain, against a simple model."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.errors import EngineError, OutOfPages
from baton.kv.hashing import block_digests
from baton.kv.pool import PageCopy, PageHandle, PagePool, _Allocation
from tests.effort import machine_test

ROOT = bytes(32)
INDEX = st.integers(0, 99)
CHAIN = st.lists(st.integers(0, 1), max_size=4)
TOKENS = st.integers(0, 12)


@dataclass(eq=False)
class Sequence_:
    """A handle, the tokens of its sequence, and how many of them its pages hold."""

    handle: PageHandle
    ids: list[int]
    written: int


@dataclass
class Name:
    """A published unit: where it is, how far along its chain, and when an owner of its chain left last."""

    pages: list[int]
    blocks: list[bytes]
    parent: bytes | None
    depth: int
    left: int = 0


@dataclass
class Model:
    """Expected content of the pool: units by name; `told` is as the watcher was told."""

    names: dict[bytes, Name] = field(default_factory=dict)
    told: set[bytes] = field(default_factory=set)
    dropped: list[bytes] = field(default_factory=list)

    def changed(self, stored: Sequence[bytes], dropped: Sequence[bytes] | None) -> None:
        assert not self.told & set(stored)
        self.told |= set(stored)
        dropped = [*self.told] if dropped is None else dropped
        assert set(dropped) <= self.told
        self.told -= set(dropped)
        self.dropped += dropped


class CachedBlocksMachine(RuleBasedStateMachine):
    """The pool with a memory: what a page holds at an offset is the tokens up to there."""

    @initialize(
        pages=st.integers(4, 30), page_size=st.integers(1, 3), block_size=st.integers(1, 4), slice_=st.integers(1, 3)
    )
    def make(self, pages: int, page_size: int, block_size: int, slice_: int) -> None:
        self.patched = mock.patch("baton.kv.pool.SLICE_NODES", slice_)
        self.patched.start()
        self.pool = PagePool(pages, page_size, block_size)
        self.block = block_size
        self.unit = self.pool._block_index.unit_tokens
        self.sequences: list[Sequence_] = []
        self.dead: list[PageHandle] = []
        self.pins: list[tuple[_Allocation, ExitStack]] = []
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.model = Model()
        self.pool.watch_prefixes(self.model.changed)
        self.returns, self.clock, self.number = 0, 0, 0
        self.pool.watch_pages(self.returned)

    def returned(self) -> None:
        self.returns += 1

    def ids(self, chain: Sequence[int], tokens: int) -> list[int]:
        """Tokens of blocks that are one of two each, so that chains meet often."""
        blocks = [*chain, *[0] * 40]
        return [blocks[i // self.block] for i in range(tokens)]

    def digests(self, ids: Sequence[int]) -> list[bytes]:
        return block_digests(ROOT, ids, self.block)

    def units(self, digests: Sequence[bytes]) -> list[bytes]:
        size = self.unit // self.block
        return list(digests[size - 1 :: size])

    def pick(self, index: int) -> Sequence_ | None:
        return self.sequences[index % len(self.sequences)] if self.sequences else None

    def owned(self) -> dict[int, int]:
        """Owners of each page that has any, among them what was given up and is pinned still."""
        held = {each.handle._allocation for each in self.sequences} | {each for each, _ in self.pins}
        owners: dict[int, int] = {}
        for page in (page for allocation in held for page in allocation.pages):
            owners[page] = owners.get(page, 0) + 1
        return owners

    def available(self) -> int:
        return self.pool.pages - len(self.owned())

    def cached_units(self, digests: Sequence[bytes]) -> list[Name]:
        found = []
        for name in self.units(digests):
            if name not in self.model.names:
                break
            found.append(self.model.names[name])
        return found

    def found(self, digests: Sequence[bytes]) -> int:
        """Leading tokens of the chain that are in any unit."""
        begun = {block for unit in self.model.names.values() for block in unit.blocks}
        blocks = len(self.cached_units(digests)) * (self.unit // self.block)
        while blocks < len(digests) and digests[blocks] in begun:
            blocks += 1
        return blocks * self.block

    def leave(self, pages: Sequence[int]) -> None:
        """An owner of `pages` has gone: its chain was used up to now."""
        self.clock += 1
        mine = [unit for unit in self.model.names.values() if set(unit.pages) & set(pages)]
        unit = max(mine, key=lambda unit: unit.depth, default=None)
        while unit is not None:
            unit.left = self.clock
            unit = self.model.names[unit.parent] if unit.parent else None

    def settle(self, wanted: int, pinned: Sequence[int] = ()) -> None:
        """Check what was evicted when `wanted` pages were, with others pinned meanwhile, and forget it."""
        dropped, self.model.dropped = set(self.model.dropped), []
        # The watcher is not told of a part that goes while another unit begins with its blocks.
        cached = self.pool._block_index.cached()
        parts = {name: unit for name, unit in self.model.names.items() if len(unit.blocks) * self.block < self.unit}
        dropped |= {name for name, unit in parts.items() if not cached[unit.pages[0]]}
        gone = {name: unit for name, unit in self.model.names.items() if name in dropped}
        for name in gone:
            del self.model.names[name]
        if not gone:
            return
        assert wanted
        owned = self.owned().keys() | set(pinned)
        idle = [unit for unit in gone.values() if not set(unit.pages) <= owned - self.gained]
        kept = [unit for unit in self.model.names.values() if not set(unit.pages) <= owned]
        # A unit that is in use goes only with the beginning of its chain.
        assert all(unit in idle or unit.parent in gone for unit in gone.values())
        for unit in idle:
            assert all((unit.left, -unit.depth) < (other.left, -other.depth) for other in kept)

    @rule(
        chain=CHAIN,
        tokens=TOKENS,
        most=st.none() | st.integers(1, 4),
        keep=st.sampled_from([False, False, True]),
        leaves=st.booleans(),
        slices=st.booleans(),
    )
    def serve(self, chain: list[int], tokens: int, most: int | None, keep: bool, leaves: bool, slices: bool) -> None:
        """The life of most sequences: all but the last few tokens may be cached, all blocks are left for others."""
        before = len(self.sequences)
        self.reserve(chain, tokens, 0, None if most is None else max(0, tokens - most), slices)
        if len(self.sequences) > before:
            self.write(before, tokens or 1)
            self.publish(before, tokens)
            if not keep:
                self.give_up(before, leaves=leaves)

    @rule(chain=CHAIN, tokens=TOKENS, more=st.integers(0, 4), most=st.none() | TOKENS, slices=st.booleans())
    def reserve(self, chain: list[int], tokens: int, more: int, most: int | None, slices: bool = False) -> None:
        ids, capacity = self.ids(chain, tokens), tokens + more
        digests, owners, page_size = self.digests(ids), self.owned(), self.pool.page_size
        tokens_found = min(self.found(digests), capacity if most is None else most)
        whole, rest = divmod(tokens_found, self.unit)
        shared = [page for unit in self.cached_units(digests)[:whole] for page in unit.pages]
        need, free = self.pool.pages_for(capacity) - len(shared), self.available() - len(set(shared) - owners.keys())
        if need > free:
            order = list(self.pool._block_index._newer)
            with pytest.raises(OutOfPages):
                self.pool.reserve("x", capacity, digests, most, self.copy)
            assert order == list(self.pool._block_index._newer)
            return
        self.number += 1
        if slices:
            self.evict(capacity, digests, most)
        self.copied: list[PageCopy] = []
        cut_unit = self.pool._match("", capacity, digests, most).next_unit
        handle = self.pool.reserve(str(self.number), capacity, digests, most, self.copy)
        sources = [copy.source for copy in self.copied]
        assert list(handle.pages[: len(shared)]) == shared
        self.gained = set(handle.pages[len(shared) :])
        assert not self.gained & (owners.keys() | set(sources))
        if rest and need + self.pool.pages_for(rest) <= free:
            assert sources
        assert handle.cached_tokens == (tokens_found if sources else whole * self.unit)
        assert [copy.tokens for copy in self.copied] == [
            min(page_size, rest - i * page_size) for i in range(self.pool.pages_for(rest) if sources else 0)
        ]
        assert [copy.target for copy in self.copied] == list(handle.pages[len(shared) :])[: len(sources)]
        self.sequences.append(Sequence_(handle, ids, min(handle.cached_tokens, tokens)))
        if self.model.dropped:
            # The eviction freed pages beside its prefix, which counts as used up to then.
            self.leave([*shared, *cut_unit])
        self.settle(need, sources)
        if sources:
            self.leave(sources)

    def evict(self, capacity: int, digests: Sequence[bytes], most: int | None) -> None:
        """Evict in slices what the reservation would evict; its own prefix counts as used up to now."""
        while True:
            free = self.pool.stats().free
            left = self.pool.evict_for(capacity, digests, most)
            if self.pool.stats().free > free:
                found = self.pool._match("", capacity, digests, most)
                self.leave([*found.shared, *found.next_unit])
            if not left:
                return

    def copy(self, copy: PageCopy) -> None:
        # Nobody can have the source, nor the target, meanwhile.
        allocator = self.pool._allocator
        assert {copy.source, copy.target}.isdisjoint(
            np.concatenate(allocator.copy_states(*allocator.new_buffers()).free).tolist()
        )
        assert allocator._owners[copy.source] > 0 < allocator._owners[copy.target]
        self.copied.append(copy)
        for offset in range(copy.tokens):
            self.content[copy.target, offset] = self.content[copy.source, offset]

    @rule(index=INDEX, more=st.integers(0, 6))
    def extend(self, index: int, more: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        pages = sequence.handle.pages
        before, tokens = len(pages), sequence.handle.capacity + more
        need = self.pool.pages_for(tokens) - before
        if need > self.available():
            with pytest.raises(OutOfPages):
                self.pool.extend(sequence.handle, tokens)
        else:
            owners = self.owned()
            self.pool.extend(sequence.handle, tokens)
            self.gained = set(sequence.handle.pages[before:])
            assert len(self.gained) == max(0, need)
            assert not self.gained & owners.keys()
            self.settle(need)

    @rule(index=INDEX, count=st.integers(1, 40))
    def write(self, index: int, count: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        pages, page_size = sequence.handle.pages, self.pool.page_size
        tokens = range(sequence.written, min(sequence.written + count, len(sequence.ids), sequence.handle.capacity))
        if not tokens:
            return
        owners, named = self.owned(), {page for unit in self.model.names.values() for page in unit.pages}
        written = pages[tokens[0] // page_size : tokens[-1] // page_size + 1]
        if any(owners[page] > 1 or page in named for page in written):
            with pytest.raises(EngineError, match="shared or published"), self.pool.pin(sequence.handle, tokens):
                pass
            return
        with self.pool.pin(sequence.handle, tokens):
            for position in tokens:
                self.content[pages[position // page_size], position % page_size] = tuple(sequence.ids[: position + 1])
        sequence.written = tokens.stop

    @rule(index=INDEX, blocks=st.integers(0, 40))
    def publish(self, index: int, blocks: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        digests = self.digests(sequence.ids[: sequence.written])[:blocks]
        self.name(sequence, digests)
        for _ in range(2):
            self.pool.publish(sequence.handle, digests)

    def name(self, sequence: Sequence_, digests: Sequence[bytes], *, ends: bool = False) -> None:
        """Note what the pool should name."""
        each, size, parent = self.unit // self.pool.page_size, self.unit // self.block, None
        named = {page for unit in self.model.names.values() for page in unit.pages}
        begun = {block for unit in self.model.names.values() for block in unit.blocks}
        units = self.units(digests)
        for depth, name in enumerate(units):
            pages = list(sequence.handle.pages[depth * each : (depth + 1) * each])
            if name not in self.model.names:
                if named & set(pages):
                    return
                blocks = list(digests[depth * size : (depth + 1) * size])
                self.model.names[name] = Name(pages, blocks, parent, depth, self.clock)
            parent = name
        rest = list(digests[len(units) * size :])
        pages = list(sequence.handle.pages[len(units) * each :][: self.pool.pages_for(len(rest) * self.block)])
        if ends and rest and rest[-1] not in begun and not named & set(pages):
            self.model.names[rest[-1]] = Name(pages, rest, parent, len(units), self.clock)

    @rule(index=INDEX)
    def publish_dead(self, index: int) -> None:
        if self.dead:
            dead, digests = self.dead[index % len(self.dead)], self.digests(self.ids([1], 40))
            self.pool.publish(dead, digests)
            assert self.pool.share_prefix(dead, digests, dead.capacity) == 0

    @rule(chain=CHAIN, tokens=TOKENS, most=TOKENS, forks=st.booleans())
    def share_late(self, chain: list[int], tokens: int, most: int, forks: bool) -> None:
        """A handle gets the blocks of a sequence that began later, unless it shares its own with a fork."""
        before = len(self.sequences)
        self.reserve(chain, tokens, 0, 0)
        if len(self.sequences) > before:
            if forks:
                self.write(before, tokens or 1)
                self.fork(before, tokens, 0, chain)
            self.serve(chain, tokens, None, keep=False, leaves=False, slices=False)
            self.share_prefix(before, most)

    @rule(index=INDEX, most=TOKENS)
    def share_prefix(self, index: int, most: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        handle, owners = sequence.handle, self.owned()
        most, digests = min(most, handle.capacity), self.digests(sequence.ids)
        found = self.cached_units(digests)[: most // self.unit]
        shared, before = [page for unit in found for page in unit.pages], list(handle.pages)
        own = [page for page, other in zip(before, shared, strict=False) if page != other]
        named = {page for unit in self.model.names.values() for page in unit.pages}
        pinned = any(handle._allocation is each for each, _ in self.pins)
        returns, free = self.returns, self.pool.stats().free
        got = self.pool.share_prefix(handle, digests, most)
        if pinned or any(owners[page] > 1 or page in named for page in own):
            assert (got, list(handle.pages)) == (0, before)
            own = []
        else:
            assert got == len(found) * self.unit
            assert list(handle.pages) == [*shared, *before[len(shared) :]]
            sequence.written = max(sequence.written, got)
        assert self.pool.stats().free == free + len(own)
        assert self.returns == returns + bool(own)
        assert not self.model.dropped

    @rule(index=INDEX, shared=TOKENS, more=st.integers(0, 6), chain=CHAIN)
    def fork(self, index: int, shared: int, more: int, chain: list[int]) -> None:
        parent = self.pick(index)
        if parent is None:
            return
        shared = min(shared, parent.written)
        full, tokens = shared // self.pool.page_size, shared + more
        if self.pool.pages_for(tokens) - full > self.available():
            with pytest.raises(OutOfPages):
                self.pool.fork(parent.handle, "x", shared, tokens)
            return
        self.number += 1
        owners = self.owned()
        child, copy = self.pool.fork(parent.handle, str(self.number), shared, tokens)
        assert list(child.pages[:full]) == list(parent.handle.pages[:full])
        assert not owners.keys() & set(child.pages[full:])
        self.copied = []
        if copy is not None:
            self.copy(copy)
        ids = [*parent.ids[:shared], *self.ids(chain, tokens)[shared:]]
        self.sequences.append(Sequence_(child, ids, shared))
        self.gained = set(child.pages[full:])
        self.settle(len(self.gained))

    @rule(index=INDEX)
    def pin(self, index: int) -> None:
        sequence = self.pick(index)
        if sequence is not None:
            stack = ExitStack()
            stack.enter_context(self.pool.pin(sequence.handle))
            self.pins.append((sequence.handle._allocation, stack))

    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        if self.pins:
            allocation, stack = self.pins.pop(index % len(self.pins))
            stack.close()
            if all(allocation is not each for each, _ in self.pins) and all(
                allocation is not sequence.handle._allocation for sequence in self.sequences
            ):
                self.leave(allocation.pages)

    @rule(index=INDEX, leaves=st.booleans())
    def give_up(self, index: int, leaves: bool = False) -> None:
        """Free a sequence, which leaves all that was written."""
        sequence = self.pick(index)
        if sequence is None:
            return
        allocation, before = sequence.handle._allocation, self.pool.stats()
        told = self.returns
        digests = self.digests(sequence.ids[: sequence.written]) if leaves else []
        self.name(sequence, digests, ends=True)
        self.pool.free(sequence.handle, digests)
        self.pool.free(sequence.handle, self.digests(self.ids([1], 40)))
        self.sequences.remove(sequence)
        self.dead.append(sequence.handle)
        if all(allocation is not each for each, _ in self.pins):
            self.leave(allocation.pages)
        after = self.pool.stats()
        assert (self.returns > told) == (after.free + after.cached > before.free + before.cached)

    @rule()
    def drop_cached(self) -> None:
        stats = self.pool.stats()
        assert self.pool.drop_cached() == stats.cached
        assert self.pool.stats().free == stats.free + stats.cached
        for name in self.model.dropped:
            self.model.names.pop(name, None)
        self.model.dropped = []
        assert not self.model.names

    @rule(chain=CHAIN, tokens=TOKENS)
    def held(self, chain: list[int], tokens: int) -> None:
        digests = self.digests(self.ids(chain, tokens))
        assert self.pool.match_prefix(digests) == self.found(digests)

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.audit()
        stats, owners = self.pool.stats(), self.owned()
        named = {page for unit in self.model.names.values() for page in unit.pages}
        assert stats.used == len(owners)
        assert stats.cached == len(named - owners.keys())
        assert stats.used + stats.free + stats.cached == self.pool.pages
        assert self.model.told == {block for unit in self.model.names.values() for block in unit.blocks}
        assert all(unit.parent is None or unit.parent in self.model.names for unit in self.model.names.values())

    @invariant()
    def pages_hold_what_was_written(self) -> None:
        if not hasattr(self, "pool"):
            return
        size = self.pool.page_size
        for sequence in self.sequences:
            for position in range(sequence.written):
                page = sequence.handle.pages[position // size]
                assert self.content[page, position % size] == tuple(sequence.ids[: position + 1])

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.patched.stop()
        for _, stack in self.pins:
            stack.close()
        self.pool.free_all()
        assert self.pool.audit() == {}
        assert self.pool.stats().free == self.pool.pages
        assert not self.model.told


TestCachedBlocks = machine_test(CachedBlocksMachine, 80, 40)
