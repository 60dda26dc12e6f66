"""The plain placement, which looks at every pair: what `router.placement.policy` must equal."""

from collections.abc import Mapping, Sequence

from router.placement.policy import (
    NO_OPEN_BREAKERS,
    SLOT_STEPS,
    TIE_S,
    TRANSFER_S,
    UNKNOWN_BANDWIDTH,
    AvoidancePenalty,
    DecodeView,
    OpenBreakers,
    PrefillView,
    SelectionCriteria,
    WorkerPair,
    can_pair,
)
from router.placement.prefix_directory import PrefixMatch


def rank(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    criteria: SelectionCriteria,
    *,
    prefill_limit: float,
    mean_rate: float,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
    isolated: frozenset[str] = frozenset(),
) -> list[WorkerPair]:
    penalty = AvoidancePenalty(criteria, open_breakers)
    prefills = [prefill for prefill in prefills if prefill.address not in isolated]
    decodes = [decode for decode in decodes if decode.address not in isolated | criteria.excluded_decodes]

    def full(prefill: PrefillView) -> bool:
        return prefill.open_requests >= prefill_limit

    def compute_s(prefill: PrefillView) -> float:
        rest = max(criteria.tokens - criteria.prefill_match.tokens(prefill.address), 0)
        return rest / (prefill.rate or mean_rate)

    def prefill_s(prefill: PrefillView) -> float:
        computing = compute_s(prefill)
        return prefill.load_tokens / (prefill.rate or mean_rate) + computing * (1 + prefill.running)

    def prefill_order(prefill: PrefillView) -> tuple[bool, float, int, int, str]:
        return full(prefill), prefill_s(prefill), prefill.open_requests, prefill.assigned_total, prefill.address

    if not criteria.needs_decode:
        usable = [prefill for prefill in prefills if not prefill.draining]
        usable.sort(key=lambda prefill: (penalty.of_worker(prefill.address), *prefill_order(prefill)))
        return [WorkerPair(prefill.address) for prefill in usable[:1] if not full(prefill)]

    def seconds(prefill: PrefillView, decode: DecodeView) -> float:
        slot_s = 0.0 if decode.free_slots > 0 else SLOT_STEPS * decode.step_seconds / max(decode.slots, 1)
        total = prefill_s(prefill) + slot_s
        if prefill.address == decode.address:
            return total
        sent = max(criteria.tokens - criteria.decode_match.tokens(decode.address), 0) * decode.kv_format.token_bytes
        bandwidth = decode.transfer_bytes_per_second or UNKNOWN_BANDWIDTH
        return total + (TRANSFER_S + max(sent / bandwidth - compute_s(prefill), 0.0))

    def room(decode: DecodeView) -> float:
        return decode.free_tokens * (
            1 + min(criteria.decode_match.tokens(decode.address) / max(criteria.tokens, 1), 1.0)
        )

    def of_pair(prefill: PrefillView, decode: DecodeView) -> tuple[int, int]:
        return penalty.of_pair(prefill.address, decode.address)

    best = []
    for decode in decodes:
        usable = [prefill for prefill, follow in pairs(prefills, [decode], criteria, frozenset()) if follow]
        if not usable:
            continue
        # The best other worker of a KV format computes the prompt, or the decode worker itself, if that costs less.
        others = sorted(
            (prefill for prefill in usable if prefill.address != decode.address),
            key=lambda prefill: (of_pair(prefill, decode), *prefill_order(prefill)),
        )
        first_of = {prefill.kv_format: prefill for prefill in reversed(others)}
        candidates = [*first_of.values(), *(prefill for prefill in usable if prefill.address == decode.address)]
        best.append(
            min(
                (
                    of_pair(prefill, decode),
                    full(prefill),
                    (
                        round(seconds(prefill, decode) / TIE_S),
                        decode.free_slots <= 0,
                        -room(decode),
                        decode.open_requests,
                    ),
                    decode.address,
                    prefill.address != decode.address,
                    prefill.address,
                )
                for prefill in candidates
            )
        )
    least = min((each[0] for each in best), default=None)
    best = sorted(each for each in best if each[0] == least and not each[1])
    return [WorkerPair(each[5], each[3]) for each in best]


def pairs(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    criteria: SelectionCriteria,
    excluded: frozenset[str],
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """Each prefill worker that takes work, with the decode workers that may follow it."""
    prefills = [prefill for prefill in prefills if not prefill.draining]
    if not criteria.needs_decode:
        return [(prefill, []) for prefill in prefills]
    decodes = [decode for decode in decodes if not decode.draining and decode.address not in excluded]
    matched = [
        (prefill, [d for d in decodes if can_pair(prefill.kv_format, d.kv_format, converts=d.converts_kv)])
        for prefill in prefills
    ]
    return [(prefill, follow) for prefill, follow in matched if follow]


def hits(by_worker: Mapping[str, int]) -> PrefixMatch:
    """Result of an index where workers hold so many leading tokens."""
    numbers = sorted({tokens for tokens in by_worker.values() if tokens}, reverse=True)
    return PrefixMatch([(least, [name for name, held in by_worker.items() if held >= least]) for least in numbers])
