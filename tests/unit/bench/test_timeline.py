"""The timeline's durations: from accounts and tokens alone, whatever was seen of the bytes."""

from __future__ import annotations

import pytest

from baton.request import Timings
from bench.timeline import Seen, Told, report


def told(transfer: float, slot_wait: float, *tokens: float) -> Told:
    return Told(Timings(1.0, 100.0, transfer, slot_wait, 50.0, 151.0 + transfer + slot_wait, 101.0, 10.0), list(tokens))


def seen(*received: tuple[float, float]) -> Seen:
    return Seen(told(9.0, 9.0, 0.1, 0.2), list(received))


def test_the_exposed_transfer_is_that_of_the_accounts() -> None:
    requests = [told(3.0, 1.0, 0.10, 0.13, 0.14), told(5.0, 0.0, 0.20, 0.24, 0.26), told(9.0, 2.0, 0.30, 0.33, 0.34)]
    found = report(requests, seen((0.0, 0.0), (0.15, 3e6)), 64, 25.0)
    assert found["exposed_transfer_ms"] == 5.0
    assert found["exposed_share_of_ttft"] == pytest.approx(5.0 / 200)
    assert (found["ttft_ms"], found["step_ms"]) == (pytest.approx(200), pytest.approx(10))
    assert found["second_token_after_first_ms"] == pytest.approx(30)
    # However often was looked, and whatever was seen.
    more = report(requests, seen((0.0, 0.0), (0.01, 1e6), (0.3, 7e6)), 64, 1.0)
    assert {name: value for name, value in found.items() if name != "watched"} == {
        name: value for name, value in more.items() if name != "watched"
    }


def test_what_was_seen_says_how_often_was_looked() -> None:
    found = seen((0.0, 0.0), (0.02, 1e6), (0.09, 2e6), (0.11, 4e6)).summary(10.0)
    assert found["poll_interval_ms"] == 10.0
    assert found["median_interval_ms"] == pytest.approx(20)
    assert (found["mb_at_first_token"], found["mb_in_all"]) == (2.0, 4.0)
