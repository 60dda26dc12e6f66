"""The requests of a run: prompts of random token ids, drawn from a seed, and when they are due.

The same workload and seed give the same prompts for every server and every kind of arrival, because arrivals, lengths
and ids are drawn separately. A server with a prefix cache has them from the last run with this seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.bench.load.lengths import Lengths
from baton.bench.load.traces import MOONCAKE_BLOCK, Arrival


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

    def of_blocks(self, arrival: Arrival) -> list[int]:
        """The prompt of a request in a trace: equal blocks have equal ids; the rest is random."""
        ids = list(
            itertools.chain.from_iterable(self._named(f"block/{each}", MOONCAKE_BLOCK) for each in arrival.blocks)
        )
        return ids + self._draw.choices(self._vocabulary, k=arrival.input_tokens - len(ids))

    def _named(self, name: str, tokens: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(self._vocabulary, k=tokens)


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process of `rate` requests per second, without end; the first comes after a gap too."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def replay(arrivals: Iterable[Arrival], speed: float) -> list[Arrival]:
    """The requests of a trace by time, the first at 0, with all gaps divided by `speed`."""
    ordered = sorted(arrivals, key=lambda each: each.at_s)
    begin = ordered[0].at_s if ordered else 0.0
    return [
        Arrival((each.at_s - begin) / speed, each.input_tokens, each.output_tokens, each.blocks) for each in ordered
    ]


def random_jobs(
    prompts: Prompts, seed: str, inputs: Lengths, outputs: Lengths, due: Iterable[float] | None = None
) -> Iterator[Job]:
    """Requests of random lengths at the times in `due`; without end if `due` has no end."""
    draw = random.Random(f"{seed}/lengths")
    for at_s in itertools.repeat(None) if due is None else due:
        own, output = inputs.draw(draw), outputs.draw(draw)
        yield Job(prompts.of(own), output, at_s)


def trace_jobs(prompts: Prompts, arrivals: Iterable[Arrival]) -> Iterator[Job]:
    """The requests of a trace; an output has at least one token."""
    for each in arrivals:
        yield Job(prompts.of_blocks(each), max(1, each.output_tokens), each.at_s)
