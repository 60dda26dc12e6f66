"""Ranges of sampling parameters: what is outside is refused by field and value."""

import math
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.request import MAX_ID_LENGTH, MIN_REPETITION_PENALTY, SamplingParams, check_id, check_length, check_token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 2.0),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("presence_penalty", -math.inf),
        ("seed", 2**64),
        pytest.param("seed", 10**400, id="seed-huge"),
        ("seed", -1),
        pytest.param("top_k", -(10**400), id="top_k-huge"),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: must be in .*, got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 1e-300), ("repetition_penalty", MIN_REPETITION_PENALTY), ("seed", 2**64 - 1)],
)
def test_sampling_values_at_their_limits_are_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_ids_are_short_and_printable() -> None:
    for good in ("t", "router-host.example-1/2", "x" * MAX_ID_LENGTH):
        check_id("transfer_id", good)
    for bad in ("x" * (MAX_ID_LENGTH + 1), "x" * (1 << 20), "a\nb", "\0", "\N{SNOWMAN}"):
        with pytest.raises(InvalidRequest, match=r"^transfer_id: must have at most 128 printable ASCII") as refused:
            check_id("transfer_id", bad)
        assert len(str(refused.value)) < 250
    with pytest.raises(InvalidRequest, match=r"^transfer_id: must not be empty$"):
        check_id("transfer_id", "")
    check_id("transfer_id", "", optional=True)
    check_length("ticket", b"abc", 3)
    with pytest.raises(InvalidRequest, match=r"^ticket: must have at most 3 bytes, got 4$"):
        check_length("ticket", b"abcd", 3)


def test_a_part_of_the_token_ids_is_named_by_its_place_in_the_whole() -> None:
    with pytest.raises(InvalidRequest, match=r"^token_ids\[12\]: must be in \[0, 100\), got 100$"):
        check_token_ids("token_ids", [5, 6, 100], 100, first=10)


def test_an_unknown_token_with_a_bias_is_named_by_its_id() -> None:
    with pytest.raises(InvalidRequest, match=r"^logit_bias\[5000\]: the token id must be in \[0, 100\), got 5000$"):
        SamplingParams(logit_bias=((5, 1.0), (5000, 1.0))).check_vocabulary(100)


def test_allowed_tokens_that_min_tokens_bans_are_refused() -> None:
    for stops, allowed in (((), (7,)), ((3, 4), (3,)), ((3,), (3, 7))):
        params = SamplingParams(min_tokens=1, stop_token_ids=stops, allowed_token_ids=allowed)
        with pytest.raises(InvalidRequest, match=r"^allowed_token_ids: .* min_tokens \(1\) bans them, got \("):
            params.check_vocabulary(100, {7})


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 0}, {"ignore_eos": True}, {"allowed_token_ids": (7, 8)}, {"allowed_token_ids": ()}]
)
def test_allowed_tokens_of_which_one_can_be_chosen_are_taken(fields: dict[str, Any]) -> None:
    SamplingParams(**{"min_tokens": 1, "allowed_token_ids": (7,), **fields}).check_vocabulary(100, {7})
