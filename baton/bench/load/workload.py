"""The requests of a run: prompts of random token ids, drawn from a seed, and when they are due.

The same workload and seed give the same prompts for every server and every kind of arrival, because arrivals, lengths
and ids are drawn separately. A server with a prefix cache has them from the last run with this seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One request; `at_s` is the time when it is due, from the start of the run; None in a closed loop.

    The prompt is token ids, or text. Only requests with the same `cache_salt` share cached KV.
    """

    prompt: Sequence[int] | str
    output_tokens: int
    at_s: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """Prefixes that prompts share: `groups` of them, each of `tokens` tokens, before the rest of a prompt."""

    tokens: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from `low` to `high`, each equally often; `text` is their description."""

    text: str
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """A number."""
        return source.randint(self.low, self.high)


def lengths(text: str) -> Lengths:
    """Lengths from the command line: N, or uniform:LOW:HIGH. Raises ValueError that says what is wrong."""
    kind, *values = text.split(":")
    if (kind == "uniform" and len(values) != 2) or (kind != "uniform" and values):
        raise ValueError("must be N or uniform:LOW:HIGH")
    low, high = map(_count, values or (kind, kind))
    if low > high:
        raise ValueError(f"the lower bound {low} is greater than the upper bound {high}")
    return Lengths(text, low, high)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ValueError(f"must be a number of tokens of at least 1, got {text!r}")
    return int(text)


class Prompts:
    """Prompts of ids below `vocab_size`, each with a prefix of one of the groups if `shared`."""

    def __init__(self, seed: str, vocab_size: int, shared: Shared | None = None) -> None:
        self._draw = random.Random(f"{seed}/prompts")
        self._seed = seed
        self._vocabulary = range(vocab_size)
        self._prefixes = (
            [self._named(f"group/{group}", shared.tokens) for group in range(shared.groups)] if shared else []
        )

    def of(self, tokens: int) -> list[int]:
        """A prompt with `tokens` ids of its own."""
        own = self._draw.choices(self._vocabulary, k=tokens)
        return [*self._draw.choice(self._prefixes), *own] if self._prefixes else own

    def _named(self, name: str, tokens: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(self._vocabulary, k=tokens)


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process of `rate` requests per second, without end; the first comes after a gap too."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def random_jobs(
    prompts: Prompts, seed: str, inputs: Lengths, outputs: Lengths, due: Iterable[float] | None = None
) -> Iterator[Job]:
    """Requests of random lengths at the times in `due`; without end if `due` has no end."""
    draw = random.Random(f"{seed}/lengths")
    for at_s in itertools.repeat(None) if due is None else due:
        own, output = inputs.draw(draw), outputs.draw(draw)
        yield Job(prompts.of(own), output, at_s)
