"""What the best kernels at hand allow: matrix products of a layer's shapes, all in one process, in turns.

Decode and prefill are mostly products. Where Baton's are as quick as its peers', and none of them comes near what the
probe of the bandwidth reads, a bar above both is a matter of kernels and not of the engine around them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from baton.bench.pairing import spread
from bench.peers.places import Places
from bench.peers.runner import runner

ROWS = (1, 8, 32, 512)
REPEATS = 12


def measure(places: Places, quick: bool, tell: Callable[[str], object]) -> dict[str, Any]:
    """By rows: `gb_per_s`, the median rate at which each kernel gets through the weights, and `ratios`, Baton's kernel
    over each other and over `sum`, turn by turn."""
    found = {}
    with runner("products", places.command("products")) as running:
        for rows in ROWS[:1] if quick else ROWS:
            tell(f"products of {rows} rows")
            found[f"{rows} rows"] = _summary(running.ask("products", rows=rows, repeats=2 if quick else REPEATS))
    return found


def _summary(answer: Mapping[str, Any]) -> dict[str, Any]:
    seconds = answer["seconds"]
    ratios = {
        name: spread([theirs / ours for ours, theirs in zip(seconds["packed"], took, strict=True)])
        for name, took in seconds.items()
        if name != "packed"
    }
    rates = {name: answer["bytes"] / statistics.median(took) / 1e9 for name, took in seconds.items()}
    return {"gb_per_s": rates, "ratios": ratios}
