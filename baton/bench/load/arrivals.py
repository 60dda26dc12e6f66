"""When requests of an open loop are due, in seconds from its begin."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from baton.bench.traces import Arrival


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process of `rate` requests per second, without end; the first comes after a gap too."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def replayed(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    """The requests of a trace by time, the first at 0, with all gaps divided by `speed`."""
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    begin = ordered[0].at_s if ordered else 0.0
    return [
        Arrival((each.at_s - begin) / speed, each.input_tokens, each.output_tokens, each.blocks) for each in ordered
    ]
