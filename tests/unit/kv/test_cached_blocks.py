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


def slices(pool: PagePool, tokens: int, prefix: Sequence[bytes] = ()) -> int:
    """Evict all slices, and count them."""
    return sum(1 for _ in iter(lambda: pool.evict_for(tokens, prefix), False))


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
        del known._lrus[False][unit]
    elif damage == "count":
        known._idle[False] -= 1
    elif damage == "pages":
        known._run_of[unit.pages[0]] = None
    elif damage == "parent":
        known._remove(known._runs[CHAIN_A[2]])
        unit.parent = known._runs.pop(CHAIN_A[0])
    else:
        pool._allocator._free[False] += unit.pages[:1]
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
    with pool.pin(handle, range(24, 40)):
        pass
    # Named so that its last block stands where that of a whole unit does, or beyond its end.
    other = CHAIN_B[:4]
    for digests in ([*CHAIN_A[:4], *other[:3], CHAIN_A[5]], [*CHAIN_A[:4], *other[:2], CHAIN_A[5]]):
        assert pool.match_prefix(digests) == 16
    pool.free(handle, [*CHAIN_A, *CHAIN_B])
    pool.audit()


def test_what_a_reservation_replaces_is_evicted_in_slices_and_its_own_prefix_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.kv.pool.EVICT_PAGES", 2)
    pool = PagePool(12, 4)
    for owner, chain in (("a/1", CHAIN_A), ("b/1", CHAIN_B)):
        pool.free(published(pool, owner, chain))
    assert not pool.evict_for(4 * 13, CHAIN_A)
    assert not pool.evict_for(4 * 8, CHAIN_A)
    assert pool.stats().cached == 12
    # Ten pages, two of them of the prefix; the last two of the others are left to `reserve`.
    freed = []
    while pool.evict_for(4 * 10, CHAIN_A[:2]):
        freed.append(pool.stats().free)
        assert pool.audit() == {}
    assert freed == [2, 4, 6]
    assert pool.match_prefix(CHAIN_B) == 16, "the least recently used went first"
    assert pool.reserve("c/1", 4 * 10, CHAIN_A[:2]).cached == 8


def test_slices_spare_a_run_of_several_pages_whose_beginning_is_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.pool.EVICT_PAGES", 1)
    # Three pages of two tokens are two blocks of three.
    pool, copied = PagePool(9, 2, 3), list[PageCopy]()
    for owner, chain in (("a/1", CHAIN_A[:2]), ("b/1", CHAIN_B[:4])):
        handle = pool.reserve(owner, 3 * len(chain))
        pool.free(handle, chain)
    assert slices(pool, 12, CHAIN_A[:1]) == 2
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (6, 0)
    assert pool.reserve("c/1", 12, CHAIN_A[:1], copy=copied.append).cached == 3


def test_slices_are_of_the_home_that_the_pages_will_be_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.pool.EVICT_PAGES", 1)
    pool = PagePool(12, 4, host_pages=6)
    on_device, in_host = published(pool, "a/1", CHAIN_A), published(pool, "b/1", CHAIN_B)
    assert in_host.in_host > on_device.in_host
    for handle in (in_host, on_device):
        pool.free(handle)
    assert slices(pool, 4 * 5) == 4
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (8, 24)
    pool.free(pool.reserve("c/1", 4 * 5))
    # All six of the device, one of which is cached, and four cached ones in host memory.
    assert slices(pool, 4 * 10) == 4
    assert pool.stats().free == 9
