"""Traces of requests: the published Mooncake format, and generators of traces of such shape.

A line of the format is a JSON object (github.com/kvcache-ai/Mooncake, FAST25-release):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

with milliseconds, tokens, and one id for each block of 512 prompt tokens, the last of which may be cut. Equal ids mean
that the blocks are equal and all before them too, so that ids are names of prefixes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512


class TraceError(ValueError):
    """A line that is not of the format; says which, and what field."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; `blocks` are ids of its prompt's full blocks."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


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


def read(path: Path) -> Iterator[Arrival]:
    """The requests of a file in the published format, in its order. Raises TraceError naming line and field."""
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _arrival(number, line)


def write(path: Path, arrivals: Iterable[Arrival], block: int = MOONCAKE_BLOCK) -> None:
    """The requests in the published format; a cut last block gets an id that no other has."""
    alone = itertools.count(10**9)
    with path.open("w") as file:
        for arrival in arrivals:
            cut = [next(alone)] if arrival.input_tokens % block else []
            values = {
                "timestamp": round(1e3 * arrival.at_s),
                "input_length": arrival.input_tokens,
                "output_length": arrival.output_tokens,
                "hash_ids": [*arrival.blocks, *cut],
            }
            file.write(json.dumps(values) + "\n")


def _arrival(number: int, line: str) -> Arrival:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise TraceError(f"line {number}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(f"line {number}: must be an object, got {line.strip()[:40]}")
    at_ms, input_tokens, output_tokens = (
        _number(number, values, name, least)
        for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0))
    )
    ids = values.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise TraceError(f"line {number}: hash_ids: must be a list of integers, got {str(ids)[:40]}")
    if len(ids) != -(-int(input_tokens) // MOONCAKE_BLOCK):
        raise TraceError(
            f"line {number}: hash_ids: {len(ids)} ids do not make {input_tokens} tokens in blocks of {MOONCAKE_BLOCK}"
        )
    full = int(input_tokens) // MOONCAKE_BLOCK
    return Arrival(at_ms / 1e3, int(input_tokens), int(output_tokens), tuple(ids[:full]))


def _number(number: int, values: dict[str, Any], name: str, least: int) -> float:
    value: Any = values.get(name)
    fits = isinstance(value, int) or (name == "timestamp" and isinstance(value, float))
    if not fits or isinstance(value, bool) or not value >= least:
        raise TraceError(f"line {number}: {name}: must be a number of at least {least}, got {value!r}")
    return float(value) if name == "timestamp" else int(value)


def _about(draw: random.Random, mean: int) -> int:
    """A number of tokens with a long tail."""
    return max(1, round(draw.lognormvariate(0.0, 0.8) * mean / 1.377))
