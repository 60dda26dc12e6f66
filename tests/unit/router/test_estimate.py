"""When a first token is to be expected, and who is refused for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.errors import Overloaded
from baton.kv.format import KvFormat, KvPart
from router.estimate import check_deadline, first_token_s
from router.line import WaitingLine
from router.policy import Fleet, PrefillView

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
P = PrefillView("p", KV, rate=100)


def fleet(*prefill: PrefillView) -> Fleet:
    return Fleet(prefill, ())


def test_the_prompt_takes_its_time_at_the_fastest_rate() -> None:
    assert first_token_s(fleet(P, replace(P, name="q", rate=200)), tokens=400, line_s=0) == pytest.approx(2)


def test_the_longer_of_line_and_pending_work_comes_before_it() -> None:
    busy = replace(P, pending_tokens=300, own_tokens=500)
    assert first_token_s(fleet(busy), tokens=100, line_s=0) == pytest.approx(6)
    assert first_token_s(fleet(busy), tokens=100, line_s=9) == pytest.approx(10)
    assert first_token_s(fleet(busy, replace(P, name="idle")), tokens=100, line_s=0) == pytest.approx(1)


def test_what_is_unknown_counts_as_nothing() -> None:
    assert first_token_s(fleet(P, replace(P, name="new", rate=0)), tokens=10**6, line_s=3) == 3
    assert first_token_s(fleet(replace(P, rate=0)), tokens=10**6, line_s=0) == 0
    assert first_token_s(fleet(), tokens=10**6, line_s=0) == 0


def test_a_deadline_that_cant_be_met_is_refused_with_both_times() -> None:
    check_deadline(2.0, 2.0, 0.5)
    with pytest.raises(Overloaded, match=r"deadline is in 1\.0 s, the first token is expected in 2\.0 s") as refusal:
        check_deadline(2.0, 1.0, 0.5)
    assert refusal.value.retry_after == 0.5


def test_a_lines_wait_is_its_pace_times_those_before() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    for i in range(10):
        line.push(f"a{i}", tenant="a", now=0)
    assert line.wait_s("a", 0) == 0, "no pace is known"
    for i in range(5):
        line.pop(now=i)
        line.departed(now=i)
    assert line.wait_s("a", 4) == pytest.approx(5)
    # Another tenant's first request is served after one of the flood.
    assert line.wait_s("b", 4) == pytest.approx(1)
    # Where nothing moves any more, the standstill counts.
    assert line.wait_s("a", 34) == pytest.approx(5 + 29)


def test_popping_alone_is_no_pace_since_who_is_refused_returns() -> None:
    line: WaitingLine[str] = WaitingLine(100)
    for entry in "abc":
        line.push(entry, tenant="", now=0)
    for now in range(5):
        assert line.pop(now=now) == "a"
        line.push_front("a", tenant="")
    assert line.wait_s("", 5) == 0


def test_a_workers_hint_is_the_least_delay() -> None:
    line: WaitingLine[str] = WaitingLine(1)
    line.hint_s = 7.5
    line.push("a", tenant="", now=0)
    with pytest.raises(Overloaded) as refusal:
        line.check("")
    assert refusal.value.retry_after == 7.5
