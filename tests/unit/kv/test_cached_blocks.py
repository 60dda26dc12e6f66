"""The pool's cached pages: what names cover, how they go and come back, and that the audit notices damage."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from baton.errors import EngineError
from baton.kv.cached_blocks import SLICE_NODES
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


@pytest.mark.parametrize("damage", ["name", "idle", "order", "count", "stray", "page", "blocks", "parent", "both"])
def test_the_audit_notices_nodes_that_do_not_agree(damage: str) -> None:
    pool = PagePool(8, 4)
    for chain in (CHAIN_A[:3], [*CHAIN_A[:2], CHAIN_B[0]]):
        pool.free(published(pool, "a/1", chain))
    known, pages = pool._block_index, np.flatnonzero(pool._block_index.cached())
    node = int(known._node_of[pages[0]])
    if damage == "name":
        del known._named[CHAIN_A[2][-1]][CHAIN_A[2]]
    elif damage == "idle":
        known._idle_in[node] = 1
    elif damage == "order":
        known._unlink(node)
    elif damage == "count":
        known._idle[0] -= 1
    elif damage == "stray":
        known._node_of[7] = node
    elif damage == "page":
        known._node_of[pages[0]] = known._node_of[pages[-1]]
    elif damage == "blocks":
        del known._blocks[node][-1:]
    elif damage == "parent":
        known._child[known._parent[node]] = 0
    else:
        pool._allocator.add_free(pages[:1])
    with pytest.raises(EngineError, match="audit failed"):
        pool.audit()


def test_digests_that_are_no_chain_lead_nowhere() -> None:
    pool = PagePool(18, 4)
    for owner, chain in (("a/1", CHAIN_A), ("b/1", CHAIN_B)):
        pool.free(published(pool, owner, chain))
    mixed = [*CHAIN_A[:2], *CHAIN_B[2:]]
    assert pool.match_prefix(mixed) == 8
    assert pool.match_prefix(CHAIN_B[1:]) == 0
    assert pool.reserve("c/1", 24, mixed).cached_tokens == 8


class CountedReads(list[bytes]):
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.reads += len(found) if isinstance(index, slice) else 1
        return found


def test_a_long_cached_prefix_costs_no_more_than_a_short_one() -> None:
    """A look-up, an eviction, a reservation and a publication read a few digests, and the new ones."""
    pool, chain = PagePool(1400, 4), block_digests(bytes(32), range(4 * 1010), 4)
    first, digests = published(pool, "a/1", chain[:1000]), CountedReads(chain)
    pool.free(published(pool, "b/1", block_digests(bytes(32), range(8000, 8000 + 4 * 400), 4)))
    assert pool.match_prefix(digests) == 4000
    # All of it but ten pages is owned or of the prefix.
    assert not pool.evict_for(4 * 1010, digests)
    second = pool.reserve("c/1", 4 * 1010, digests)
    pool.publish(second, digests)
    pool.free(first, digests)
    assert (second.cached_tokens, pool.match_prefix(digests)) == (4000, 4040)
    assert digests.reads < 200


def test_a_sequence_is_one_node_again_when_no_other_continues_its_beginning() -> None:
    pool = PagePool(8, 4)
    pool.free(published(pool, "a/1", [*CHAIN_A[:2], *block_digests(CHAIN_A[1], range(8), 4)]))
    pool.free(published(pool, "b/1", CHAIN_A[:4]))
    pool.reserve("c/1", 4 * 4)
    handle = pool.reserve("d/1", 4 * 4, CHAIN_A)
    node_of = pool._block_index._node_of[handle.pages]
    assert (handle.cached_tokens, len(set(node_of.tolist()))) == (16, 2)
    pool.free(handle)
    node_of = pool._block_index._node_of[pool._match("", 16, CHAIN_A, 16).shared]
    assert len(node_of) == 4
    assert len(set(node_of.tolist())) == 1


def test_a_sequence_in_both_homes_is_evicted_from_either() -> None:
    pool = PagePool(8, 4, host_pages=4)
    pool.reserve("d/1", 12)
    handle = pool.reserve("a/1", 4)
    pool.extend(handle, 12)
    assert [page >= 4 for page in handle.pages] == [False, True, True]
    pool.free(handle, CHAIN_A[:3])
    pool.free(published(pool, "b/1", CHAIN_B[:2]))
    assert pool.reserve("c/1", 8).in_host
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (4, 8)


@pytest.mark.parametrize(("block_size", "tokens"), [(4, 4), (3, 6)], ids=["a run of two pages", "a part of two pages"])
def test_a_page_that_a_fork_shares_is_cached_once(block_size: int, tokens: int) -> None:
    pool = PagePool(8, 2, block_size)
    first = pool.reserve("a/1", tokens)
    second, _ = pool.fork(first, "b/1", 2, tokens)
    pool.free(first, CHAIN_A[:1])
    pool.free(second, CHAIN_B[:1])
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (block_size, 0)
    pool.audit()


def test_only_the_end_that_nobody_uses_is_evicted() -> None:
    pool = PagePool(6, 4)
    pool.free(published(pool, "a/1", CHAIN_A))
    assert pool.reserve("b/1", 16, CHAIN_A[:4]).cached_tokens == 16
    pool.reserve("c/1", 4)
    assert pool.match_prefix(CHAIN_A) == 20


def test_a_beginning_keeps_its_place_in_the_order_of_eviction_when_another_sequence_continues_it() -> None:
    """The other one has computed the beginning as well, so that it does not use these pages."""
    pool = PagePool(8, 4)
    pool.free(published(pool, "a/1", CHAIN_A[:3]))
    pool.free(published(pool, "b/1", CHAIN_B[:1]))
    published(pool, "c/1", block_digests(bytes(32), [*range(8), 99, 99, 99, 99], 4))
    pool.reserve("d/1", 12)
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (4, 4)
    pool.audit()


class CountedHolds:
    def __init__(self) -> None:
        self.holds = 0

    def __enter__(self) -> None:
        self.holds += 1

    def __exit__(self, *exc: object) -> None:
        pass


def test_an_audit_never_holds_the_lock_for_many_nodes() -> None:
    pool = PagePool(1000, 4)
    for number in range(1000):
        pool.free(published(pool, "a/1", block_digests(bytes(32), range(number, number + 4), 4)))
    pool._lock = lock = CountedHolds()  # type: ignore[assignment]
    assert pool.audit() == {}
    assert lock.holds > 1000 // SLICE_NODES


def test_the_part_of_a_last_page_is_copied_and_never_taken_for_a_whole_one() -> None:
    pool, copied = PagePool(8, 16, 4), list[PageCopy]()
    pool.free(pool.reserve("a/1", 24), CHAIN_A)
    assert (pool.stats().cached, pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_A[:5])) == (2, 24, 20)
    handle = pool.reserve("b/1", 40, CHAIN_A, copy=copied.append)
    assert (handle.cached_tokens, [copy.tokens for copy in copied]) == (24, [8])
    assert copied[0].target == handle.pages[1]
    with pool.pin(handle, range(24, 40)):
        pass
    # Named so that its last block stands where that of a whole unit does, or beyond its end.
    other = CHAIN_B[:4]
    for digests in ([*CHAIN_A[:4], *other[:3], CHAIN_A[5]], [*CHAIN_A[:4], *other[:2], CHAIN_A[5]]):
        assert pool.match_prefix(digests) == 16
    pool.free(handle, [*CHAIN_A, *CHAIN_B])
    pool.audit()


def test_a_slice_is_of_a_few_sequences_if_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.pool.SLICE_NODES", 2)
    pool = PagePool(6, 4)
    for number in range(6):
        pool.free(published(pool, "a/1", block_digests(bytes(32), range(number, number + 4), 4)))
    assert slices(pool, 4 * 6) == 2
    assert pool.stats().free == 6


def test_slices_spare_a_run_of_several_pages_whose_beginning_is_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.pool.SLICE_PAGES", 1)
    # Three pages of two tokens are two blocks of three.
    pool, copied = PagePool(9, 2, 3), list[PageCopy]()
    for owner, chain in (("a/1", CHAIN_A[:2]), ("b/1", CHAIN_B[:4])):
        handle = pool.reserve(owner, 3 * len(chain))
        pool.free(handle, chain)
    assert slices(pool, 12, CHAIN_A[:1]) == 1
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (6, 0)
    assert pool.reserve("c/1", 12, CHAIN_A[:1], copy=copied.append).cached_tokens == 3


def test_slices_are_of_the_home_that_the_pages_will_be_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.pool.SLICE_PAGES", 1)
    pool = PagePool(12, 4, host_pages=6)
    on_device, in_host = published(pool, "a/1", CHAIN_A), published(pool, "b/1", CHAIN_B)
    assert in_host.in_host > on_device.in_host
    for handle in (in_host, on_device):
        pool.free(handle)
    assert slices(pool, 4 * 5) == 4
    assert (pool.match_prefix(CHAIN_A), pool.match_prefix(CHAIN_B)) == (4, 24)
    pool.free(pool.reserve("c/1", 4 * 5))
    # All six of the device, one of which is cached, and four cached ones in host memory.
    assert slices(pool, 4 * 10) == 4
    assert pool.stats().free == 10


def told_by(pool: PagePool) -> set[bytes]:
    """The blocks that the pool's watcher believes to be cached."""
    told = set[bytes]()

    def changed(stored: Sequence[bytes], dropped: Sequence[bytes] | None) -> None:
        told.update(stored)
        told.difference_update(told.copy() if dropped is None else dropped)

    pool.watch_prefixes(changed)
    return told


def test_blocks_published_while_others_are_uncached_are_reported_as_cached() -> None:
    pool = PagePool(16, 4)
    told, bad, good = told_by(pool), published(pool, "a/1", CHAIN_A[:4]), pool.reserve("b/1", 16)
    # `uncache` takes the lock several times, here for the first time.
    pool._block_index.uncache(np.array(bad.pages))
    pool.publish(good, CHAIN_A[:4])
    pool.uncache(bad)
    assert pool.match_prefix(CHAIN_A) == 4 * len(told)
    pool.publish(good, CHAIN_A[:4])
    assert (told, pool.match_prefix(CHAIN_A)) == (set(CHAIN_A[:4]), 16)


def test_a_block_with_which_an_uncached_run_begins_too_stays_reported_as_cached() -> None:
    pool = PagePool(16, 8, 4)
    told, good, bad = told_by(pool), pool.reserve("a/1", 16), pool.reserve("b/1", 16)
    pool.publish(good, CHAIN_A[:4])
    pool.publish(bad, [*CHAIN_A[:3], CHAIN_B[0]])
    pool._block_index.uncache(np.array(bad.pages))
    # The end of a sequence makes its nodes one.
    pool.free(good)
    pool.uncache(bad)
    assert (told, pool.match_prefix(CHAIN_A)) == (set(CHAIN_A[:4]), 16)


class CountedNodes(dict[int, None]):
    looks = 0

    def __iter__(self) -> Iterator[int]:
        for node in super().__iter__():
            self.looks += 1
            yield node


def test_a_look_up_does_not_look_at_all_nodes_with_the_same_beginning() -> None:
    """Chats begin alike: their first pages differ, but not in their first blocks."""
    pool = PagePool(100, 8, 4)
    for number in range(100):
        pool.free(published(pool, "a/1", [CHAIN_A[0], *block_digests(CHAIN_A[0], [number] * 4, 4)]))
    others = pool._block_index._others[CHAIN_A[0]] = CountedNodes(pool._block_index._others[CHAIN_A[0]])
    assert len(others) == 99
    assert pool.match_prefix(CHAIN_A) == 4
    assert pool.reserve("b/1", 8, CHAIN_A).cached_tokens == 0
    assert others.looks < 10
    pool.audit()
