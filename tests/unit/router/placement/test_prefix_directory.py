"""What a router makes of its indexes: placement, digests for decode, and a tier for people."""

from __future__ import annotations

import pytest

from baton.worker.status import PrefixChange, WorkerRole
from router.placement.chains import Form
from router.placement.demand import NO_HITS
from router.placement.prefix_directory import Whereabouts
from router.placement.prefix_index import EXPECTED_S, NAME_BYTES

ONE, OTHER = Form("m", "f" * 64, 16), Form("m", "e" * 64, 4)
DIGESTS = {ONE: [bytes([1, i] * 16) for i in range(40)], OTHER: [bytes([2, i] * 16) for i in range(160)]}


def news(form: Form, count: int) -> PrefixChange:
    return PrefixChange(True, tuple(digest[:NAME_BYTES] for digest in DIGESTS[form][:count]), ())


def test_workers_of_different_formats_are_found_by_their_own_names() -> None:
    where = Whereabouts()
    where.told(WorkerRole.DECODE, "a", news(ONE, 2))
    where.told(WorkerRole.DECODE, "b", news(OTHER, 3))
    hits = where.find(WorkerRole.DECODE, DIGESTS)
    assert (hits.tokens("a"), hits.tokens("b"), hits.tokens("c")) == (32, 12, 0)
    assert [(tokens, set(names)) for tokens, names in hits.levels] == [(32, {"a"}), (12, {"b"})]
    assert where.find(WorkerRole.PREFILL, DIGESTS).tokens("a") == 0
    assert where.find(WorkerRole.DECODE, {}) is NO_HITS


def test_decode_is_sent_the_digests_of_what_it_is_thought_to_hold_and_some_more() -> None:
    where = Whereabouts()
    assert where.pinnable("a", ONE, DIGESTS) == b""
    where.told(WorkerRole.DECODE, "a", news(ONE, 2))
    assert where.pinnable("a", ONE, DIGESTS) == b"".join(DIGESTS[ONE][:18])
    assert (
        where.pinnable("b", ONE, DIGESTS) == where.pinnable("a", None, DIGESTS) == where.pinnable("a", ONE, {}) == b""
    )
    where.told(WorkerRole.DECODE, "a", None)
    assert where.pinnable("a", ONE, DIGESTS) == b""


@pytest.mark.parametrize("stays", [True, False])
async def test_what_was_sent_is_expected_for_a_while_and_counted(stays: bool) -> None:
    now = 0.0
    where = Whereabouts(lambda: now)
    where.told(WorkerRole.PREFILL, "a", news(ONE, 10))
    where.sent("a", {ONE: DIGESTS[ONE]}, 160, stays=stays)
    assert where.find(WorkerRole.PREFILL, DIGESTS).tokens("a") == (640 if stays else 160)
    now = EXPECTED_S
    assert where.find(WorkerRole.PREFILL, DIGESTS).tokens("a") == 160
    (tier,) = await where.tiers()
    assert (tier.name, tier.blocks, tier.hits, tier.misses, tier.state) == ("index", 10, 10, 30, "")
