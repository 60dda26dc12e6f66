"""The page pool: conservation under any sequence of operations, and that the audit notices damage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.errors import EngineError, OutOfPages
from baton.kv.pool import PageHandle, PagePool
from tests.effort import machine_test

TOKENS = st.integers(0, 40)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that knows which pages each lease holds."""

    @initialize(pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def make(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.alive: list[PageHandle] = []
        self.dead: list[PageHandle] = []
        self.held: dict[PageHandle, list[int]] = {}
        self.pins: list[tuple[Sequence[int], ExitStack]] = []
        self.names = iter(range(10**9))
        self.returns = 0
        self.free_before = pages
        self.pool.watch(self.told)

    def told(self) -> None:
        self.returns += 1
        # Whoever is told may take them at once: no lock is held.
        self.pool.free(self.pool.reserve("probe", 0))

    def pick(self, index: int) -> PageHandle | None:
        return self.alive[index % len(self.alive)] if self.alive else None

    def busy(self) -> set[int]:
        return {page for pages in self.held.values() for page in pages} | {p for pages, _ in self.pins for p in pages}

    def granted(self, handle: PageHandle, pages: list[int]) -> None:
        self.held[handle] = pages
        if handle not in self.alive:
            self.alive.append(handle)

    @rule(tokens=TOKENS)
    def reserve(self, tokens: int) -> None:
        need, free = self.pool.pages_for(tokens), self.pool.pages - len(self.busy())
        if need > free:
            with pytest.raises(OutOfPages):
                self.pool.reserve("x", tokens)
            return
        busy = self.busy()
        handle = self.pool.reserve(str(next(self.names)), tokens)
        assert len(handle.pages) == need
        assert not busy & set(handle.pages)
        self.granted(handle, list(handle.pages))

    @rule(index=st.integers(0, 99), tokens=TOKENS)
    def extend(self, index: int, tokens: int) -> None:
        handle = self.pick(index)
        if handle is None:
            return
        old, busy = list(handle.pages), self.busy()
        extra = self.pool.pages_for(tokens) - len(old)
        if extra > self.pool.pages - len(busy):
            with pytest.raises(OutOfPages):
                self.pool.extend(handle, tokens)
            assert list(handle.pages) == old
            return
        self.pool.extend(handle, tokens)
        gained = list(handle.pages[len(old) :])
        assert list(handle.pages[: len(old)]) == old
        assert len(gained) == max(0, extra)
        assert not busy & set(gained)
        self.granted(handle, list(handle.pages))

    @rule(index=st.integers(0, 99), shared=TOKENS, more=TOKENS)
    def fork(self, index: int, shared: int, more: int) -> None:
        parent = self.pick(index)
        if parent is None:
            return
        shared = min(shared, parent.capacity)
        full, rest = divmod(shared, self.pool.page_size)
        busy = self.busy()
        if self.pool.pages_for(shared + more) - full > self.pool.pages - len(busy):
            with pytest.raises(OutOfPages):
                self.pool.fork(parent, "x", shared, shared + more)
            return
        child, copy = self.pool.fork(parent, str(next(self.names)), shared, shared + more)
        assert list(child.pages[:full]) == list(parent.pages[:full])
        assert not busy & set(child.pages[full:])
        assert child.capacity >= shared + more
        assert (copy is not None) == bool(rest)
        if copy is not None:
            assert (copy.source, copy.target, copy.tokens) == (parent.pages[full], child.pages[full], rest)
        self.granted(child, list(child.pages))

    @rule(index=st.integers(0, 99), donor=st.integers(0, 99), more=TOKENS)
    def fork_into(self, index: int, donor: int, more: int) -> None:
        parent, spare = self.pick(index), self.pick(donor)
        if parent is None or spare is None or parent is spare:
            return
        full = parent.capacity // self.pool.page_size
        need, given = self.pool.pages_for(parent.capacity + more) - full, set(spare.pages)
        used = any(pages is spare.pages for pages, _ in self.pins) or any(self.owners(page) > 1 for page in given)
        if used:
            with pytest.raises(EngineError, match="in use"):
                self.pool.fork(parent, "x", parent.capacity, parent.capacity + more, spare)
            return
        if need - len(given) > self.pool.pages - len(self.busy()):
            with pytest.raises(OutOfPages):
                self.pool.fork(parent, "x", parent.capacity, parent.capacity + more, spare)
            assert spare.alive
            return
        child, _ = self.pool.fork(parent, str(next(self.names)), parent.capacity, parent.capacity + more, spare)
        own = set(child.pages[full:])
        assert own <= given or given <= own
        assert not spare.alive
        self.alive.remove(spare)
        del self.held[spare]
        self.dead.append(spare)
        self.granted(child, list(child.pages))

    @rule(index=st.integers(0, 99))
    def pin(self, index: int) -> None:
        handle = self.pick(index)
        if handle is None:
            return
        stack = ExitStack()
        pages = stack.enter_context(self.pool.pinned(handle))
        self.pins.append((pages, stack))

    @rule(count=st.integers(0, 4))
    def pin_batch(self, count: int) -> None:
        handles = self.alive[:count] + self.dead[:1]
        positions = [0] * len(handles)
        shared = [handle for handle in handles if not handle.pages or self.owners(handle.pages[0]) > 1]
        with ExitStack() as stack:
            if self.dead:
                assert stack.enter_context(self.pool.pinned_batch(handles, positions)) == self.dead[:1]
            elif shared:
                with pytest.raises(EngineError):
                    stack.enter_context(self.pool.pinned_batch(handles, positions))
            else:
                assert stack.enter_context(self.pool.pinned_batch(handles, positions)) == []

    def owners(self, page: int) -> int:
        current = {id(handle.pages) for handle in self.alive}
        drained = {id(pages): pages for pages, _ in self.pins if id(pages) not in current}
        return sum(page in pages for pages in [*self.held.values(), *drained.values()])

    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        if self.pins:
            _, stack = self.pins.pop(index % len(self.pins))
            stack.close()

    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        handle = self.pick(index)
        if handle is None:
            return
        self.pool.free(handle)
        self.pool.free(handle)
        self.alive.remove(handle)
        del self.held[handle]
        self.dead.append(handle)
        for call in (lambda: self.pool.extend(handle, 1), lambda: self.pool.fork(handle, "x", 0, 1)):
            with pytest.raises(EngineError, match="freed"):
                call()
        assert not self.pool.detach(handle)

    @rule(index=st.integers(0, 99))
    def detach(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            assert self.pool.detach(handle)
            assert (handle.capacity, handle.alive) == (0, True)
            self.held[handle] = []

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        ledger = self.pool.audit()
        stats = self.pool.stats()
        assert stats.used + stats.free + stats.cached == stats.total == self.pool.pages
        assert stats.used == len(self.busy())
        if stats.free > self.free_before:
            assert self.returns
        self.free_before, self.returns = stats.free, 0
        for handle in self.alive:
            assert ledger[handle.owner] == len(handle.pages) == len(self.held[handle])

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _, stack in self.pins:
            stack.close()
        self.pool.free_all()
        assert self.pool.audit() == {}
        assert self.pool.stats().free == self.pool.pages
        assert not any(handle.alive for handle in self.alive)


TestPool = machine_test(PoolMachine, 80, 40)


def test_the_ledger_names_owners_and_those_still_draining() -> None:
    pool = PagePool(8, 4)
    first, second = pool.reserve("a/1", 9), pool.reserve("b/1", 4)
    child, _ = pool.fork(first, "a/1/0", 8, 12)
    with pool.pinned(first) as pages:
        held = list(pages)
        pool.free(first)
        assert pool.audit() == {"a/1 (draining)": 3, "b/1": 1, "a/1/0": 3}
        with pytest.raises(OutOfPages):
            pool.reserve("c/1", 4 * 4)
        assert held == list(pages)
    assert pool.audit() == {"b/1": 1, "a/1/0": 3}
    pool.free(child)
    pool.free(second)
    assert pool.audit() == {}


@pytest.mark.parametrize("damage", ["lost", "twice", "count", "borrowed", "undrained"])
def test_the_audit_raises_with_the_ledger(damage: str) -> None:
    pool = PagePool(4, 4)
    handle = pool.reserve("a/1", 8)
    if damage == "lost":
        pool._free.pop()
    elif damage == "twice":
        pool._free.append(pool._free[0])
    elif damage == "count":
        pool._refs[handle.pages[0]] = 2
    elif damage == "borrowed":
        handle._lease.pages.append(next(iter(pool._free)))
    else:
        handle._lease.held = False
    with pytest.raises(EngineError, match=r"audit failed: .*ledger \{'a/1"):
        pool.audit()


def test_a_pool_needs_pages() -> None:
    for pages, size in ((0, 4), (4, 0)):
        with pytest.raises(EngineError, match=f"{pages} pages of {size}"):
            PagePool(pages, size)
    with pytest.raises(EngineError, match="-1 tokens"):
        PagePool(4, 4).reserve("a/1", -1)


def test_any_thread_may_reserve_and_free() -> None:
    pool = PagePool(16, 4)
    faults: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(300):
                try:
                    handle = pool.reserve(f"{name}/{i}", 4 * (1 + i % 5))
                except OutOfPages:
                    continue
                with pool.pinned(handle) as pages:
                    child, _ = pool.fork(handle, f"{name}/{i}/0", 4, 4)
                    pool.free(handle)
                    assert pool.audit()[f"{name}/{i} (draining)"] == len(pages)
                pool.free(child)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert pool.audit() == {}
    assert pool.stats().free == 16
