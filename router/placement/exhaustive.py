"""The plain placement, which looks at every pair: what `router.placement.policy` equals where workers are few. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.placement.demand import Against, Choice, Demand, decode_cost, prefill_cost
from router.placement.fleet import DecodeView, PrefillView, pairable
from router.workers.breaker import NOTHING_SHUT, Shut


def choose(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    demand: Demand,
    *,
    prefill_limit: int,
    usual_rate: float,
    shut: Shut = NOTHING_SHUT,
    held: frozenset[str] = frozenset(),
) -> Choice | None:
    """See `router.placement.policy.choose`."""
    pairs = _pairs(prefills, decodes, demand, held | demand.never)
    if not pairs:
        return None
    against = Against.of(demand, shut)
    faults = {prefill.name: _fault(prefill, follow, against) for prefill, follow in pairs}
    least = min(faults.values())
    free = [
        (prefill, follow)
        for prefill, follow in pairs
        if faults[prefill.name] == least and prefill.own_requests < prefill_limit
    ]
    if not free:
        return None
    prefill, follow = min(free, key=lambda pair: prefill_cost(pair[0], demand, usual_rate))
    best = [decode for decode in follow if against.pair(prefill.name, decode.name) == least]
    best.sort(key=lambda decode: decode_cost(decode, demand))
    return Choice(prefill.name, tuple(decode.name for decode in best))


def _pairs(
    prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], demand: Demand, without: frozenset[str]
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """Each prefill worker that takes work, with the decode workers that may follow it."""
    prefills = [prefill for prefill in prefills if not prefill.draining and prefill.name not in without]
    if not demand.decodes:
        return [(prefill, []) for prefill in prefills]
    decodes = [decode for decode in decodes if not decode.draining and decode.name not in without]
    pairs = [
        (prefill, [d for d in decodes if pairable(prefill.kv_format, d.kv_format, converts=d.converts_kv)])
        for prefill in prefills
    ]
    return [(prefill, follow) for prefill, follow in pairs if follow]


def _fault(prefill: PrefillView, follow: list[DecodeView], against: Against) -> tuple[int, int]:
    """How much the best pair with this prefill worker is spoken against; less is better."""
    if not follow:
        return against.worker(prefill.name), 0
    return min(against.pair(prefill.name, decode.name) for decode in follow)
