"""The plain placement, which looks at every pair: what `router.placement.policy` must equal."""

from collections.abc import Mapping, Sequence

from router.placement.policy import (
    SLOT_STEPS,
    TIE_S,
    TRANSFER_S,
    UNKNOWN_BANDWIDTH,
    DecodeView,
    FleetView,
    PrefillView,
    SelectionCriteria,
    WorkerPair,
    can_pair,
)
from router.placement.prefix_directory import PrefixMatch


class Costs:
    """The costs of one request, number by number."""

    def __init__(self, fleet: FleetView, criteria: SelectionCriteria, limit: float) -> None:
        self.criteria, self.limit, self.mean_rate = criteria, limit, fleet.mean_rate

    def compute_s(self, prefill: PrefillView) -> float:
        rest = max(self.criteria.tokens - self.criteria.prefill_match.tokens(prefill.address), 0)
        return rest / (prefill.rate or self.mean_rate)

    def prefill_s(self, prefill: PrefillView) -> float:
        queue_s = prefill.load_tokens / (prefill.rate or self.mean_rate)
        return queue_s + self.compute_s(prefill) * (1 + prefill.running)

    def seconds(self, prefill: PrefillView, decode: DecodeView) -> float:
        slot_s = 0.0 if decode.free_slots > 0 else SLOT_STEPS * decode.step_seconds / max(decode.slots, 1)
        total = self.prefill_s(prefill) + slot_s
        if prefill.address == decode.address:
            return total
        missing = max(self.criteria.tokens - self.criteria.decode_match.tokens(decode.address), 0)
        sent_s = missing * decode.kv_format.token_bytes / (decode.transfer_bytes_per_second or UNKNOWN_BANDWIDTH)
        return total + (TRANSFER_S + max(sent_s - self.compute_s(prefill), 0.0))

    def of_prefill(self, prefill: PrefillView) -> tuple[bool, float, int, str]:
        full, seconds = prefill.open_requests >= self.limit, self.prefill_s(prefill)
        return full, seconds, prefill.open_requests, prefill.address

    def of_pair(self, prefill: PrefillView, decode: DecodeView) -> tuple[tuple[int, int], bool, object, str, bool, str]:
        penalty = self.criteria.pair_penalty(prefill.address, decode.address)
        cached = self.criteria.decode_match.tokens(decode.address) / max(self.criteria.tokens, 1)
        room, ties = decode.free_tokens * (1 + min(cached, 1.0)), round(self.seconds(prefill, decode) / TIE_S)
        order = ties, decode.free_slots <= 0, -room, decode.open_requests
        full, transfers = prefill.open_requests >= self.limit, prefill.address != decode.address
        return penalty, full, order, decode.address, transfers, prefill.address


def rank(fleet: FleetView, criteria: SelectionCriteria, limit: float) -> list[WorkerPair]:
    """All pairs for a request, best first, each with another decode worker."""
    costs, excluded = Costs(fleet, criteria, limit), fleet.isolated | criteria.excluded_decodes
    prefills = [view for view in fleet.prefill.values() if view.address not in fleet.isolated]
    if not criteria.needs_decode:
        alone = [view for view in prefills if not view.draining]
        alone.sort(key=lambda view: (criteria.worker_penalty(view.address), *costs.of_prefill(view)))
        return [WorkerPair(view.address) for view in alone[:1] if view.open_requests < limit]
    best = []
    for decode in fleet.decode.values():
        usable = [prefill for prefill, follow in pairs(prefills, [decode], criteria) if follow]
        if not usable or decode.address in excluded:
            continue
        # The best other worker of a KV format computes the prompt, or the decode worker itself, if that costs less.
        usable.sort(key=lambda view: (criteria.pair_penalty(view.address, decode.address), *costs.of_prefill(view)))
        others = {view.kv_format: view for view in reversed(usable) if view.address != decode.address}
        candidates = [*others.values(), *(view for view in usable if view.address == decode.address)]
        best.append(min(costs.of_pair(prefill, decode) for prefill in candidates))
    least = min((cost[0] for cost in best), default=None)
    return [WorkerPair(cost[5], cost[3]) for cost in sorted(best) if cost[0] == least and not cost[1]]


def pairs(
    prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], criteria: SelectionCriteria
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """Each prefill worker that takes work, with the decode workers that may follow it."""
    prefills = [prefill for prefill in prefills if not prefill.draining]
    if not criteria.needs_decode:
        return [(prefill, []) for prefill in prefills]
    decodes = [view for view in decodes if not view.draining and view.address not in criteria.excluded_decodes]
    matched = [
        (prefill, [d for d in decodes if can_pair(prefill.kv_format, d.kv_format, converts=d.converts_kv)])
        for prefill in prefills
    ]
    return [(prefill, follow) for prefill, follow in matched if follow]


def hits(by_worker: Mapping[str, int]) -> PrefixMatch:
    """Result of an index where workers hold so many leading tokens."""
    numbers = sorted({tokens for tokens in by_worker.values() if tokens}, reverse=True)
    return PrefixMatch([(least, [name for name, held in by_worker.items() if held >= least]) for least in numbers])
