"""Free pages: the same ones as in a set, in runs that are as long as can be, and taken from few of them."""

from __future__ import annotations

import random

import pytest

from baton.kv.free_pages import FreePages
from baton.kv.hashing import block_digests
from baton.kv.pool import PagePool
from tests.effort import fuzz


def runs(pages: list[int]) -> int:
    """Ascending runs in `pages`."""
    return sum(page != before + 1 for before, page in zip([-2, *pages], pages, strict=False))


@fuzz("free pages", 60)
def test_any_course_equals_a_set(rng: random.Random) -> None:
    pages = rng.choice([1, 2, 7, 60, 300])
    free, model, owned = FreePages(pages), set(range(pages)), list[list[int]]()
    for _ in range(80):
        if rng.random() < 0.6:
            count = min(len(model), rng.choice([0, 1, 1, 2, 5, 17, pages]))
            after = rng.choice([None, *(taken[-1] for taken in owned if taken)])
            taken = free.take(count, after)
            assert len(taken) == len(set(taken)) == count
            assert model >= set(taken)
            if after is not None and after + 1 in model and taken:
                assert taken[0] == after + 1
            model -= set(taken)
            owned.append(taken)
        elif owned:
            back = owned.pop(rng.randrange(len(owned)))
            rng.shuffle(back)
            kept = rng.choice([0, 0, len(back) // 2])
            free.add(back[kept:])
            model |= set(back[kept:])
            owned.append(back[:kept])
        assert len(free) == len(model)
        assert sorted(free) == sorted(model)
        starts = [page for page in model if page - 1 not in model]
        assert sorted(free._end_of) == sorted(starts)
        assert sum(len(listed) for listed in free._sized) == len(starts)


def test_what_was_taken_in_pieces_is_one_run_when_all_is_back() -> None:
    free, order = FreePages(100), list(range(100))
    pieces = [free.take(7) for _ in range(14)]
    assert [runs(piece) for piece in pieces] == [1] * 14
    random.Random(0).shuffle(order)
    free.take(2)
    for page in order:
        free.add([page])
    assert free.take(100) == list(range(100))


def test_a_long_run_is_cut_only_where_no_shorter_one_will_do() -> None:
    free = FreePages(100)
    first, _, second, _ = free.take(5), free.take(1), free.take(20), free.take(1)
    free.add(second)
    free.add(first)
    assert free.take(4) == [0, 1, 2, 3]
    assert free.take(18) == list(range(6, 24))
    assert free.take(30) == list(range(27, 57))
    # No run is long enough: the longest goes first.
    assert free.take(44) == [*range(57, 100), 4]


def test_a_growing_handle_takes_the_page_after_its_last() -> None:
    pool = PagePool(40, 4)
    handle, other = pool.reserve("a/1", 12), pool.reserve("b/1", 4)
    for tokens in range(1, 7):
        pool.extend(other, tokens * 4)
    assert list(other.pages) == list(range(3, 9))
    pool.extend(handle, 16)
    assert handle.pages[3] == 9
    pool.free(other)
    pool.extend(handle, 24)
    assert list(handle.pages[3:]) == [9, 10, 11]


def test_what_follows_a_shared_beginning_lies_behind_it() -> None:
    pool, chain = PagePool(40, 4), block_digests(bytes(32), range(32), 4)
    first = pool.reserve("a/1", 32)
    pool.free(first, chain)
    pool.free(pool.reserve("b/1", 20))
    again = pool.reserve("c/1", 48, chain)
    assert again.cached == 32
    assert runs(list(again.pages)) == 1
    fork, _ = pool.fork(again, "c/1/0", 48, 56)
    assert runs(list(fork.pages)) == 1


def test_a_full_pool_evicts_several_pages_at_a_time_and_so_has_long_runs() -> None:
    rng, pool, taken = random.Random(0), PagePool(4000, 2), list[int]()
    for turn in range(600):
        tokens = 2 * rng.randint(2, 40)
        handle = pool.reserve(f"a/{turn}", tokens)
        taken.append(runs(list(handle.pages)))
        pool.free(handle, block_digests(turn.to_bytes(32, "big"), range(tokens), 2))
    assert sum(taken[300:]) / 300 < 2
    # A page alone needs no neighbour.
    rest = pool.reserve("b/1", 2 * pool.stats().free)
    cached = pool.stats().cached
    pool.extend(rest, rest.capacity + 2)
    assert pool.stats().cached == cached - 1


@pytest.mark.parametrize("churn", range(4))
def test_a_long_prompt_has_a_run_again_after_churn(churn: int) -> None:
    rng, pool = random.Random(churn), PagePool(400, 4)
    chains = [block_digests(bytes([seed] * 32), range(800), 4) for seed in range(6)]
    for turn in range(60):
        # Finished prompts stay cached, so that each takes what the eviction of another has left.
        handle = pool.reserve(f"a/{turn}", 4 * rng.choice([150, 180, 200]))
        small = [pool.reserve(f"s/{turn}/{index}", 4 * rng.choice([1, 3, 8])) for index in range(5)]
        for one in small:
            pool.extend(one, one.capacity + 4)
        assert runs(list(handle.pages)) <= 8
        pool.free(handle, chains[turn % 6][: len(handle.pages)])
        for one in small:
            pool.free(one)
    pool.drop_cached()
    assert list(pool.reserve("b/1", 1600).pages) == list(range(400))
    pool.audit()
