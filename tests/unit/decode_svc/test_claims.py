"""Pages set aside for a large reservation: how many, for whom, and for how long."""

from __future__ import annotations

import math

import pytest

from decode_svc.admission import CLAIM_S, FORKS, NOBODY, Claimant, Claims
from decode_svc.attempts import AttemptKey


def claimant(session: int, name: str = "large") -> Claimant:
    return session, AttemptKey(name, 0)


def generations(pages: int, need: int) -> list[int]:
    """A full pool in which others take all that they may: what they get in each generation until the claim is met."""
    claims, large = Claims(), claimant(0)
    free, others, got = 0, pages, []
    claims.add(large, need, 0.0)
    assert claims.pages_set_aside(NOBODY, free, 0.0) == 0
    while free < need:
        # All that runs ends, page by page, and each time others come.
        ending, others = others, 0
        for _ in range(ending):
            free += 1
            claims.renew(large, 0.0)
            took = max(free - claims.pages_set_aside(NOBODY, free, 0.0), 0)
            free, others = free - took, others + took
            claims.settle(NOBODY, free)
        got.append(others)
        assert len(got) < 100
    assert claims.pages_set_aside(large, free, 0.0) == 0
    return got


@pytest.mark.parametrize("pages", [1, 2, 10, 1000])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.9, 1.0])
def test_a_claim_of_a_share_of_all_pages_waits_for_a_bounded_number_of_generations(pages: int, share: float) -> None:
    need = max(int(pages * share), 1)
    got = generations(pages, need)
    rest = (pages - need) / pages
    assert len(got) <= 1 + math.ceil(min(-math.log2(rest) if rest else math.inf, math.log2(pages)))
    # Of what came free, others got half at least, and all that the claim does not need.
    for before, now in zip([pages, *got], got, strict=False):
        assert now >= before // 2


def test_growth_takes_from_both_halves_and_what_it_gives_back_counts_once() -> None:
    claims = Claims()
    claims.add(claimant(0), 50, 0.0)
    assert claims.pages_set_aside(NOBODY, 20, 0.0) == 10
    assert claims.pages_set_aside(NOBODY, 10, 0.0) == 5
    assert claims.pages_set_aside(NOBODY, 20, 0.0) == 10
    assert claims.pages_set_aside(NOBODY, 0, 0.0) == 0
    assert claims.pages_set_aside(NOBODY, 200, 0.0) == 50


def test_a_claim_that_nobody_renews_lapses() -> None:
    claims = Claims()
    claims.add(claimant(0), 50, 0.0)
    assert claims.pages_set_aside(NOBODY, 20, 0.0) == 10
    claims.renew(claimant(0), CLAIM_S / 2)
    claims.renew(claimant(0, "another"), CLAIM_S)
    assert claims.pages_set_aside(NOBODY, 20, CLAIM_S) == 10
    assert claims.pages_set_aside(NOBODY, 20, 1.5 * CLAIM_S) == 0
    claims.renew(claimant(0), 1.6 * CLAIM_S)
    assert claims.pages_set_aside(NOBODY, 20, 1.6 * CLAIM_S) == 0


def test_sessions_and_forks_have_one_claim_each_and_the_oldest_is_met_first() -> None:
    claims, now = Claims(), 0.0
    for each in (claimant(1, "a"), claimant(1, "b"), claimant(2, "c"), FORKS):
        claims.add(each, 10, now)
    met = []
    for wanted in (claimant(1, "a"), claimant(1, "d"), claimant(2, "c"), FORKS, claimant(1, "d")):
        assert claims.pages_set_aside(NOBODY, 20, now) == 10
        if claims.pages_set_aside(wanted, 20, now) == 0:
            met.append(wanted)
            claims.settle(wanted, 20)
        claims.add(claimant(1, "d"), 10, now)
    # The next one of session 1 is behind those of the others.
    assert met == [claimant(1, "a"), claimant(2, "c"), FORKS, claimant(1, "d")]
    claims.drop_session(1)
    assert claims.pages_set_aside(NOBODY, 20, now) == 0
