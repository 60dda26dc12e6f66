"""Placement from snapshots written by hand, where the plain placement of the property test shares code or lacks it."""

import math
from dataclasses import replace

import pytest

from baton.kv.format import KvFormat, KvPart
from baton.rates import DecayingSum
from router.placement.policy import (
    NO_OPEN_BREAKERS,
    RECENT_FRACTION,
    RECENT_S,
    DecodeView,
    FleetView,
    OpenBreakers,
    PrefillView,
    SelectionCriteria,
    WorkerSelection,
    can_serve,
    least_loaded_pair,
    select_workers,
)
from tests.placement_oracle import hits

KV = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=16)
HALF = replace(KV, parts=tuple(replace(part, dtype="bfloat16") for part in KV.parts))
P = PrefillView("p", KV)
D = DecodeView("d", KV, free_tokens=100, free_slots=4)


def pick(
    prefill: list[PrefillView],
    decode: list[DecodeView],
    criteria: SelectionCriteria | None = None,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
) -> WorkerSelection | None:
    fleet = FleetView(prefill, decode)
    return select_workers(fleet, criteria or SelectionCriteria(100), prefill_limit=4, open_breakers=open_breakers)


def test_an_unknown_rate_counts_as_the_usual_one() -> None:
    known = replace(P, address="known", pending_tokens=500, rate=100)
    new = replace(P, address="new", pending_tokens=400)
    assert pick([known, new], [D]) == WorkerSelection("new", ("d",))


def test_requests_of_this_router_count_before_the_worker_reports_them() -> None:
    sent = replace(P, address="sent", open_tokens=1000, open_requests=1)
    assert pick([sent, replace(P, address="idle")], [D]) == WorkerSelection("idle", ("d",))


def test_a_prefix_that_draws_much_work_gets_a_second_holder_before_there_is_a_line() -> None:
    cold, criteria = replace(P, address="cold", rate=100), SelectionCriteria(100, prefill_match=hits({"hot": 80}))
    for recent, goes in ((79 / RECENT_FRACTION, "hot"), (81 / RECENT_FRACTION, "cold")):
        hot = replace(P, address="hot", recent_tokens=recent, rate=100)
        assert pick([hot, cold], [D], criteria) == WorkerSelection(goes, ("d",))
    past = DecayingSum(RECENT_S)
    past.add(100, 0.0)
    past.add(100, RECENT_S)
    assert past.value(2 * RECENT_S) == pytest.approx(100 / math.e + 100 / math.e**2)


@pytest.mark.parametrize(("converts", "placed"), [(True, WorkerSelection("p", ("d",))), (False, None)])
def test_pairs_whose_kv_differs_need_conversion(converts: bool, placed: WorkerSelection | None) -> None:
    decode = replace(D, kv_format=HALF, converts_kv=converts)
    assert pick([P], [decode]) == placed
    assert can_serve(FleetView((P,), (decode,)), needs_decode=True) is (placed is not None)
    assert pick([P], [replace(decode, kv_format=replace(KV, layers=3))]) is None


def test_failed_workers_are_the_last_resort() -> None:
    other_p, other_d = replace(P, address="p2", pending_tokens=10**6), replace(D, address="d2", free_tokens=1)
    both = [P, other_p], [D, other_d]
    assert pick(*both, SelectionCriteria(1, avoided_workers=frozenset({"p"}))) == WorkerSelection("p2", ("d", "d2"))
    assert pick(*both, SelectionCriteria(1, avoided_workers=frozenset({"d"}))) == WorkerSelection("p", ("d2",))
    assert pick(*both, SelectionCriteria(1, avoided_pairs=frozenset({("p", "d")}))) == WorkerSelection("p", ("d2",))
    assert pick([P], [D], SelectionCriteria(1, avoided_workers=frozenset({"p", "d"}))) == WorkerSelection("p", ("d",))
    assert pick([P], [D], SelectionCriteria(1, avoided_pairs=frozenset({("p", "d")}))) == WorkerSelection("p", ("d",))


def test_open_breakers_are_the_last_resort_for_everybody() -> None:
    p2, d2 = replace(P, address="p2", pending_tokens=10**6), replace(D, address="d2", free_tokens=1)

    def open_breakers(*workers: str, pairs: tuple[tuple[str, str], ...] = ()) -> WorkerSelection | None:
        return pick([P, p2], [D, d2], SelectionCriteria(1), OpenBreakers(frozenset(workers), frozenset(pairs)))

    assert open_breakers("p") == WorkerSelection("p2", ("d", "d2"))
    assert open_breakers("d") == WorkerSelection("p", ("d2",))
    assert open_breakers(pairs=(("p", "d"),)) == WorkerSelection("p", ("d2",))
    assert open_breakers(pairs=(("p", "d"), ("p", "d2"))) == WorkerSelection("p2", ("d", "d2"))
    assert open_breakers("p", "p2", "d", "d2") == WorkerSelection("p", ("d", "d2"))
    # The least bad: of two workers with open breakers the one that did not fail this request as well.
    both = OpenBreakers(frozenset({"d", "d2"}))
    assert pick([P, p2], [D, d2], SelectionCriteria(1, avoided_workers=frozenset({"d"})), both) == WorkerSelection(
        "p", ("d2",)
    )


def test_alone_goes_where_least_of_ours_runs_and_says_whether_that_is_nothing() -> None:
    p2, d2 = replace(P, address="p2", open_requests=1), replace(D, address="d2", open_requests=1)
    criteria = SelectionCriteria(1)
    assert least_loaded_pair(FleetView((P, p2), (D, d2)), criteria) == (WorkerSelection("p", ("d",)), True)
    assert least_loaded_pair(FleetView((p2,), (D,)), criteria) == (WorkerSelection("p2", ("d",)), False)
    assert least_loaded_pair(FleetView((P,), (d2,)), criteria) == (WorkerSelection("p", ("d2",)), False)
    assert least_loaded_pair(FleetView((P,), ()), criteria) is None
    avoided = replace(criteria, avoided_workers=frozenset({"d"}))
    assert least_loaded_pair(FleetView((P,), (D, d2)), avoided) == (WorkerSelection("p", ("d2",)), False)
    assert least_loaded_pair(FleetView((p2, P), ()), SelectionCriteria(1, needs_decode=False)) == (
        WorkerSelection("p"),
        True,
    )


def test_workers_that_drain_or_are_isolated_count_for_no_room() -> None:
    drains, isolated, full = (
        replace(P, address="x", draining=True),
        replace(P, address="y"),
        replace(P, open_requests=4),
    )
    fleet = FleetView((drains, isolated, full))
    assert (fleet.usable_prefills, fleet.has_capacity(4)) == (2, True)
    fleet.isolated = frozenset({"y", "d"})
    assert (fleet.usable_prefills, fleet.has_capacity(4), fleet.has_capacity(5)) == (1, False, True)
