"""The page pool call by call, and that the audit notices damage; the cached blocks' machine has any sequence."""

import threading
from array import array

import pytest

from baton.errors import EngineError, OutOfPages
from baton.kv.pool import PagePool


def test_a_handle_grows_and_a_freed_one_is_refused() -> None:
    pool = PagePool(4, 4)
    handle = pool.reserve("a/1", 8)
    pool.extend(handle, 16)
    assert pool.audit() == {"a/1": 4}
    for _ in range(2):
        pool.free(handle)
    for call in (lambda: pool.extend(handle, 1), lambda: pool.fork(handle, "x", 0, 1)):
        with pytest.raises(EngineError, match="freed"):
            call()


def test_a_watcher_may_take_pages_at_once() -> None:
    pool, told = PagePool(1, 4), list[int]()

    def take() -> None:
        told.append(pool.stats().free)
        pool.watch_pages(lambda: None)
        pool.reserve("b/1", 4)

    handle = pool.reserve("a/1", 4)
    pool.watch_pages(take)
    pool.free(handle)
    assert (told, pool.audit()) == ([1], {"b/1": 1})


@pytest.mark.parametrize("spare_tokens", [4, 8, 16])
def test_a_fork_takes_its_spares_pages_and_gives_back_or_adds_the_rest(spare_tokens: int) -> None:
    pool = PagePool(8, 4)
    parent, spare = pool.reserve("a/1", 8), pool.reserve("a/spare", spare_tokens)
    given = set(spare.pages)
    with pool.pin(spare), pytest.raises(EngineError, match="in use"):
        pool.fork(parent, "a/1/0", 8, 16, spare)
    with pytest.raises(OutOfPages):
        pool.fork(parent, "a/1/0", 8, 48, spare)
    assert spare.alive
    child, _ = pool.fork(parent, "a/1/0", 8, 16, spare)
    own = set(child.pages[2:])
    assert own <= given or given <= own
    assert not spare.alive
    assert pool.audit() == {"a/1": 2, "a/1/0": 4}


def test_a_batch_is_pinned_unless_a_page_is_shared_and_names_who_was_freed() -> None:
    pool = PagePool(8, 4)
    one, other, dead = pool.reserve("a/1", 4), pool.reserve("b/1", 4), pool.reserve("c/1", 4)
    with pool.pin_batch([one, other], [range(1), range(1)]) as gone:
        assert gone == []
        pool.free(other)
        assert pool.audit() == {"a/1": 1, "b/1 (draining)": 1, "c/1": 1}
    pool.free(dead)
    with pool.pin_batch([one, dead], [range(1), range(1)]) as gone:
        assert gone == [dead]
    pool.fork(one, "a/1/0", 4, 4)
    with pytest.raises(EngineError, match="shared"), pool.pin_batch([one], [range(1)]):
        pass
    wide = pool.reserve("d/1", 8)
    with pool.pin_batch([wide], [range(3, 5)]) as gone:
        assert gone == []
    with pytest.raises(EngineError, match="token 8 lies beyond"), pool.pin_batch([wide], [range(7, 9)]):
        pass


def test_the_ledger_names_owners_and_those_still_draining() -> None:
    pool = PagePool(8, 4)
    first, second = pool.reserve("a/1", 9), pool.reserve("b/1", 4)
    child, _ = pool.fork(first, "a/1/0", 8, 12)
    with pool.pin(first) as pages:
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
    allocator = pool._allocator
    if damage == "lost":
        allocator._free[0] -= 1
    elif damage == "twice":
        allocator._stacks[False][0] = allocator._stacks[False][1]
    elif damage == "count":
        allocator._owners[handle.pages[0]] = 2
    elif damage == "borrowed":
        handle._allocation.pages += array("q", [int(allocator._stacks[False][0])])
    else:
        handle._allocation.active = False
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
                with pool.pin(handle) as pages:
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


def test_pages_lie_on_the_device_if_all_of_them_fit_there() -> None:
    pool = PagePool(12, 4, host_pages=6)
    first = pool.reserve("a/1", 16)
    assert sorted(first.pages) == [0, 1, 2, 3]
    assert not first.in_host
    # Two are left on the device, so all three lie in host memory.
    second = pool.reserve("b/1", 12)
    assert min(second.pages) >= 6
    # The rest of both homes.
    third = pool.reserve("c/1", 20)
    assert [page >= 6 for page in third.pages] == [False] * 2 + [True] * 3
    assert second.in_host
    assert third.in_host
    with pytest.raises(OutOfPages):
        pool.extend(second, 16)
    pool.free(first)
    pool.extend(second, 16)
    assert second.pages[3] < 4
    pool.audit()


def test_cached_pages_of_the_home_that_is_asked_for_are_evicted() -> None:
    pool = PagePool(8, 4, host_pages=4)
    dropped: list[bytes] = []
    pool.watch_prefixes(lambda _stored, gone: dropped.extend(gone or ()))
    device, host = pool.reserve("a/1", 16), pool.reserve("b/1", 16)
    for number, handle in enumerate((host, device)):
        pool.free(handle, [bytes([number, block] * 16) for block in range(4)])
    # Pages in host memory were used less recently.
    again = pool.reserve("c/1", 8)
    assert max(again.pages) < 4
    assert dropped == [bytes([1, block] * 16) for block in (2, 3)]
    assert min(pool.reserve("d/1", 12).pages) >= 4
    assert pool.stats().cached == 3
    pool.audit()
