"""Placement: which prefill and which decode workers a request goes to. A pure function of a snapshot.

Prefill goes where the prompt will be done first: tokens pending there, and those of the prompt that are not cached
there, over the measured rate. Decode goes where most room is: workers with a free slot first, then by free pages.
Workers that drain, and pairs whose KV does not match, are left out. What failed the request before, or has an open
breaker, is used only if nothing else is there, and then what is least to be avoided. A request that must run alone gets
the pair that is soonest empty of this router's requests; while it waits for that pair, and runs there, others get none
of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.kv.format import KvFormat
from router.breaker import NOTHING_SHUT, Shut


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker: what it reports, and what this router has given it.

    `own_tokens` are the prompts of this router's requests there; `rate` is in tokens per second, 0 while unknown.
    """

    name: str
    kv_format: KvFormat
    draining: bool = False
    pending_tokens: int = 0
    rate: float = 0.0
    own_requests: int = 0
    own_tokens: int = 0
    dispatched: int = 0


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker: what it reports, and how many attempts of this router it serves."""

    name: str
    kv_format: KvFormat
    converts_kv: bool = False
    draining: bool = False
    free_tokens: int = 0
    free_slots: int = 0
    own_requests: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that were not refused, at one moment."""

    prefill: tuple[PrefillView, ...] = ()
    decode: tuple[DecodeView, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of placement.

    `tokens` are those to prefill, `cached` how many of them a prefill worker is thought to hold, by name. `avoid`
    names workers, `avoid_pairs` (prefill, decode) pairs, that failed the request before. `never` names decode workers
    that could not hold it even if they were empty. `alone` is for a request that must run where nothing else does.
    """

    tokens: int
    decodes: bool = True
    avoid: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()
    cached: Mapping[str, int] = field(default_factory=dict)
    never: frozenset[str] = frozenset()
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefill worker and the decode workers to ask for a reservation, best first."""

    prefill: str
    decode: tuple[str, ...] = ()


def pairable(prefill: KvFormat, decode: KvFormat, *, converts: bool) -> bool:
    """Whether KV of one format can be handed to a worker of the other."""
    return prefill == decode or (converts and decode.convertible_from(prefill))


def servable(fleet: Fleet, *, decodes: bool) -> bool:
    """Whether some worker, or some pair, could serve a request at all, now or later."""
    return bool(_candidates(fleet, decodes))


def choose(
    fleet: Fleet,
    demand: Demand,
    *,
    prefill_limit: int,
    shut: Shut = NOTHING_SHUT,
    held: frozenset[str] = frozenset(),
) -> Choice | None:
    """The best placement, or None when no prefill worker has fewer than `prefill_limit` of our requests.

    `shut` is what open breakers speak against, `held` names workers kept for a request that runs alone.
    """
    candidates = _candidates(fleet, demand.decodes, held | demand.never)
    if not candidates:
        return None
    avoided = _avoided(demand, shut)
    faults = {prefill.name: _fault(prefill, decodes, avoided) for prefill, decodes in candidates}
    least = min(faults.values())
    free = [
        (prefill, decodes)
        for prefill, decodes in candidates
        if faults[prefill.name] == least and prefill.own_requests < prefill_limit
    ]
    if not free:
        return None
    known = [prefill.rate for prefill, _ in free if prefill.rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    prefill, decodes = min(free, key=lambda pair: _prefill_cost(pair[0], demand, usual))
    names = [d for d in decodes if _pair_fault(prefill.name, d.name, avoided) == least]
    return Choice(prefill.name, tuple(d.name for d in sorted(names, key=_decode_cost)))


def quietest(fleet: Fleet, demand: Demand, shut: Shut = NOTHING_SHUT) -> tuple[Choice, bool] | None:
    """The pair to be kept for a request that runs alone, and whether nothing of ours runs there now.

    None when there is no pair at all.
    """
    avoided = _avoided(demand, shut)
    pairs = [
        ((_pair_fault(prefill.name, decode.name, avoided), prefill.own_requests + decode.own_requests), prefill, decode)
        for prefill, decodes in _candidates(fleet, True, demand.never)
        for decode in decodes
    ]
    if demand.decodes:
        if not pairs:
            return None
        (_, busy), prefill, decode = min(pairs, key=lambda pair: (pair[0], pair[1].name, pair[2].name))
        return Choice(prefill.name, (decode.name,)), busy == 0
    prefills = [prefill for prefill, _ in _candidates(fleet, False, frozenset())]
    if not prefills:
        return None
    prefill = min(prefills, key=lambda p: (_fault(p, [], avoided), p.own_requests, p.name))
    return Choice(prefill.name), prefill.own_requests == 0


def matching_decodes(fleet: Fleet) -> frozenset[str]:
    """Names of all decode workers that some prefill worker can hand KV to."""
    return frozenset(decode.name for _, decodes in _candidates(fleet, True) for decode in decodes)


@dataclass(frozen=True, slots=True)
class _Avoided:
    """How often a worker, or a pair, is spoken against: by the request's own past, and by breakers."""

    workers: tuple[frozenset[str], frozenset[str]]
    pairs: tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]


def _candidates(
    fleet: Fleet, decodes: bool, without: frozenset[str] = frozenset()
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """Each prefill worker that takes work, with the decode workers that may follow it."""
    prefills = [prefill for prefill in fleet.prefill if not prefill.draining and prefill.name not in without]
    if not decodes:
        return [(prefill, []) for prefill in prefills]
    open_decodes = [decode for decode in fleet.decode if not decode.draining and decode.name not in without]
    pairs = [
        (
            prefill,
            [d for d in open_decodes if pairable(prefill.kv_format, d.kv_format, converts=d.converts_kv)],
        )
        for prefill in prefills
    ]
    return [(prefill, matching) for prefill, matching in pairs if matching]


def _avoided(demand: Demand, shut: Shut) -> _Avoided:
    return _Avoided((demand.avoid, shut.workers), (demand.avoid_pairs, shut.pairs))


def _fault(prefill: PrefillView, decodes: list[DecodeView], avoided: _Avoided) -> tuple[int, int]:
    """How much the best pair with this prefill worker is to be avoided; less is better."""
    if not decodes:
        return sum(prefill.name in names for names in avoided.workers), 0
    return min(_pair_fault(prefill.name, decode.name, avoided) for decode in decodes)


def _pair_fault(prefill: str, decode: str, avoided: _Avoided) -> tuple[int, int]:
    return (
        sum((prefill in names) + (decode in names) for names in avoided.workers),
        sum((prefill, decode) in pairs for pairs in avoided.pairs),
    )


def _prefill_cost(prefill: PrefillView, demand: Demand, usual: float) -> tuple[float, int, int, str]:
    # What the worker reports includes ours once it knows of them, so the larger of the two counts nothing twice.
    pending = max(prefill.pending_tokens, prefill.own_tokens)
    rest = max(demand.tokens - demand.cached.get(prefill.name, 0), 0)
    return (pending + rest) / (prefill.rate or usual), prefill.own_requests, prefill.dispatched, prefill.name


def _decode_cost(decode: DecodeView) -> tuple[bool, int, int, str]:
    return decode.free_slots <= 0, -decode.free_tokens, decode.own_requests, decode.name
