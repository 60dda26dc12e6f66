"""Warm prompts from each tier, against the cold ones of their round and against the floors. See bench.prefix.

    whole    the prompt as it was asked before: its end is cached too, and nothing is computed but the first token
    extended another last token: all blocks but the last are cached, and that one is computed

The floor that the design names for both is the prefix's bytes at the bandwidth that this run measured, and one step.
A whole prompt takes no step, but the part of one that multiplies the last token's hidden state by the vocabulary:
`floor_without_a_step_ms` has that part instead, by its share of the bytes that a step reads.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from baton.request import CachedTokens
from bench.checkpoint import HIDDEN, VOCABULARY, shapes
from bench.prefix_cold import ms, spread

TIERS = ("pool", "host", "redis")
BARS = {"pool": 80.0, "redis": 40.0}
FLOOR_AIM = 2.0
FROM_TIER = 0.9
WHOLE, EXTENDED = "whole", "extended"
HEAD_SHARE = VOCABULARY * HIDDEN / sum(math.prod(shape) for _, shape in shapes())
"""Of the weights, the output projection, which is the embedding as well."""


@dataclass
class Warm:
    """Seconds to the first token by (tier, how it was asked); `ratios`: of each round, the cold median over the warm.

    `strays` came from elsewhere. `steps` and `copies` are seconds of a decode step at this context, and of a copy of
    the prefix in memory; `short` those to the first token of a prompt of a few tokens.
    """

    ttft: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    ratios: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)

    def add(self, tier: str, how: str, seconds: float, cached: CachedTokens, tokens: int) -> None:
        """One more, if nine tenths of its tokens came from the tier, and of a whole prompt all from somewhere."""
        if getattr(cached, tier) < FROM_TIER * tokens or (how == WHOLE) != (cached.total == tokens):
            self.strays.append(f"{tier}, {how}: {cached}")
        else:
            self.ttft.setdefault((tier, how), []).append(seconds)

    def compare(self, cold: float, before: Mapping[tuple[str, str], int]) -> None:
        """A round is over, before which there were so many samples of each, and of which `cold` is the cold median."""
        for key, values in self.ttft.items():
            if new := values[before.get(key, 0) :]:
                self.ratios.setdefault(key, []).append(cold / statistics.median(new))

    def counts(self) -> dict[tuple[str, str], int]:
        """Samples so far."""
        return {key: len(values) for key, values in self.ttft.items()}


def copy_seconds(size: int) -> float:
    """Seconds in which one thread copies `size` bytes in memory."""
    source = numpy.ones(size, dtype=numpy.uint8)
    target = numpy.zeros(size, dtype=numpy.uint8)
    began = time.perf_counter()
    numpy.copyto(target, source)
    return time.perf_counter() - began


def report(warm: Warm, size: int, redis_seconds: float) -> dict[str, Any]:
    """Medians in ms, floors and ratios of a prefix of `size` bytes, for which a plain client takes `redis_seconds`."""
    step, copy = statistics.median(warm.steps), statistics.median(warm.copies)
    moving = {"pool": 0.0, "host": copy, "redis": redis_seconds}
    return {
        "warm": {
            how: {tier: _tier(warm, tier, how, moving[tier], step) for tier in TIERS} for how in (WHOLE, EXTENDED)
        },
        "strays": warm.strays,
        "one_step_ms": ms(step),
        "short_prompt": spread(warm.short),
        "copy_gb_per_s": round(size / copy / 1e9, 2),
    }


def _tier(warm: Warm, tier: str, how: str, moving: float, step: float) -> dict[str, Any]:
    if (tier, how) not in warm.ratios:
        return {"samples": 0}
    ttft, ratios = warm.ttft[tier, how], warm.ratios[tier, how]
    ratio, floor = statistics.median(ratios), moving + step
    barred = how == WHOLE and tier in BARS
    return {
        **spread(ttft),
        "moving_ms": ms(moving),
        "floor_ms": ms(floor),
        **({"floor_without_a_step_ms": ms(moving + HEAD_SHARE * step)} if how == WHOLE else {}),
        "cold_over_warm": round(ratio, 1),
        "cold_over_warm_each": [round(each, 1) for each in ratios],
        "warm_over_floor": round(statistics.median(ttft) / floor, 2),
        **({"bar": BARS[tier], "reached": ratio >= BARS[tier]} if barred else {}),
    }


def lines(results: Mapping[str, Any]) -> Sequence[str]:
    """For people."""
    found = []
    for how, tiers in results["warm"].items():
        for tier, warm in tiers.items():
            if not warm["samples"]:
                found.append(f"{how:8} {tier:6} no samples")
                continue
            bar = f" (bar {warm['bar']:g})" if "bar" in warm else ""
            found.append(
                f"{how:8} {tier:6} {warm['ttft_ms']:8.1f} ms  cold/warm {warm['cold_over_warm']:6.1f}{bar}  "
                f"floor {warm['floor_ms']:7.1f} ms  warm/floor {warm['warm_over_floor']:.2f} (aim {FLOOR_AIM:g})  "
                f"n={warm['samples']}"
            )
    found.append(f"one step {results['one_step_ms']} ms, short prompt {results['short_prompt']['ttft_ms']} ms")
    found.append(f"strays: {len(results['strays'])} {results['strays'][:2]}")
    return found
