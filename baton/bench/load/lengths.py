"""Distributions of lengths in tokens, as the command line names them.

256                        always 256
uniform:128:384            each number from 128 to 384 equally often
lognormal:256:0.8          a long tail: mean 256, the logarithm's standard deviation 0.8
lognormal:256:0.8:2048     the same, but at most 2048
file:PATH                  drawn from a file of numbers, one a line
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FORMS = "N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA[:MOST] or file:PATH"

_MAX_SIGMA = 5.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution; `text` is its description."""

    text: str
    draw: Callable[[random.Random], int]


def lengths(text: str) -> Lengths:
    """The distribution that `text` describes. Raises ValueError that says what is wrong."""
    kind, _, rest = text.partition(":")
    if not rest:
        fixed = _count(kind)
        return Lengths(text, lambda draw: fixed)
    if kind == "file":
        seen = _read(Path(rest))
        return Lengths(text, lambda draw: draw.choice(seen))
    values = rest.split(":")
    if kind == "uniform" and len(values) == 2:
        low, high = map(_count, values)
        if low > high:
            raise ValueError(f"the lower bound {low} is greater than the upper bound {high}")
        return Lengths(text, lambda draw: draw.randint(low, high))
    if kind == "lognormal" and len(values) in (2, 3):
        return _lognormal(text, values)
    raise ValueError(f"must be {FORMS}")


def _lognormal(text: str, values: Sequence[str]) -> Lengths:
    mean, sigma = _count(values[0]), _sigma(values[1])
    most = _count(values[2]) if len(values) == 3 else None
    # The mean of a log-normal variable is exp(mu + sigma² / 2).
    mu = math.log(mean) - sigma * sigma / 2

    def draw(source: random.Random) -> int:
        length = max(1, round(source.lognormvariate(mu, sigma)))
        return length if most is None else min(length, most)

    return Lengths(text, draw)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ValueError(f"must be a number of tokens of at least 1, got {text!r}")
    return int(text)


def _sigma(text: str) -> float:
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma <= _MAX_SIGMA:
        raise ValueError(f"sigma must be a number from 0 to {_MAX_SIGMA:g}, got {text!r}")
    return sigma


def _read(path: Path) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} can't be read: {error}") from None
    if not lines:
        raise ValueError(f"{str(path)!r} holds no numbers")
    return [_count(line) for line in lines]
