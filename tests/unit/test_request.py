"""Ranges of sampling parameters: what is outside is refused by field and value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.request import MIN_REPETITION_PENALTY, SamplingParams, check_token_ids


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
def test_borders_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_a_part_of_the_token_ids_is_named_by_its_place_in_the_whole() -> None:
    with pytest.raises(InvalidRequest, match=r"^token_ids\[12\]: must be in \[0, 100\), got 100$"):
        check_token_ids("token_ids", [5, 6, 100], 100, first=10)
