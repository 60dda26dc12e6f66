"""Cold prompts in three ways, each compared with its neighbour. Pure; see bench.prefix.

A ratio's interval is that of the median: with n values in order, the median of what they were drawn from lies between
the k-th from below and the k-th from above with a probability of at least

    1 - 2 * P(B < k),   B binomial with n draws of 1/2,

whatever the distribution (David and Nagaraja, Order Statistics, 3rd edition, section 7.1). Of a machine that changes
its speed nothing more can be presumed. The greatest k that leaves at least the confidence asked for is taken.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.bench.stats import percentile

NONE, ON, OFF = "no cache", "cache on", "cache off"
COLD = (NONE, ON, OFF, OFF, ON, NONE)
"""Neighbours are compared; the last prompt of the fleet with the cache is left in its pages."""
MOST_OFF = 1.01
"""The bar of the cost with the cache on."""
CONFIDENCE = 0.95
NOT_SHOWN = "not shown"
COMPARISONS = {"cold_on_over_no_cache": NONE, "cold_on_over_cache_off": OFF}
"""By the name of the ratio: what the cache is compared with."""


class Asked(Protocol):
    """A sample that was asked for in one of the ways."""

    @property
    def way(self) -> str: ...


AskedT = TypeVar("AskedT", bound=Asked)


@dataclass(frozen=True)
class Cold:
    """One cold prompt: seconds to the first token, and CPU seconds of each process until then and afterwards.

    `beside` is the part of all CPU seconds until then that was not computing: of the prefill worker's threads but the
    compute threads, and of all other processes.
    """

    way: str
    ttft: float
    until: dict[str, float]
    after: dict[str, float]
    beside: dict[str, float]

    @property
    def cpu(self) -> float:
        """CPU seconds of all processes, with what came after the first token."""
        return sum(self.until.values()) + sum(self.after.values())


def neighbours(samples: Sequence[AskedT], above: str, below: str) -> list[tuple[AskedT, AskedT]]:
    """Neighbours that were asked in these two ways, in either order, as (above, below)."""
    pairs = []
    for one, other in itertools.pairwise(samples):
        if {one.way, other.way} == {above, below}:
            pairs.append((one, other) if one.way == above else (other, one))
    return pairs


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Bounds of the median of what `values` were drawn from; None if they are too few for any."""
    count, rank, missed = len(values), 0, 0.0
    while (missed := missed + math.comb(count, rank) * 2.0 ** (1 - count)) <= 1 - confidence:
        rank += 1
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[count - rank]) if rank else None


def verdict(bounds: tuple[float, float] | None, most: float) -> bool | str:
    """Whether all of an interval is within `most`, or NOT_SHOWN if it lies on both sides or is not known."""
    if bounds is None or bounds[0] <= most < bounds[1]:
        return NOT_SHOWN
    return bounds[1] <= most


def way_taken(samples: Sequence[Cold], way: str) -> dict[str, Any]:
    """Times to the first token of one way, and the median CPU ms of each process until then and afterwards."""
    chosen = [each for each in samples if each.way == way]
    cpu = {
        role: {
            "until_first_token_ms": ms(statistics.median(each.until[role] for each in chosen)),
            "afterwards_ms": ms(statistics.median(each.after[role] for each in chosen)),
        }
        for role in chosen[0].until
    }
    beside = {name: ms(statistics.median(each.beside[name] for each in chosen)) for name in chosen[0].beside}
    return {**spread([each.ttft for each in chosen]), "cpu": cpu, "beside_computing_ms": beside}


def ratios(samples: Sequence[Cold], above: str, below: str) -> dict[str, Any]:
    """Of neighbours that were asked in these two ways, in either order, each in one pair."""
    pairs = neighbours(samples, above, below)
    wall = [high.ttft / low.ttft for high, low in pairs]
    cpu = [sum(high.until.values()) / sum(low.until.values()) for high, low in pairs]
    whole = [high.cpu / low.cpu for high, low in pairs]
    return {
        **_ratio(wall),
        "bar": MOST_OFF,
        "reached": verdict(interval(wall), MOST_OFF),
        "cpu_until_first_token": _ratio(cpu),
        "cpu_with_writes": _ratio(whole),
    }


def compared(samples: Sequence[Cold]) -> dict[str, Any]:
    """All of one series of cold prompts: each way, and each comparison."""
    return {
        "cold": {way: way_taken(samples, way) for way in dict.fromkeys(COLD)},
        **{name: ratios(samples, ON, below) for name, below in COMPARISONS.items()},
    }


def _ratio(values: list[float]) -> dict[str, Any]:
    bounds = interval(values)
    return {
        "median": round(statistics.median(values), 4),
        "interval": None if bounds is None else [round(bound, 4) for bound in bounds],
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "each": [round(value, 4) for value in values],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Times to the first token, given in seconds."""
    return {
        "ttft_ms": ms(statistics.median(values)),
        "least_ms": ms(min(values)),
        "p90_ms": ms(percentile(values, 0.9)),
        "samples": len(values),
    }


def ms(seconds: float) -> float:
    """Seconds as milliseconds, rounded."""
    return round(seconds * 1e3, 2)


def lines(results: Mapping[str, Any]) -> list[str]:
    """One series of cold prompts, for people."""
    told = []
    for way, cold in results["cold"].items():
        cpu = (
            f"{role} {took['until_first_token_ms']:.0f} + {took['afterwards_ms']:.0f}"
            for role, took in cold["cpu"].items()
        )
        told.append(f"cold, {way:10} {cold['ttft_ms']:9.1f} ms   CPU ms until then + afterwards: {', '.join(cpu)}")
    for name in COMPARISONS:
        ratio = results[name]
        told += [f"{name:24} {_told(ratio)} (bar {MOST_OFF}: {ratio['reached']})"]
        told += [f"  {what:22} {_told(ratio[what])}" for what in ("cpu_until_first_token", "cpu_with_writes")]
    return told


def _told(ratio: dict[str, Any]) -> str:
    bounds = "unknown" if ratio["interval"] is None else "{:.4f} to {:.4f}".format(*ratio["interval"])
    all_of_them = f"[{ratio['least']:.3f} to {ratio['most']:.3f}] of {len(ratio['each'])} pairs"
    return f"{ratio['median']:.4f}, 95% {bounds} {all_of_them}"
