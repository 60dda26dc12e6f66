"""What a request asks of placement, what it gets, and what a placement costs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.placement.fleet import DecodeView, PrefillView
from router.placement.prefix_index import Found
from router.workers.breaker import Shut


class Hits(Protocol):
    """Who holds leading tokens of a prompt."""

    @property
    def levels(self) -> Sequence[tuple[int, Collection[str]]]:
        """Tokens, and workers that hold at least so many, the most tokens first; not all workers need be there."""

    def tokens(self, worker: str) -> int:
        """Leading tokens that the worker holds."""


NO_HITS: Hits = Found([])


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of placement.

    `tokens` are those to prefill; `held` tells which prefill workers have some of them, `pinnable` which decode workers
    do. `avoid` names workers, `avoid_pairs` (prefill, decode) pairs, that failed the request before. `never` names
    decode workers that could not hold it even if they were empty. `alone` is for a request that must run where nothing
    else does. `number` differs from request to request: it says which of many equals are looked at.
    """

    tokens: int
    decodes: bool = True
    avoid: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()
    held: Hits = NO_HITS
    pinnable: Hits = NO_HITS
    never: frozenset[str] = frozenset()
    alone: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefill worker and the decode workers to ask for a reservation, best first."""

    prefill: str
    decode: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Against:
    """What speaks against workers and pairs: the request's own past, and breakers."""

    workers: tuple[frozenset[str], frozenset[str]]
    pairs: tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]

    @classmethod
    def of(cls, demand: Demand, shut: Shut) -> Against:
        """All that speaks against something."""
        return cls((demand.avoid, shut.workers), (demand.avoid_pairs, shut.pairs))

    def worker(self, name: str) -> int:
        """How often a worker is spoken against."""
        return sum(name in names for names in self.workers)

    def pair(self, prefill: str, decode: str) -> tuple[int, int]:
        """How often two workers are, and then their pair; less is better."""
        return self.worker(prefill) + self.worker(decode), sum((prefill, decode) in pairs for pairs in self.pairs)


def prefill_cost(prefill: PrefillView, demand: Demand, usual_rate: float) -> tuple[float, int, int, str]:
    """Seconds until the prompt would be computed there, and what decides between equals.

    Cached tokens and waiting are so weighed in the same unit: a holder of the prefix is preferred by no more than the
    time that it saves.
    """
    rest = max(demand.tokens - demand.held.tokens(prefill.name), 0)
    seconds = (prefill.burden + rest) / (prefill.rate or usual_rate)
    return seconds, prefill.own_requests, prefill.dispatched, prefill.name


def decode_cost(decode: DecodeView, demand: Demand) -> tuple[bool, float, int, str]:
    """A free slot first, then most room, where a worker that holds all of the prompt counts as twice as roomy."""
    share = min(demand.pinnable.tokens(decode.name) / max(demand.tokens, 1), 1.0)
    return decode.free_slots <= 0, -decode.free_tokens * (1 + share), decode.own_requests, decode.name
