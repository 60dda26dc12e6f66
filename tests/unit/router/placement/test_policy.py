"""Placement from snapshots written by hand, where the plain placement of the property test shares code or lacks it."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from baton.kv.format import KvFormat, KvPart
from baton.rates import DecayingSum
from router.placement.policy import (
    RECENT_FRACTION,
    RECENT_S,
    DecodeView,
    FleetView,
    PrefillView,
    SelectionCriteria,
    WorkerPair,
    can_serve,
    least_loaded_pair,
    rank_pairs,
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
) -> WorkerPair | None:
    fleet, criteria = FleetView(prefill, decode), criteria or SelectionCriteria(100)
    return next(iter(rank_pairs(fleet, criteria, prefill_limit=4)), None)


def blaming(*keys: str | tuple[str, str]) -> SelectionCriteria:
    """A request of one token that has reasons to avoid these workers and pairs."""
    return SelectionCriteria(1, blame=Counter((key,) if isinstance(key, str) else key for key in keys))


def test_an_unknown_rate_counts_as_the_usual_one() -> None:
    known = replace(P, address="known", pending_tokens=500, rate=100)
    new = replace(P, address="new", pending_tokens=400)
    assert pick([known, new], [D]) == WorkerPair("new", "d")


def test_requests_of_this_router_count_before_the_worker_reports_them() -> None:
    sent = replace(P, address="sent", open_tokens=1000, open_requests=1)
    assert pick([sent, replace(P, address="idle")], [D]) == WorkerPair("idle", "d")


def test_a_prefix_that_draws_much_work_gets_a_second_holder_before_there_is_a_line() -> None:
    cold, criteria = replace(P, address="cold", rate=100), SelectionCriteria(100, prefill_match=hits({"hot": 80}))
    for recent, goes in ((79 / RECENT_FRACTION, "hot"), (81 / RECENT_FRACTION, "cold")):
        hot = replace(P, address="hot", recent_tokens=recent, rate=100)
        assert pick([hot, cold], [D], criteria) == WorkerPair(goes, "d")
    past = DecayingSum(RECENT_S)
    past.add(100, 0.0)
    past.add(100, RECENT_S)
    assert past.value(2 * RECENT_S) == pytest.approx(100 / math.e + 100 / math.e**2)


@pytest.mark.parametrize(("converts", "placed"), [(True, WorkerPair("p", "d")), (False, None)])
def test_pairs_whose_kv_differs_need_conversion(converts: bool, placed: WorkerPair | None) -> None:
    decode = replace(D, kv_format=HALF, converts_kv=converts)
    assert pick([P], [decode]) == placed
    assert can_serve(FleetView((P,), (decode,)), needs_decode=True) is (placed is not None)
    assert pick([P], [replace(decode, kv_format=replace(KV, layers=3))]) is None


def test_workers_and_pairs_that_failed_or_have_an_open_breaker_are_the_last_resort() -> None:
    p2, d2 = replace(P, address="p2", pending_tokens=10**6), replace(D, address="d2", free_tokens=1)
    both = [P, p2], [D, d2]
    assert pick(*both, blaming("p")) == WorkerPair("p2", "d")
    assert pick(*both, blaming("d")) == WorkerPair("p", "d2")
    assert pick(*both, blaming(("p", "d"))) == WorkerPair("p", "d2")
    assert pick(*both, blaming(("p", "d"), ("p", "d2"))) == WorkerPair("p2", "d")
    assert pick(*both, blaming("p", "p2", "d", "d2")) == WorkerPair("p", "d")
    assert pick([P], [D], blaming("p", "d", ("p", "d"))) == WorkerPair("p", "d")
    # The least bad: of two workers with open breakers the one that did not fail this request as well.
    assert pick(*both, blaming("d", "d2", "d")) == WorkerPair("p", "d2")


def test_alone_goes_where_least_of_ours_runs_and_says_whether_that_is_nothing() -> None:
    p2, d2 = replace(P, address="p2", open_requests=1), replace(D, address="d2", open_requests=1)
    criteria = SelectionCriteria(1)
    assert least_loaded_pair(FleetView((P, p2), (D, d2)), criteria) == (WorkerPair("p", "d"), True)
    assert least_loaded_pair(FleetView((p2,), (D,)), criteria) == (WorkerPair("p2", "d"), False)
    assert least_loaded_pair(FleetView((P,), (d2,)), criteria) == (WorkerPair("p", "d2"), False)
    assert least_loaded_pair(FleetView((P,), ()), criteria) is None
    assert least_loaded_pair(FleetView((P,), (D, d2)), blaming("d")) == (WorkerPair("p", "d2"), False)
    assert least_loaded_pair(FleetView((p2, P), ()), SelectionCriteria(1, needs_decode=False)) == (
        WorkerPair("p"),
        True,
    )


def test_workers_that_drain_or_are_isolated_take_no_requests() -> None:
    isolated = replace(P, address="y")
    fleet = FleetView((P, replace(P, address="x", draining=True), isolated))
    assert fleet.usable_prefills == [P, isolated]
    fleet.isolated = frozenset({"y", "d"})
    assert fleet.usable_prefills == [P]


M = PrefillView("m", KV, rate=100), DecodeView("m", KV, free_tokens=100, free_slots=4, slots=4)
FAST = replace(P, rate=1000)


def test_a_short_suffix_is_computed_in_place_and_a_long_prompt_where_it_harms_nobody() -> None:
    mixed, decode = replace(M[0], rate=1000, running=4), M[1]
    for tokens, goes in ((1, "m"), (100, "p")):
        assert pick([FAST, mixed], [decode], SelectionCriteria(tokens)) == WorkerPair(goes, "m")
    # A prompt that is nearly all cached there has a short suffix.
    cached = SelectionCriteria(100, prefill_match=hits({"m": 99}), decode_match=hits({"m": 99}))
    assert pick([FAST, mixed], [decode], cached) == WorkerPair("m", "m")


def test_sequences_that_run_at_a_mixed_worker_count_as_harm() -> None:
    other = replace(M[0], address="o", pending_tokens=150)
    for running, goes in ((0, "m"), (1, "m"), (2, "o")):
        views = [replace(M[0], running=running), other], [replace(D, kv_format=KV)]
        assert pick(*views, SelectionCriteria(100)) == WorkerPair(goes, "d")


def test_a_transfer_costs_what_is_left_of_it_after_the_computing() -> None:
    """The prompt has 12,800 bytes of KV, and takes 0.1 s to compute."""
    slow = replace(D, address="slow", free_tokens=1000, transfer_bytes_per_second=12_800 / 0.3)
    quick = replace(D, address="quick", transfer_bytes_per_second=12_800 / 0.1)
    assert pick([FAST], [slow, quick]) == WorkerPair("p", "quick")
    assert pick([FAST], [slow, quick], SelectionCriteria(100, decode_match=hits({"slow": 90}))) == WorkerPair(
        "p", "slow"
    )
    # While the prompt takes long to compute, neither costs more, and the one with more room is better.
    assert pick([replace(P, rate=100)], [slow, quick]) == WorkerPair("p", "slow")


def test_a_wait_for_a_slot_counts() -> None:
    full = replace(M[1], free_slots=0, step_seconds=0.1)
    assert pick([FAST, M[0]], [full, D], SelectionCriteria(1)) == WorkerPair("p", "d")


def test_an_address_with_another_kv_format_for_each_role_is_no_pair() -> None:
    assert pick([M[0]], [replace(M[1], kv_format=HALF)]) is None


def test_a_worker_that_failed_a_request_alone_counts_once_in_place() -> None:
    other = replace(M[0], address="m2"), replace(M[1], address="m2", free_tokens=1)
    assert pick([M[0], other[0]], [M[1], other[1]], blaming("m", "m2")) == WorkerPair("m", "m")
    assert pick([M[0], other[0]], [M[1], other[1]], blaming("m")) == WorkerPair("m2", "m2")


def test_a_mixed_worker_is_empty_if_it_neither_prefills_nor_decodes_for_this_router() -> None:
    decodes = replace(M[1], open_requests=1)
    assert least_loaded_pair(FleetView([M[0]], [decodes]), SelectionCriteria(1), isolates_decode=False) == (
        WorkerPair("m", "m"),
        False,
    )
    assert least_loaded_pair(FleetView([M[0], P], [decodes]), SelectionCriteria(1), isolates_decode=False) == (
        WorkerPair("p", "m"),
        True,
    )
