"""Placement from snapshots written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kv.format import KvFormat, KvPart
from router.policy import Choice, DecodeView, Demand, Fleet, PrefillView, choose, servable

KV = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=16)
HALF = replace(KV, parts=tuple(replace(part, dtype="bfloat16") for part in KV.parts))
P = PrefillView("p", KV)
D = DecodeView("d", KV, free_tokens=100, free_slots=4)


def pick(prefill: list[PrefillView], decode: list[DecodeView], demand: Demand | None = None) -> Choice | None:
    return choose(Fleet(tuple(prefill), tuple(decode)), demand or Demand(100), prefill_limit=4)


def test_prefill_goes_where_the_prompt_is_done_first() -> None:
    slow = replace(P, name="slow", pending_tokens=100, rate=100)
    fast = replace(P, name="fast", pending_tokens=1000, rate=1000)
    assert pick([slow, fast], [D]) == Choice("fast", ("d",))
    assert pick([slow, replace(fast, pending_tokens=2000)], [D]) == Choice("slow", ("d",))


def test_an_unknown_rate_counts_as_the_usual_one() -> None:
    known = replace(P, name="known", pending_tokens=500, rate=100)
    new = replace(P, name="new", pending_tokens=400)
    assert pick([known, new], [D]) == Choice("new", ("d",))


def test_what_this_router_has_sent_counts_before_the_worker_reports_it() -> None:
    sent = replace(P, name="sent", own_tokens=1000, own_requests=1)
    assert pick([sent, replace(P, name="idle")], [D]) == Choice("idle", ("d",))


def test_idle_workers_take_turns() -> None:
    used = replace(P, name="a", dispatched=1)
    assert pick([used, replace(P, name="b")], [D]) == Choice("b", ("d",))


def test_cached_prefixes_attract() -> None:
    far = replace(P, name="far", pending_tokens=50, rate=100)
    near = replace(P, name="near", rate=100)
    assert pick([far, near], [D], Demand(100)) == Choice("near", ("d",))
    assert pick([far, near], [D], Demand(100, cached={"far": 90})) == Choice("far", ("d",))


def test_decode_goes_where_most_room_is() -> None:
    full = replace(D, name="full", free_slots=0, free_tokens=900)
    roomy = replace(D, name="roomy", free_tokens=200)
    assert pick([P], [full, D, roomy]) == Choice("p", ("roomy", "d", "full"))


def test_nothing_leaves_the_line_without_a_prefill_seat() -> None:
    assert pick([replace(P, own_requests=4)], [D]) is None
    assert pick([replace(P, own_requests=3)], [D]) == Choice("p", ("d",))


def test_draining_workers_get_nothing() -> None:
    assert pick([replace(P, draining=True)], [D]) is None
    assert pick([P], [replace(D, draining=True)]) is None
    assert pick([P, replace(P, name="a", draining=True)], [D, replace(D, name="a", draining=True)]) == Choice(
        "p", ("d",)
    )


@pytest.mark.parametrize(("converts", "placed"), [(True, Choice("p", ("d",))), (False, None)])
def test_pairs_whose_kv_differs_need_conversion(converts: bool, placed: Choice | None) -> None:
    decode = replace(D, kv_format=HALF, converts_kv=converts)
    assert pick([P], [decode]) == placed
    assert servable(Fleet((P,), (decode,)), decodes=True) is (placed is not None)
    assert pick([P], [replace(decode, kv_format=replace(KV, layers=3))]) is None


def test_a_worker_without_a_match_is_passed_over() -> None:
    lonely = replace(P, name="lonely", kv_format=HALF)
    assert pick([lonely, replace(P, pending_tokens=10**6)], [D]) == Choice("p", ("d",))


def test_what_failed_before_is_the_last_resort() -> None:
    other_p, other_d = replace(P, name="p2", pending_tokens=10**6), replace(D, name="d2", free_tokens=1)
    both = [P, other_p], [D, other_d]
    assert pick(*both, Demand(1, avoid=frozenset({"p"}))) == Choice("p2", ("d", "d2"))
    assert pick(*both, Demand(1, avoid=frozenset({"d"}))) == Choice("p", ("d2",))
    assert pick(*both, Demand(1, avoid_pairs=frozenset({("p", "d")}))) == Choice("p", ("d2",))
    assert pick([P], [D], Demand(1, avoid=frozenset({"p", "d"}))) == Choice("p", ("d",))
    assert pick([P], [D], Demand(1, avoid_pairs=frozenset({("p", "d")}))) == Choice("p", ("d",))


def test_a_request_waits_rather_than_return_to_what_failed() -> None:
    busy = replace(P, name="busy", own_requests=4)
    assert pick([P, busy], [D], Demand(1, avoid=frozenset({"p"}))) is None


def test_without_decode_only_prefill_matters() -> None:
    assert pick([P], [], Demand(1, decodes=False)) == Choice("p")
    assert pick([P], []) is None
    assert servable(Fleet((P,), ()), decodes=False)
    assert not servable(Fleet((P,), ()), decodes=True)
