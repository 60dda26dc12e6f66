"""The waiting line: bounds, turns between tenants, deadlines."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, Overloaded
from router.placement.queue import WaitingLine

T = TypeVar("T", bound=Hashable)


def pop(line: WaitingLine[T], now: float) -> T | None:
    """Hand out whose turn it is."""
    entry = next(line.candidates(now), None)
    if entry is not None:
        line.take(entry)
    return entry


def drain(line: WaitingLine[str], now: float = 0.0) -> list[str]:
    popped = []
    while (entry := pop(line, now)) is not None:
        popped.append(entry)
    return popped


def test_one_tenant_is_served_in_order() -> None:
    line: WaitingLine[str] = WaitingLine(10)
    for entry in "abc":
        line.push(entry, tenant="", now=0)
    assert (next(line.candidates(0)), len(line)) == ("a", 3)
    assert drain(line) == ["a", "b", "c"]


def test_tenants_take_turns() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    for i in range(5):
        line.push(f"flood{i}", tenant="flood", now=0)
    for i in range(2):
        line.push(f"calm{i}", tenant="calm", now=0)
    assert drain(line) == ["flood0", "calm0", "flood1", "calm1", "flood2", "flood3", "flood4"]


def test_a_full_line_refuses_at_once_but_a_flood_takes_no_other_tenants_share() -> None:
    line: WaitingLine[str] = WaitingLine(4)
    for i in range(4):
        line.push(f"flood{i}", tenant="flood", now=0)
    with pytest.raises(Overloaded, match="4 requests wait, 4 may") as refusal:
        line.push("flood4", tenant="flood", now=0)
    assert refusal.value.retry_after is not None
    for i in range(2):
        line.push(f"calm{i}", tenant="calm", now=0)
    with pytest.raises(Overloaded, match="2 requests wait, 2 may"):
        line.push("calm2", tenant="calm", now=0)


def test_retry_delay_follows_the_pace() -> None:
    line: WaitingLine[int] = WaitingLine(1000)
    for i in range(100):
        line.push(i, tenant="", now=0)
    for i in range(50):
        pop(line, 0.5 * i)
        line.departed(now=0.5 * i)
    assert line.retry_after() == pytest.approx(25, rel=0.01)


def test_what_is_too_late_is_refused_and_never_handed_out() -> None:
    line: WaitingLine[str] = WaitingLine(10)
    with pytest.raises(DeadlineExceeded):
        line.push("late", tenant="", deadline=5, now=5)
    line.push("short", tenant="", deadline=6, now=5)
    line.push("long", tenant="", now=5)
    assert pop(line, 6) == "long"
    assert len(line) == 0


def test_who_returns_is_first_and_not_bound_by_the_capacity() -> None:
    line: WaitingLine[str] = WaitingLine(1)
    line.push("b", tenant="b", now=0)
    line.put_back("first", tenant="b")
    line.put_back("a", tenant="a")
    line.put_back("second", tenant="b")
    assert drain(line) == ["first", "second", "a", "b"]


def test_replays_of_one_tenant_delay_another_by_one_turn_each_time_at_most() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    order = []
    for number in range(64):
        line.push_front(f"fork{number}", tenant="many")
    for number in range(3):
        line.push(f"new{number}", tenant="other", now=0)
    for number in range(6):
        entry = pop(line, 0)
        assert entry is not None
        order.append(entry.rstrip("0123456789"))
        line.push_front(f"again{number}", tenant="many")
    assert sorted(map(len, "".join("o" if each == "new" else "m" for each in order).split("o"))) == [0, 1, 1, 1]


def test_leaving_is_idempotent() -> None:
    line: WaitingLine[str] = WaitingLine(1)
    line.push("a", tenant="", now=0)
    assert (line.remove("a"), line.remove("a"), len(line)) == (True, False, 0)


def test_a_lines_wait_is_its_pace_times_those_before() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    for i in range(15):
        line.push(f"a{i}", tenant="a", now=0)
    for i in range(10):
        assert i > 8 or line.wait_s("a", i) == 0, "the first departures tell no pace"
        pop(line, i)
        line.departed(now=i)
    assert line.wait_s("a", 9) == pytest.approx(5)
    # Another tenant's first request is served after one of the flood.
    assert line.wait_s("b", 9) == pytest.approx(1)
    # Where nothing moves any more, the standstill counts.
    assert line.wait_s("a", 39) == pytest.approx(5 + 29)


def test_the_time_in_which_nobody_waits_is_no_standstill() -> None:
    line: WaitingLine[int] = WaitingLine(100)
    for i in range(12):
        line.push(i, tenant="", now=0)
    for i in range(10):
        pop(line, i)
        line.departed(now=i)
    assert line.remove(10)
    assert line.remove(11)
    line.push(12, tenant="", now=3600)
    assert line.wait_s("", 3600) == pytest.approx(1)
    assert pop(line, 3600) == 12
    line.push(13, tenant="", now=3600)
    line.departed(now=3600)
    assert line.wait_s("", 3601) == pytest.approx(1)


def test_one_long_interval_does_not_make_a_quick_line_slow() -> None:
    line: WaitingLine[int] = WaitingLine(1000)
    for i in range(100):
        line.push(i, tenant="", now=0)
    now = 0.0
    for i in range(50):
        now += 20.0 if i == 40 else 0.1
        pop(line, now)
        line.departed(now=now)
    assert line.wait_s("", now) < 50


def test_popping_alone_is_no_pace_since_who_is_refused_returns() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    for entry in "abc":
        line.push(entry, tenant="", now=0)
    for now in range(5):
        assert pop(line, now) == "a"
        line.push_front("a", tenant="")
    assert line.wait_s("", 5) == 0


def test_a_workers_hint_is_the_least_delay() -> None:
    line: WaitingLine[str] = WaitingLine(1)
    line.hint_s = 7.5
    line.push("a", tenant="", now=0)
    with pytest.raises(Overloaded) as refusal:
        line.check("")
    assert refusal.value.retry_after == 7.5


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 6)), min_size=1, max_size=3, unique_by=lambda t: t[0]))
def test_while_all_wait_nobody_gets_two_turns_more_than_another(floods: list[tuple[str, int]]) -> None:
    line: WaitingLine[tuple[str, int]] = WaitingLine(1000)
    for tenant, count in floods:
        for i in range(count):
            line.push((tenant, i), tenant=tenant, now=0)
    turns = dict.fromkeys((tenant for tenant, _ in floods), 0)
    left = dict(floods)
    while (entry := pop(line, 0)) is not None:
        turns[entry[0]] += 1
        left[entry[0]] -= 1
        waiting = [turns[tenant] for tenant in turns if left[tenant]]
        assert not waiting or max(waiting) - min(waiting) <= 1


def test_who_has_least_at_workers_is_next() -> None:
    held = {"flood": 2, "other": 1}
    line = WaitingLine[str](8, lambda tenant: held[tenant])
    for entry in ("flood 0", "flood 1", "other 0", "other 1"):
        line.push(entry, tenant=entry.split()[0], now=0.0)
    assert [pop(line, 0.0), pop(line, 0.0)] == ["other 0", "other 1"]
    held["other"] = 2
    line.push("other 2", tenant="other", now=0.0)
    assert drain(line) == ["flood 0", "other 2", "flood 1"]
