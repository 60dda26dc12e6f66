"""Percentiles as all benches count them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of `values`, not empty, that at least `fraction` (in [0, 1]) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[_rank(fraction, len(ordered))]


def summary(seconds: Iterable[float]) -> dict[str, float | None]:
    """`{"p50", "p90", "p99", "mean", "max"}` in milliseconds; all None without a value."""
    ordered = sorted(seconds)
    if not ordered:
        return dict.fromkeys((*(f"p{fraction}" for fraction in PERCENTILES), "mean", "max"))
    found = {f"p{fraction}": ordered[_rank(fraction / 100, len(ordered))] for fraction in PERCENTILES}
    found |= {"mean": math.fsum(ordered) / len(ordered), "max": ordered[-1]}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def _rank(fraction: float, count: int) -> int:
    # Rounded first: 0.07 * 100 is a little more than 7.
    return max(0, math.ceil(round(fraction * count, 9)) - 1)
