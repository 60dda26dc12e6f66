"""Turns: orders, and what is told of all turns."""

from typing import Any

from bench.pairing import attempt, failures, median, medians, ratio, turned


def test_the_order_rotates_in_each_round() -> None:
    assert [turned("abc", number) for number in range(4)] == [list(each) for each in ("abc", "bca", "cab", "abc")]


def test_ratios_are_of_the_same_round_and_failures_are_told_apart() -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("it fell over")

    # The machine was half as fast in the second round, for both.
    ours, theirs = ([{"rate": each} for each in rates] for rates in ((10.0, 6.0, 11.0), (5.0, 2.0, 10.0)))
    assert ratio(ours, theirs, "rate") == {"median": 2.0, "min": 1.1, "max": 3.0, "rounds": [2.0, 3.0, 1.1]}
    # A round that failed, or was not asked, takes no other one's partner.
    lost = [attempt(fails), theirs[1], None]
    found = ratio(ours, lost, "rate")
    assert found is not None
    assert (found["rounds"], median(lost, "rate")) == ([3.0], 2.0)
    assert failures({"ours": ours, "theirs": lost}) == {"theirs": {"count": 1, "of": 2, "words": "it fell over"}}
    assert ratio(ours, [attempt(fails)] * 3, "rate") is None


def test_medians_are_taken_wherever_a_number_stands() -> None:
    rounds = [{"a": number, "b": {"c": 10.0 * number}} for number in (1.0, 3.0, 2.00049)]
    assert medians(rounds) == {"a": 2.0, "b": {"c": 20.005}}
