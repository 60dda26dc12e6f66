"""The pool's cached pages: what names cover, how they go and come back, and that the audit notices damage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.errors import EngineError
from baton.kv.hashing import block_digests
from baton.kv.pool import PageCopy, PageHandle, PagePool

CHAIN_A, CHAIN_B = block_digests(bytes(32), range(24), 4), block_digests(bytes(32), range(50, 74), 4)


def published(pool: PagePool, owner: str, digests: Sequence[bytes]) -> PageHandle:
    handle = pool.reserve(owner, 4 * len(digests))
    pool.publish(handle, digests)
    return handle


@pytest.mark.parametrize("damage", ["name", "idle", "lru", "count", "pages", "parent", "both"])
def test_the_audit_notices_names_that_do_not_agree(damage: str) -> None:
    pool = PagePool(6, 4)
    handle = published(pool, "a/1", CHAIN_A[:3])
    pool.free(handle)
    known = pool._block_index
    unit = known._runs[CHAIN_A[1]]
    if damage == "name":
        del known._runs[CHAIN_A[2]]
    elif damage == "idle":
        unit.idle = 0
    elif damage == "lru":
        del known._lru[unit]
    elif damage == "count":
        known.idle_pages -= 1
    elif damage == "pages":
        known._run_of[unit.pages[0]] = None
    elif damage == "parent":
        known._remove(known._runs[CHAIN_A[2]])
        unit.parent = known._runs.pop(CHAIN_A[0])
    else:
        pool._free += unit.pages[:1]
    with pytest.raises(EngineError, match="audit failed"):
        pool.audit()


def test_digests_that_are_no_chain_lead_nowhere() -> None:
    pool = PagePool(24, 4)
    for owner, chain in (("a/1", CHAIN_A), ("b/1", CHAIN_B)):
        pool.free(published(pool, owner, chain))
    mixed = [*CHAIN_A[:2], *CHAIN_B[2:]]
    assert pool.match_prefix(mixed) == 8
    assert pool.match_prefix(CHAIN_B[1:]) == 0
    assert pool.reserve("c/1", 24, mixed).cached == 8
    other = pool.reserve("d/1", 24)
    pool.publish(other, [*CHAIN_A[:1], *CHAIN_B])
    pool.publish(other, CHAIN_B[1:])
    pool.audit()
    assert pool.match_prefix([*CHAIN_A[:1], *CHAIN_B]) == 4


def test_to_publish_what_is_new_costs_no_more_for_a_long_chain() -> None:
    asked = []

    class Digest(bytes):
        def __hash__(self) -> int:
            asked.append(self)
            return super().__hash__()

    pool, chain = PagePool(1001, 4), [Digest(number.to_bytes(32)) for number in range(1001)]
    handle = published(pool, "a/1", chain[:1000])
    pool.extend(handle, 4004)
    asked.clear()
    pool.publish(handle, chain)
    assert pool.match_prefix(chain[-1:]) == 0
    assert len(asked) < 30
    assert pool.match_prefix(chain) == 4004


def test_what_a_sequence_leaves_of_its_last_page_is_copied_and_never_taken_for_a_whole_one() -> None:
    pool, copied = PagePool(8, 16, 4), list[PageCopy]()
    pool.free(pool.reserve("a/1", 24), CHAIN_A)
    assert (pool.stats().cached, pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_A[:5])) == (2, 24, 20)
    handle = pool.reserve("b/1", 40, CHAIN_A, copy=copied.append)
    assert (handle.cached, [copy.tokens for copy in copied]) == (24, [8])
    assert copied[0].target == handle.pages[1]
    with pool.pinned(handle, range(24, 40)):
        pass
    # Named so that its last block stands where that of a whole unit does, or beyond its end.
    other = CHAIN_B[:4]
    for digests in ([*CHAIN_A[:4], *other[:3], CHAIN_A[5]], [*CHAIN_A[:4], *other[:2], CHAIN_A[5]]):
        assert pool.match_prefix(digests) == 16
    pool.free(handle, [*CHAIN_A, *CHAIN_B])
    pool.audit()


def test_a_name_goes_with_the_beginning_of_its_chain_and_may_be_given_again() -> None:
    pool, told = PagePool(5, 4), list[tuple[list[bytes], list[bytes]]]()
    first = published(pool, "a/1", CHAIN_A[:1])
    second = published(pool, "b/1", CHAIN_A[:2])
    pool.watch_prefixes(lambda stored, dropped: told.append((list(stored), list(dropped))))
    assert told.pop() == (CHAIN_A[:2], [])
    pool.free(first)
    taken = pool.reserve("c/1", 12)
    assert told.pop() == ([], CHAIN_A[:2])
    assert pool.match_prefix(CHAIN_A) == 0
    pool.publish(second, CHAIN_A[:2])
    assert told.pop() == (CHAIN_A[:2], [])
    assert list(pool.reserve("d/1", 8, CHAIN_A).pages) == list(second.pages)
    pool.free(taken)
    assert not told


def test_dropping_forgets_names_in_use_too_and_the_pages_return_with_their_owners() -> None:
    pool = PagePool(5, 4)
    first, second = published(pool, "a/1", CHAIN_A[:2]), pool.reserve("b/1", 12, CHAIN_A)
    pool.free(published(pool, "c/1", CHAIN_B[:1]))
    assert pool.stats().cached == 1
    assert pool.drop_cached() == 1
    assert pool.match_prefix(CHAIN_A) == pool.match_prefix(CHAIN_B) == 0
    assert pool.audit() == {"a/1": 2, "b/1": 3}
    with pytest.raises(EngineError, match="shared or published"), pool.pinned(second, range(4)):
        pass
    with pool.pinned(first):
        pool.free(first)
    assert pool.stats().cached == 0
    pool.publish(second, CHAIN_A[:2])
    pool.free(second)
    assert (pool.stats().cached, pool.match_prefix(CHAIN_A)) == (2, 8)


def test_pages_that_drain_become_cached_and_are_told_of() -> None:
    pool, returned = PagePool(3, 4), list[int]()
    handle = published(pool, "a/1", CHAIN_A[:2])
    pool.watch(lambda: returned.append(pool.stats().cached))
    with pool.pinned(handle):
        pool.free(handle)
        pool.publish(handle, CHAIN_B)
        # Whoever shares them meanwhile may keep them.
        assert pool.reserve("b/1", 8, CHAIN_A).cached == 8
        assert pool.audit() == {"a/1 (draining)": 2, "b/1": 2}
        assert returned == []
    pool.free_all()
    assert returned == [0]
    again = published(pool, "c/1", CHAIN_B[:2])
    with pool.pinned(again):
        pool.free(again)
        assert pool.stats().cached == 0
    assert returned == [0, 2]
    with pytest.raises(EngineError, match="-1 of them"):
        pool.reserve("d/1", 8, CHAIN_B, -1)


def test_a_chain_is_used_as_a_whole_also_where_its_pages_are_of_two_owners() -> None:
    pool = PagePool(8, 4)
    first, second = published(pool, "a/1", CHAIN_A[:2]), published(pool, "b/1", CHAIN_A[:4])
    pool.free(first)
    pool.free(published(pool, "c/1", CHAIN_B[:1]))
    pool.free(second)
    stats = pool.stats()
    assert (stats.used, stats.free, stats.cached) == (0, 3, 5)
    taken = pool.reserve("d/1", 16)
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (16, 0)
    for held in (12, 8, 4, 0):
        pool.extend(taken, taken.capacity + 4)
        assert pool.match_prefix(CHAIN_A) == held
