"""The plain placement, which looks at every pair: what `router.placement.policy` must equal."""

from collections.abc import Mapping, Sequence

from router.placement.policy import (
    ASK_ALL_UP_TO,
    ASKED_IF_MORE,
    NO_OPEN_BREAKERS,
    AvoidancePenalty,
    DecodeView,
    OpenBreakers,
    PrefillView,
    SelectionCriteria,
    WorkerSelection,
    can_pair,
)
from router.placement.prefix_directory import PrefixMatch


def select(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    criteria: SelectionCriteria,
    *,
    prefill_limit: int,
    mean_rate: float,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
    isolated: frozenset[str] = frozenset(),
) -> WorkerSelection | None:
    matched = pairs(prefills, decodes, criteria, isolated | criteria.too_small_workers)
    if not matched:
        return None
    penalty = AvoidancePenalty(criteria, open_breakers)
    faults = {prefill.address: _fault(prefill, follow, penalty) for prefill, follow in matched}
    least = min(faults.values())
    free = [
        (prefill, follow)
        for prefill, follow in matched
        if faults[prefill.address] == least and prefill.open_requests < prefill_limit
    ]
    if not free:
        return None
    prefill, follow = min(free, key=lambda pair: _prefill_rank(pair[0], criteria, mean_rate))
    best = [decode for decode in follow if penalty.of_pair(prefill.address, decode.address) == least]
    best.sort(key=lambda decode: _decode_rank(decode, criteria))
    most = ASK_ALL_UP_TO if len(best) <= ASK_ALL_UP_TO else ASKED_IF_MORE
    return WorkerSelection(prefill.address, tuple(decode.address for decode in best[:most]))


def pairs(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    criteria: SelectionCriteria,
    excluded: frozenset[str],
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """Each prefill worker that takes work, with the decode workers that may follow it."""
    prefills = [prefill for prefill in prefills if not prefill.draining and prefill.address not in excluded]
    if not criteria.needs_decode:
        return [(prefill, []) for prefill in prefills]
    decodes = [decode for decode in decodes if not decode.draining and decode.address not in excluded]
    matched = [
        (prefill, [d for d in decodes if can_pair(prefill.kv_format, d.kv_format, converts=d.converts_kv)])
        for prefill in prefills
    ]
    return [(prefill, follow) for prefill, follow in matched if follow]


def _fault(prefill: PrefillView, follow: list[DecodeView], penalty: AvoidancePenalty) -> tuple[int, int]:
    if not follow:
        return penalty.of_worker(prefill.address), 0
    return min(penalty.of_pair(prefill.address, decode.address) for decode in follow)


def _prefill_rank(view: PrefillView, criteria: SelectionCriteria, mean_rate: float) -> tuple[float, int, int, str]:
    rest = max(criteria.tokens - criteria.prefill_match.tokens(view.address), 0)
    return (view.load_tokens + rest) / (view.rate or mean_rate), view.open_requests, view.assigned_total, view.address


def _decode_rank(view: DecodeView, criteria: SelectionCriteria) -> tuple[bool, float, int, str]:
    share = min(criteria.decode_match.tokens(view.address) / max(criteria.tokens, 1), 1.0)
    return view.free_slots <= 0, -view.free_tokens * (1 + share), view.open_requests, view.address


def hits(by_worker: Mapping[str, int]) -> PrefixMatch:
    """Result of an index where workers hold so many leading tokens."""
    numbers = sorted({tokens for tokens in by_worker.values() if tokens}, reverse=True)
    return PrefixMatch([(least, [name for name, held in by_worker.items() if held >= least]) for least in numbers])
