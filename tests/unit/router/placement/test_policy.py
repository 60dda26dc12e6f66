"""Placement from snapshots written by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from baton.kv.format import KvFormat, KvPart
from baton.rates import DecayingSum
from router.placement.fleet import RECENT_S, RECENT_SHARE, DecodeView, FleetView, PrefillView
from router.placement.policy import (
    NOTHING_EXCLUDED,
    Excluded,
    PlacementQuery,
    Selection,
    can_serve,
    matching_decodes,
    quietest_pair,
    select_workers,
)
from tests.hits import hits

KV = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=16)
HALF = replace(KV, parts=tuple(replace(part, dtype="bfloat16") for part in KV.parts))
P = PrefillView("p", KV)
D = DecodeView("d", KV, free_tokens=100, free_slots=4)


def pick(
    prefill: list[PrefillView],
    decode: list[DecodeView],
    query: PlacementQuery | None = None,
    excluded: Excluded = NOTHING_EXCLUDED,
    kept: frozenset[str] = frozenset(),
) -> Selection | None:
    fleet, query = FleetView(prefill, decode), query or PlacementQuery(100)
    fleet.kept = kept
    return select_workers(fleet, query, prefill_limit=4, excluded=excluded)


def test_prefill_goes_where_the_prompt_is_done_first() -> None:
    slow = replace(P, name="slow", pending_tokens=100, rate=100)
    fast = replace(P, name="fast", pending_tokens=1000, rate=1000)
    assert pick([slow, fast], [D]) == Selection("fast", ("d",))
    assert pick([slow, replace(fast, pending_tokens=2000)], [D]) == Selection("slow", ("d",))


def test_an_unknown_rate_counts_as_the_usual_one() -> None:
    known = replace(P, name="known", pending_tokens=500, rate=100)
    new = replace(P, name="new", pending_tokens=400)
    assert pick([known, new], [D]) == Selection("new", ("d",))


def test_what_this_router_has_sent_counts_before_the_worker_reports_it() -> None:
    sent = replace(P, name="sent", own_tokens=1000, own_requests=1)
    assert pick([sent, replace(P, name="idle")], [D]) == Selection("idle", ("d",))


def test_idle_workers_take_turns() -> None:
    used = replace(P, name="a", dispatched=1)
    assert pick([used, replace(P, name="b")], [D]) == Selection("b", ("d",))


def test_cached_prefixes_attract() -> None:
    far = replace(P, name="far", pending_tokens=50, rate=100)
    near = replace(P, name="near", rate=100)
    assert pick([far, near], [D], PlacementQuery(100)) == Selection("near", ("d",))
    assert pick([far, near], [D], PlacementQuery(100, prefill_match=hits({"far": 90}))) == Selection("far", ("d",))


def test_a_holder_is_preferred_by_no_more_than_the_time_that_it_saves() -> None:
    """A hot one does not melt: when its queue is longer than what its prefix saves, another takes the prompt."""
    cold, query = replace(P, name="cold", rate=100), PlacementQuery(100, prefill_match=hits({"hot": 80}))
    for pending, goes in ((79, "hot"), (81, "cold")):
        hot = replace(P, name="hot", pending_tokens=pending, rate=100)
        assert pick([hot, cold], [D], query) == Selection(goes, ("d",))


def test_a_prefix_that_draws_much_work_gets_a_second_holder_before_there_is_a_line() -> None:
    cold, query = replace(P, name="cold", rate=100), PlacementQuery(100, prefill_match=hits({"hot": 80}))
    for recent, goes in ((79 / RECENT_SHARE, "hot"), (81 / RECENT_SHARE, "cold")):
        hot = replace(P, name="hot", recent_tokens=recent, rate=100)
        assert pick([hot, cold], [D], query) == Selection(goes, ("d",))
    past = DecayingSum(RECENT_S)
    past.add(100, 0.0)
    past.add(100, RECENT_S)
    assert past.value(2 * RECENT_S) == pytest.approx(100 / math.e + 100 / math.e**2)


def test_many_holders_share_the_work_and_busy_ones_give_way_to_the_idle() -> None:
    views = {f"p{i}": replace(P, name=f"p{i}", pending_tokens=50, rate=100) for i in range(100)}
    fleet, match = FleetView(views.values(), [D]), hits({f"p{i}": 80 for i in range(40, 80)})
    chosen = []
    for _ in range(200):
        choice = select_workers(fleet, PlacementQuery(100, prefill_match=match), prefill_limit=99)
        assert choice is not None
        chosen.append(choice.prefill)
        view = views[choice.prefill]
        views[view.name] = replace(view, pending_tokens=view.pending_tokens + 20, own_requests=view.own_requests + 1)
        fleet.put_prefill(views[view.name])
    # 40 holders save 80 tokens each: four more of 20 tokens, and they are no better than those who hold nothing.
    assert {int(name[1:]) for name in chosen[:120]} <= set(range(40, 80))
    counts = Counter(chosen)
    assert max(counts.values()) <= 5
    assert len(counts) >= 40


def test_decode_that_holds_the_prompt_counts_as_roomier() -> None:
    holder = replace(D, name="holder", free_tokens=60)
    assert pick([P], [D, holder]) == Selection("p", ("d", "holder"))
    assert pick([P], [D, holder], PlacementQuery(100, decode_match=hits({"holder": 90}))) == Selection(
        "p", ("holder", "d")
    )
    assert pick([P], [D, holder], PlacementQuery(100, decode_match=hits({"holder": 50}))) == Selection(
        "p", ("d", "holder")
    )
    full = replace(holder, free_slots=0)
    assert pick([P], [D, full], PlacementQuery(100, decode_match=hits({"holder": 100}))) == Selection(
        "p", ("d", "holder")
    )


def test_decode_goes_where_most_room_is() -> None:
    full = replace(D, name="full", free_slots=0, free_tokens=900)
    roomy = replace(D, name="roomy", free_tokens=200)
    assert pick([P], [full, D, roomy]) == Selection("p", ("roomy", "d", "full"))


def test_nothing_leaves_the_queue_without_room_at_a_prefill_worker() -> None:
    assert pick([replace(P, own_requests=4)], [D]) is None
    assert pick([replace(P, own_requests=3)], [D]) == Selection("p", ("d",))


def test_draining_workers_get_nothing() -> None:
    assert pick([replace(P, draining=True)], [D]) is None
    assert pick([P], [replace(D, draining=True)]) is None
    assert pick([P, replace(P, name="a", draining=True)], [D, replace(D, name="a", draining=True)]) == Selection(
        "p", ("d",)
    )


@pytest.mark.parametrize(("converts", "placed"), [(True, Selection("p", ("d",))), (False, None)])
def test_pairs_whose_kv_differs_need_conversion(converts: bool, placed: Selection | None) -> None:
    decode = replace(D, kv_format=HALF, converts_kv=converts)
    assert pick([P], [decode]) == placed
    assert can_serve(FleetView((P,), (decode,)), decodes=True) is (placed is not None)
    assert pick([P], [replace(decode, kv_format=replace(KV, layers=3))]) is None


def test_a_worker_without_a_match_is_passed_over() -> None:
    lonely = replace(P, name="lonely", kv_format=HALF)
    assert pick([lonely, replace(P, pending_tokens=10**6)], [D]) == Selection("p", ("d",))


def test_what_failed_before_is_the_last_resort() -> None:
    other_p, other_d = replace(P, name="p2", pending_tokens=10**6), replace(D, name="d2", free_tokens=1)
    both = [P, other_p], [D, other_d]
    assert pick(*both, PlacementQuery(1, avoid=frozenset({"p"}))) == Selection("p2", ("d", "d2"))
    assert pick(*both, PlacementQuery(1, avoid=frozenset({"d"}))) == Selection("p", ("d2",))
    assert pick(*both, PlacementQuery(1, avoid_pairs=frozenset({("p", "d")}))) == Selection("p", ("d2",))
    assert pick([P], [D], PlacementQuery(1, avoid=frozenset({"p", "d"}))) == Selection("p", ("d",))
    assert pick([P], [D], PlacementQuery(1, avoid_pairs=frozenset({("p", "d")}))) == Selection("p", ("d",))


def test_a_request_waits_rather_than_return_to_what_failed() -> None:
    busy = replace(P, name="busy", own_requests=4)
    assert pick([P, busy], [D], PlacementQuery(1, avoid=frozenset({"p"}))) is None


def test_without_decode_only_prefill_matters() -> None:
    assert pick([P], [], PlacementQuery(1, decodes=False)) == Selection("p")
    assert pick([P], []) is None
    assert can_serve(FleetView((P,), ()), decodes=False)
    assert not can_serve(FleetView((P,), ()), decodes=True)


def test_open_breakers_are_the_last_resort_for_everybody() -> None:
    p2, d2 = replace(P, name="p2", pending_tokens=10**6), replace(D, name="d2", free_tokens=1)

    def excluded(*workers: str, pairs: tuple[tuple[str, str], ...] = ()) -> Selection | None:
        return pick([P, p2], [D, d2], PlacementQuery(1), Excluded(frozenset(workers), frozenset(pairs)))

    assert excluded("p") == Selection("p2", ("d", "d2"))
    assert excluded("d") == Selection("p", ("d2",))
    assert excluded(pairs=(("p", "d"),)) == Selection("p", ("d2",))
    assert excluded(pairs=(("p", "d"), ("p", "d2"))) == Selection("p2", ("d", "d2"))
    assert excluded("p", "p2", "d", "d2") == Selection("p", ("d", "d2"))
    # The least bad: of two excluded workers the one that did not fail this request as well.
    both = Excluded(frozenset({"d", "d2"}))
    assert pick([P, p2], [D, d2], PlacementQuery(1, avoid=frozenset({"d"})), both) == Selection("p", ("d2",))


def test_what_is_kept_for_one_request_is_for_no_other() -> None:
    kept = frozenset({"p", "d"})
    assert pick([P, replace(P, name="p2")], [D, replace(D, name="d2")], kept=kept) == Selection("p2", ("d2",))
    assert pick([P], [D], kept=kept) is None
    assert can_serve(FleetView((P,), (D,)), decodes=True)


def test_who_can_never_hold_it_is_not_asked_again() -> None:
    decodes = [D, replace(D, name="d2"), replace(D, name="other", kv_format=HALF)]
    assert pick([P], decodes, PlacementQuery(1, never=frozenset({"d"}))) == Selection("p", ("d2",))
    assert pick([P], decodes, PlacementQuery(1, never=frozenset({"d", "d2"}))) is None
    assert matching_decodes(FleetView((P,), decodes)) == {"d", "d2"}


def test_alone_goes_where_least_of_ours_runs_and_says_whether_that_is_nothing() -> None:
    p2, d2 = replace(P, name="p2", own_requests=1), replace(D, name="d2", own_requests=1)
    query = PlacementQuery(1, alone=True)
    assert quietest_pair(FleetView((P, p2), (D, d2)), query) == (Selection("p", ("d",)), True)
    assert quietest_pair(FleetView((p2,), (D,)), query) == (Selection("p2", ("d",)), False)
    assert quietest_pair(FleetView((P,), (d2,)), query) == (Selection("p", ("d2",)), False)
    assert quietest_pair(FleetView((P,), ()), query) is None
    avoided = replace(query, avoid=frozenset({"d"}))
    assert quietest_pair(FleetView((P,), (D, d2)), avoided) == (Selection("p", ("d2",)), False)
    assert quietest_pair(FleetView((p2, P), ()), PlacementQuery(1, decodes=False, alone=True)) == (Selection("p"), True)
