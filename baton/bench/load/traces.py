"""Traces of requests in the published Mooncake format.

A line of the format is a JSON object (github.com/kvcache-ai/Mooncake, FAST25-release):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

with milliseconds, tokens, and one id for each block of 512 prompt tokens, the last of which may be cut. Equal ids mean
that the blocks are equal and all before them too, so that ids are names of prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def read(path: Path) -> Iterator[Arrival]:
    """The requests of a file in the published format, in its order. Raises TraceError naming line and field."""
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _arrival(number, line)


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
