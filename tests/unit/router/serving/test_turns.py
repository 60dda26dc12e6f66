"""Turns of tenants at a few threads."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.turns import Turns

TENANTS = "abcd"


@given(
    threads=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["push", "push", "end", "remove"]), st.sampled_from(TENANTS))),
)
def test_no_tenant_has_all_threads_and_none_waits_for_nothing(threads: int, steps: list[tuple[str, str]]) -> None:
    turns: Turns[int] = Turns(threads)
    waiting: dict[str, deque[int]] = defaultdict(deque)
    running: Counter[str] = Counter()
    for number, (step, tenant) in enumerate(steps):
        if step == "push":
            turns.push(tenant, number)
            waiting[tenant].append(number)
        elif step == "end" and running[tenant]:
            turns.end(tenant)
            running[tenant] -= 1
        elif step == "remove":
            work = waiting[tenant].pop() if waiting[tenant] else None
            assert turns.remove(tenant, number if work is None else work) is (work is not None)
        while (found := turns.begin()) is not None:
            assert found[1] == waiting[found[0]].popleft()
            running[found[0]] += 1
        most = max(1, threads - 1)
        assert running.total() <= threads
        assert max(running.values(), default=0) <= most
        assert {name: turns.waiting(name) for name in TENANTS} == {name: len(waiting[name]) for name in TENANTS}
        if running.total() < threads:
            assert all(not queue or running[name] == most for name, queue in waiting.items())


@pytest.mark.parametrize(("threads", "floods"), [(2, 1), (2, 3), (4, 1), (4, 3)])
def test_a_tenants_first_work_waits_for_at_most_one_piece_of_each_flood(threads: int, floods: int) -> None:
    turns: Turns[int] = Turns(threads)
    running: deque[str] = deque()

    def begin() -> list[str]:
        begun = []
        while (found := turns.begin()) is not None:
            begun.append(found[0])
        running.extend(begun)
        return begun

    for flood in range(floods):
        for number in range(100):
            turns.push(f"flood {flood}", number)
    begin()
    for _ in range(10):
        turns.end(running.popleft())
        begin()
    turns.push("other", 0)
    begun = begin()
    while "other" not in begun:
        turns.end(running.popleft())
        begun += begin()
    before = begun.index("other")
    assert before == 0 if floods == 1 else before <= floods
