"""The index of prefixes: against a plain list of who holds what, and what bounds it."""

import hashlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.hashing import NAME_BYTES
from router.placement.prefix_directory import EXPECTED_S, MAX_EXPECTED, PrefixIndex
from tests.effort import effort

SIZE = 16


def chain(*words: str) -> list[bytes]:
    """Digests of a chain of words, each of which stands for all before it."""
    return [hashlib.sha256(" ".join(words[: i + 1]).encode()).digest() for i in range(len(words))]


def names(digests: Sequence[bytes]) -> list[bytes]:
    return [digest[:NAME_BYTES] for digest in digests]


def tokens(index: PrefixIndex, digests: Sequence[bytes], now: float = 0.0) -> dict[str, int]:
    found = index.match(digests, SIZE, now)
    return {worker: held for worker in "abcd" if (held := found.tokens(worker))}


def store(index: PrefixIndex, worker: str, digests: Sequence[bytes], *, reset: bool = False) -> None:
    index.update(worker, reset=reset, stored=names(digests), dropped=())


def test_the_longest_prefix_and_all_who_hold_less() -> None:
    index, talk = PrefixIndex(), chain("system", "q1", "a1", "q2")
    store(index, "a", talk[:3])
    store(index, "b", talk[:1])
    store(index, "c", chain("other"))
    assert tokens(index, talk) == {"a": 3 * SIZE, "b": SIZE}
    levels = index.match(talk, SIZE, 0.0).levels
    assert [(held, set(holders)) for held, holders in levels] == [(48, {"a"}), (16, {"a", "b"})]
    assert tokens(index, chain("new", "q1")) == {}
    assert tokens(index, []) == {}


def test_news_overrides_and_a_lost_worker_is_forgotten() -> None:
    index, talk = PrefixIndex(), chain(*"xyz")
    store(index, "a", talk)
    store(index, "b", talk)
    index.update("a", reset=False, stored=(), dropped=names(talk[1:]))
    assert tokens(index, talk) == {"a": SIZE, "b": 3 * SIZE}
    store(index, "b", talk[:2], reset=True)
    assert tokens(index, talk) == {"a": SIZE, "b": 2 * SIZE}
    index.update("c", reset=True, stored=names(talk[:1]), dropped=names(talk[:1]))
    index.forget("b")
    assert tokens(index, talk) == {"a": SIZE}
    assert len(index) == 1
    index.forget("a")
    assert len(index) == 0
    assert not any(index._blocks)


def test_many_blocks_of_a_lost_worker_are_forgotten_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.prefix_directory.MAX_FORGOTTEN", 2)
    index, talk = PrefixIndex(), chain(*"vwxyz")
    store(index, "a", talk)
    store(index, "b", talk[:1])
    left = []
    while index.forget("a"):
        left.append(len(index))
    assert left == [4, 2]
    assert (len(index), tokens(index, talk)) == (1, {"b": SIZE})


def test_sent_blocks_count_until_they_are_reported_or_were_sent_too_long_ago() -> None:
    index, talk = PrefixIndex(), chain(*"xyz")
    index.expect("a", talk, now=0.0)
    index.expect("b", talk, now=1.0)
    store(index, "b", talk[:2])
    assert tokens(index, talk, EXPECTED_S - 0.1) == {"a": 3 * SIZE, "b": 3 * SIZE}
    assert tokens(index, talk, EXPECTED_S) == {"b": 3 * SIZE}
    assert tokens(index, talk, EXPECTED_S + 1.0) == {"b": 2 * SIZE}
    # Sent again, it is expected for as long again; what was told stays told.
    index.expect("b", talk, now=40.0)
    index.expect("b", talk, now=50.0)
    assert tokens(index, talk, 40.0 + EXPECTED_S) == {"b": 3 * SIZE}
    assert tokens(index, talk, 50.0 + EXPECTED_S) == {"b": 2 * SIZE}
    # All anew does not speak against what is on its way.
    index.expect("c", talk, now=100.0)
    store(index, "c", (), reset=True)
    assert tokens(index, talk, 100.0) == {"b": 2 * SIZE, "c": 3 * SIZE}


def test_blocks_that_are_expected_no_longer_are_forgotten_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.prefix_directory.MAX_FORGOTTEN", 3)
    index, left = PrefixIndex(), []
    for number in range(5):
        index.expect("a", chain(f"prompt {number}", "end"), now=0.0)
    for _ in range(3):
        index.match([], SIZE, EXPECTED_S)
        left.append(len(index))
    assert left == [6, 2, 0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.text("xyz", min_size=1, max_size=12), st.sampled_from(["store", "cut", "lose"])
        ),
        max_size=30,
    ),
    st.text("xyz", max_size=14),
)
@effort(100)
def test_the_prefix_index_equals_a_plain_model(events: list[tuple[str, str, str]], asked: str) -> None:
    index = PrefixIndex()
    plain: dict[str, set[bytes]] = {worker: set() for worker in "abcd"}
    for worker, text, what in events:
        digests = chain(*text)
        if what == "store":
            store(index, worker, digests)
            plain[worker].update(digests)
        elif what == "cut":
            # As pools evict: with a block goes all that follows it.
            gone = [d for d in plain[worker] if d in digests[-1:]]
            longer = [chain(*text, *rest) for rest in ("x", "y", "z")]
            if gone and not any(more[-1] in plain[worker] for more in longer):
                index.update(worker, reset=False, stored=(), dropped=names(gone))
                plain[worker].difference_update(gone)
        else:
            index.forget(worker)
            plain[worker].clear()
    digests = chain(*asked)
    expected = {}
    for worker, held in plain.items():
        count = next((i for i, digest in enumerate(digests) if digest not in held), len(digests))
        if count:
            expected[worker] = count * SIZE
    assert tokens(index, digests) == expected
    assert len(index) == sum(map(len, plain.values()))


def test_memory_is_bounded_and_all_chains_stay_known() -> None:
    index = PrefixIndex(most=1000)
    talks = [chain(f"talk {number}", *map(str, range(63))) for number in range(40)]
    for number, talk in enumerate(talks):
        store(index, "abcd"[number % 4], talk)
    store(index, "a", ())
    assert len(index) <= 1000
    assert index.granularity == 4
    for number, talk in enumerate(talks):
        held = tokens(index, talk)
        assert set(held) == {"abcd"[number % 4]}
        assert 64 - 24 <= held["abcd"[number % 4]] / SIZE <= 64
    index.forget("a")
    assert all(tokens(index, talk) == {} for talk in talks[::4])


def test_names_are_left_out_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.prefix_directory.MAX_FORGOTTEN", 20)
    index, left = PrefixIndex(most=1000), []
    store(index, "a", [hashlib.sha256(f"{number}".encode()).digest() for number in range(1001)])
    while not left or len(index) < left[-1]:
        left.append(len(index))
        store(index, "a", ())
    assert len(left) > 30
    assert max(before - after for before, after in itertools.pairwise(left)) < 30
    assert 450 < len(index) < 550


def test_of_a_very_long_prompt_only_the_next_blocks_are_expected() -> None:
    """The others follow in the worker's reports: a call for all of them would hold up the event loop."""
    index = PrefixIndex()
    long = [number.to_bytes(32, "big")[::-1] for number in range(2 * MAX_EXPECTED)]
    index.expect("a", long, 0.0, first=10)
    store(index, "a", long[:10])
    assert tokens(index, long) == {"a": (10 + MAX_EXPECTED) * SIZE}
