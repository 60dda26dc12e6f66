"""Cold prompts in three ways, each compared with its neighbour. Pure; see bench.prefix."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.stats import percentile

NONE, ON, OFF = "no cache", "cache on", "cache off"
COLD = (NONE, ON, OFF, OFF, ON, NONE)
"""Neighbours are compared; the last prompt of the fleet with the cache is left in its pages."""
MOST_OFF = 1.01
"""The bar of the cost with the cache on."""


@dataclass(frozen=True)
class Cold:
    """One cold prompt: seconds to the first token, and CPU seconds of each process until then and afterwards."""

    way: str
    ttft: float
    until: dict[str, float]
    after: dict[str, float]

    @property
    def cpu(self) -> float:
        """CPU seconds of all processes, with what came after the first token."""
        return sum(self.until.values()) + sum(self.after.values())


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
    return {**spread([each.ttft for each in chosen]), "cpu": cpu}


def ratios(samples: Sequence[Cold], above: str, below: str) -> dict[str, Any]:
    """Of neighbours that were asked in these two ways, in either order, each in one pair."""
    pairs = []
    for one, other in itertools.pairwise(samples):
        if {one.way, other.way} == {above, below}:
            pairs.append((one, other) if one.way == above else (other, one))
    wall = [high.ttft / low.ttft for high, low in pairs]
    cpu = [sum(high.until.values()) / sum(low.until.values()) for high, low in pairs]
    whole = [high.cpu / low.cpu for high, low in pairs]
    return {
        **_ratio(wall),
        "bar": MOST_OFF,
        "reached": statistics.median(wall) <= MOST_OFF,
        "cpu_until_first_token": _ratio(cpu),
        "cpu_with_writes": _ratio(whole),
    }


def _ratio(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 4),
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
    """What of the results is about cold prompts, for people."""
    told = []
    for way, cold in results["cold"].items():
        cpu = (
            f"{role} {took['until_first_token_ms']:.0f} + {took['afterwards_ms']:.0f}"
            for role, took in cold["cpu"].items()
        )
        told.append(f"cold, {way:10} {cold['ttft_ms']:9.1f} ms   CPU ms until then + afterwards: {', '.join(cpu)}")
    for name in ("cold_on_over_no_cache", "cold_on_over_cache_off"):
        ratio = results[name]
        told += [f"{name:24} {_told(ratio)} (bar {MOST_OFF})"]
        told += [f"  {what:22} {_told(ratio[what])}" for what in ("cpu_until_first_token", "cpu_with_writes")]
    return told


def _told(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.4f} [{ratio['least']:.3f} to {ratio['most']:.3f}] of {len(ratio['each'])} pairs"
