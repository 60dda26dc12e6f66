"""Generators of traces that look like what the field has published; `baton.bench.traces` has the format."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.traces import MOONCAKE_BLOCK, Arrival


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations look like: means in tokens and seconds, and the share of each next turn."""

    block: int
    systems: int
    system_tokens: int
    first_tokens: int
    user_tokens: int
    output_tokens: int
    again: float
    think_s: float


CHAT = Shape(16, 20, 1024, 300, 120, 250, 0.8, 20.0)
"""Assistants: a shared system prompt, short turns, many of them."""

MOONCAKE_LIKE = Shape(MOONCAKE_BLOCK, 50, 4096, 5000, 800, 300, 0.7, 30.0)
"""Long prompts of about 10,000 tokens, half of which are repeated, as in the published traces."""


def conversations(shape: Shape, requests: int, span_s: float, seed: int) -> list[Arrival]:
    """Conversations that begin at random within `span_s`, each turn with all before it as its prompt; by time."""
    draw, ids = random.Random(seed), itertools.count()
    systems = [
        [next(ids) for _ in range(_about(draw, shape.system_tokens) // shape.block + 1)] for _ in range(shape.systems)
    ]
    arrivals: list[Arrival] = []
    while len(arrivals) < requests:
        # A few assistants are much more popular than the others.
        system = systems[min(int(draw.paretovariate(1.0)) - 1, shape.systems - 1)]
        blocks, at_s = list(system), draw.uniform(0, span_s)
        tokens = len(blocks) * shape.block + _about(draw, shape.first_tokens)
        while True:
            blocks += [next(ids) for _ in range(tokens // shape.block - len(blocks))]
            output = _about(draw, shape.output_tokens)
            arrivals.append(Arrival(at_s, tokens, output, tuple(blocks)))
            if draw.random() > shape.again:
                break
            tokens += output + _about(draw, shape.user_tokens)
            at_s += shape.think_s * (0.5 + draw.expovariate(2.0))
    return sorted(arrivals[:requests], key=lambda arrival: arrival.at_s)


def repeated(arrivals: Sequence[Arrival], block: int) -> float:
    """Share of all prompt tokens in blocks that an earlier request had: what one cache without end would hit."""
    seen: set[int] = set()
    tokens = 0
    for arrival in arrivals:
        tokens += block * sum(each in seen for each in arrival.blocks)
        seen.update(arrival.blocks)
    return tokens / sum(each.input_tokens for each in arrivals)


def _about(draw: random.Random, mean: int) -> int:
    """A number of tokens with a long tail."""
    return max(1, round(draw.lognormvariate(0.0, 0.8) * mean / 1.377))
