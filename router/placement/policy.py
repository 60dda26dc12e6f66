"""Placement policy: selects workers for a request by seconds, from the router's view of the fleet. Pure.

    seconds of a pair = queue of the prefill worker + computing of the uncached tokens + harm to sequences there
                      + transfer, if the two are not one worker + wait for a slot of the decode worker

A pair of one worker is *in place*: a mixed worker computes the prompt into the pages in which it decodes. The harm is
that of passes which are longer for everybody: at a mixed worker, a second of computing costs each running sequence a
second. So a short suffix is computed where it will be decoded, and a long prompt at a prefill worker, without limits to
set. A transfer runs beside the computing: only what is left of it afterwards counts, and a constant for its round trip.

Each decode worker is paired with the prefill worker that costs least, or with itself. Pairs whose seconds differ by
less than TIE_S are in the order of the decode workers' room: a free slot first, then free pages and cached tokens.
Draining workers, and pairs whose KV formats do not match, are left out. A worker or pair that failed the request
before, or has an open breaker, gets a penalty, and only pairs with the least penalty are used. A request that must run
isolated gets the pair with the fewest requests of this router; no other request is placed on isolated workers.

A view is the state of one worker as the router knows it, and each new view replaces the last one. Workers with the same
KV format form a group, so that formats are compared for each pair of groups, and not for each pair of workers. Draining
workers are in no group. One pass looks at every worker: below a millisecond with 500 prefill and 500 decode workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple, TypeVar

from baton.kv.format import KvFormat
from baton.rates import UNKNOWN_PREFILL_RATE
from router.placement.prefix_directory import NO_MATCH, PrefixMatch

ASKED_AT_MOST = 32
"""Most decode workers that a request asks for a reservation in a second, or until more workers take requests."""

RECENT_FRACTION = 1 / 10
"""Weight of a recently computed token in the load, where a waiting token has weight 1."""

RECENT_S = 60.0
"""Seconds in which the weight of a computed token falls to 1/e."""

TRANSFER_S = 0.01
"""Seconds that a transfer adds to a request if all of its KV is sent while the prompt is computed."""

UNKNOWN_BANDWIDTH = 1e9
"""Assumed rate of transfers to a decode worker in bytes/s, before one is measured."""

SLOT_STEPS = 256
"""Steps that a sequence is assumed to hold its slot: all slots of a worker come free in as many."""

TIE_S = 0.005
"""Unit in which the seconds of pairs are compared."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """The state of a prefill worker, from its reports and from this router's requests there.

    `address` is its "host:port". `open_requests` is the number of this router's requests there, and `open_tokens` the
    number of their tokens still to be computed; `recent_tokens` were computed before, and fade with time. `rate` is in
    tokens per second, 0 while unknown. `running` is the number of sequences that decode there: 0 unless the worker is
    mixed.
    """

    address: str
    kv_format: KvFormat
    draining: bool = False
    pending_tokens: int = 0
    rate: float = 0.0
    open_requests: int = 0
    open_tokens: int = 0
    recent_tokens: float = 0.0
    incarnation: str = ""
    running: int = 0
    load_tokens: float = field(init=False)
    """Tokens to be computed before a new prompt, plus a fraction of the recently computed ones.

    The fraction weighs as much as a short queue. So a prefix that attracts requests all the time is computed at a
    second worker too, which then shares the load.
    """

    @property
    def kind(self) -> tuple[KvFormat, bool]:
        """The property by which workers are grouped."""
        return self.kv_format, False

    def __post_init__(self) -> None:
        # The reported tokens include this router's own, after a delay: the maximum counts none of them twice.
        load = max(self.pending_tokens, self.open_tokens) + RECENT_FRACTION * self.recent_tokens
        # Computed once here, because every placement reads all views.
        object.__setattr__(self, "load_tokens", load)


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The state of a decode worker, from its reports; `open_requests` is the number of this router's attempts there.

    `address` is its "host:port"; `free_tokens` is the size of its free pages, in tokens. `step_seconds` is the mean
    duration of a step, and `transfer_bytes_per_second` the rate at which KV arrives; both are 0 while unknown.
    """

    address: str
    kv_format: KvFormat
    converts_kv: bool = False
    draining: bool = False
    free_tokens: int = 0
    free_slots: int = 0
    open_requests: int = 0
    incarnation: str = ""
    slots: int = 0
    step_seconds: float = 0.0
    transfer_bytes_per_second: float = 0.0
    transfer_token_s: float = field(init=False)
    """Seconds in which the KV of a token arrives."""
    slot_wait_s: float = field(init=False)
    """Expected seconds until a slot is free."""

    @property
    def kind(self) -> tuple[KvFormat, bool]:
        """The property by which workers are grouped."""
        return self.kv_format, self.converts_kv

    def __post_init__(self) -> None:
        bandwidth = self.transfer_bytes_per_second or UNKNOWN_BANDWIDTH
        wait_s = 0.0 if self.free_slots > 0 else SLOT_STEPS * self.step_seconds / max(self.slots, 1)
        # As in PrefillView.
        object.__setattr__(self, "transfer_token_s", self.kv_format.token_bytes / bandwidth)
        object.__setattr__(self, "slot_wait_s", wait_s)

    def has_room(self, tokens: int) -> bool:
        """Whether a slot and pages for `tokens` tokens are free, as far as is known."""
        return self.free_slots > 0 and self.free_tokens >= tokens


def can_pair(prefill: KvFormat, decode: KvFormat, *, converts: bool) -> bool:
    """Whether a decode worker can take KV in the format of a prefill worker; `converts` if it converts dtypes."""
    return prefill == decode or (converts and decode.can_convert_from(prefill))


V = TypeVar("V", PrefillView, DecodeView)


class FleetView:
    """The views of all accepted workers by address, draining ones included."""

    def __init__(self, prefill: Iterable[PrefillView] = (), decode: Iterable[DecodeView] = ()) -> None:
        self.prefill = {view.address: view for view in prefill}
        self.decode = {view.address: view for view in decode}
        self.isolated: frozenset[str] = frozenset()
        """Addresses of the workers that a suspected request has for itself; no other request is placed there."""
        self._groups: list[tuple[list[str], list[str]]] | None = None

    def __contains__(self, address: object) -> bool:
        return address in self.prefill or address in self.decode

    @property
    def mean_rate(self) -> float:
        """Mean of the known rates of prefill workers, in tokens/s; UNKNOWN_PREFILL_RATE while there is none."""
        rates = [view.rate for view in self.prefill.values() if view.rate > 0]
        return sum(rates) / len(rates) if rates else UNKNOWN_PREFILL_RATE

    @property
    def compatible_groups(self) -> list[tuple[list[str], list[str]]]:
        """Addresses of prefill workers with one KV format, and of the decode workers that can take it, by format.

        Draining workers are left out.
        """
        if self._groups is None:
            prefills, decodes = _group_by_format(self.prefill), _group_by_format(self.decode)
            self._groups = [
                (
                    addresses,
                    [
                        address
                        for (theirs, converts), others in decodes.items()
                        if can_pair(kv_format, theirs, converts=converts)
                        for address in others
                    ],
                )
                for (kv_format, _), addresses in prefills.items()
            ]
        return self._groups

    @property
    def usable_prefills(self) -> list[PrefillView]:
        """The prefill workers that take new requests: they neither drain nor are isolated."""
        return [view for view in self.prefill.values() if not view.draining and view.address not in self.isolated]

    def set_prefill(self, address: str, view: PrefillView | None) -> None:
        """Replace the view of the prefill worker at an address; None removes it."""
        self._set(self.prefill, address, view)

    def set_decode(self, address: str, view: DecodeView | None) -> None:
        """Replace the view of the decode worker at an address; None removes it."""
        self._set(self.decode, address, view)

    def _set(self, views: dict[str, V], address: str, view: V | None) -> None:
        before, after = ((each.kind, each.draining) if each else None for each in (views.get(address), view))
        if before != after:
            self._groups = None
        if view is not None:
            views[address] = view
        else:
            views.pop(address, None)


def _group_by_format(views: Mapping[str, V]) -> dict[tuple[KvFormat, bool], list[str]]:
    """Addresses of the workers that do not drain, by kind."""
    groups: dict[tuple[KvFormat, bool], list[str]] = {}
    for address, view in views.items():
        if not view.draining:
            groups.setdefault(view.kind, []).append(address)
    return groups


@dataclass(frozen=True, slots=True)
class SelectionCriteria:
    """The needs of a request that a selection must meet; workers are given by address.

    `tokens` is the number of tokens to prefill. `prefill_match` and `decode_match` tell which workers hold leading
    tokens. `blame` counts the reasons to avoid a worker, (address,), or a pair, (prefill, decode): the request failed
    there before, or a breaker is open. `excluded_decodes` are decode workers that it can't use, or must not be asked
    again. `in_place_only` are mixed workers that should not prefill for another worker.
    """

    tokens: int
    needs_decode: bool = True
    blame: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    in_place_only: frozenset[str] = frozenset()
    prefill_match: PrefixMatch = NO_MATCH
    decode_match: PrefixMatch = NO_MATCH
    excluded_decodes: frozenset[str] = frozenset()

    def worker_penalty(self, address: str) -> int:
        """The penalty of a worker; 0 is best."""
        return self.blame.get((address,), 0)

    def pair_penalty(self, prefill: str, decode: str) -> tuple[int, int]:
        """The sum of the penalties of two workers, or of one that does both, and the penalty of their pair."""
        workers, pair = self.worker_penalty(prefill), self.blame.get((prefill, decode), 0)
        if prefill != decode:
            return workers + self.worker_penalty(decode), pair + (prefill in self.in_place_only)
        return workers, pair


class WorkerPair(NamedTuple):
    """Addresses of a prefill worker and of a decode worker, which is "" if none is needed; equal if in place."""

    prefill: str
    decode: str = ""


def can_serve(fleet: FleetView, *, needs_decode: bool) -> bool:
    """Whether the fleet has a prefill worker or, if `needs_decode`, a matching pair, whatever their load is."""
    return any(decodes or not needs_decode for _, decodes in fleet.compatible_groups)


def compatible_decode_addresses(fleet: FleetView) -> frozenset[str]:
    """Addresses of the decode workers that some prefill worker can hand KV to."""
    return frozenset(chain.from_iterable(decodes for _, decodes in fleet.compatible_groups))


class PrefillCost(NamedTuple):
    """The cost of a prompt at a prefill worker, by which workers are compared; less is better.

    `full` tells that the worker has as many requests of this router as it may have. `seconds` are those of queue,
    computing, and harm to others; `compute_s` those of the computing alone.
    """

    penalty: int
    full: bool
    seconds: float
    open_requests: int
    address: str
    compute_s: float


class PairCost(NamedTuple):
    """The cost of a pair, by which pairs are compared; less is better.

    `order` has the seconds in units of TIE_S, whether the decode worker lacks a slot, its room in tokens (negative),
    and this router's requests there.
    """

    penalty: tuple[int, int]
    full: bool
    order: tuple[int, bool, float, int]
    decode: str
    transfers: bool
    prefill: str


def rank_pairs(
    fleet: FleetView, criteria: SelectionCriteria, *, prefill_limit: float, only: str | None = None, most: int = 1
) -> list[WorkerPair]:
    """The best pairs for a request, best first, each with another decode worker; `most` at most.

    Only pairs with the least penalty are used, and of these the ones whose prefill worker has fewer than
    `prefill_limit` requests of this router: a request waits rather than use a pair with a higher penalty. If the
    address `only` is given, it is that of the only decode worker to look at.
    """
    excluded = fleet.isolated | criteria.excluded_decodes
    alone: list[PrefillCost] = []
    pairs: dict[str, PairCost] = {}
    for prefill_addresses, decode_addresses in fleet.compatible_groups:
        prefills = prefill_costs(fleet, criteria, prefill_addresses, prefill_limit)
        if not criteria.needs_decode or not prefills:
            alone += prefills
            continue
        decodes = [each for each in decode_addresses if only in (None, each) and each not in excluded]
        # For each decode worker, at least one of the first prefill workers is in no pair with a penalty.
        blamed_pairs = sum(len(key) == 2 for key in criteria.blame) + len(criteria.in_place_only)
        first = heapq.nsmallest(1 + blamed_pairs, prefills)
        found = pair_costs(criteria, first, map(fleet.decode.__getitem__, decodes))
        mixed = fleet.prefill.keys() & decodes
        for each in prefills if mixed else ():
            if each.address in mixed:
                found += pair_costs(criteria, [each], [fleet.decode[each.address]])
        for cost in found:
            pairs[cost.decode] = min(cost, pairs.get(cost.decode, cost))
    if not criteria.needs_decode:
        return [WorkerPair(cost.address) for cost in heapq.nsmallest(1, alone) if not cost.full]
    least = min((cost.penalty for cost in pairs.values()), default=None)
    usable = [cost for cost in pairs.values() if cost.penalty == least and not cost.full]
    return [WorkerPair(cost.prefill, cost.decode) for cost in heapq.nsmallest(most, usable)]


def prefill_costs(
    fleet: FleetView, criteria: SelectionCriteria, addresses: Iterable[str], limit: float
) -> list[PrefillCost]:
    """The costs of the prompt at prefill workers; isolated ones are left out."""
    tokens, cached_tokens, mean_rate, costs = criteria.tokens, criteria.prefill_match.by_worker, fleet.mean_rate, []
    for address in addresses:
        if address in fleet.isolated:
            continue
        view = fleet.prefill[address]
        rate, requests = view.rate or mean_rate, view.open_requests
        compute_s = max(tokens - cached_tokens.get(address, 0), 0) / rate
        seconds = view.load_tokens / rate + compute_s * (1 + view.running)
        penalty = criteria.worker_penalty(address) if criteria.blame else 0
        costs.append(PrefillCost(penalty, requests >= limit, seconds, requests, address, compute_s))
    return costs


def pair_costs(
    criteria: SelectionCriteria, prefills: Sequence[PrefillCost], views: Iterable[DecodeView]
) -> list[PairCost]:
    """The costs of decoding at the workers, if the best one of `prefills` for each computes the prompt."""
    prefill, cached_tokens, penalty, costs = prefills[0], criteria.decode_match.by_worker, (0, 0), []
    for view in views:
        address, tokens, room = view.address, criteria.tokens, float(view.free_tokens)
        if cached := cached_tokens.get(address):
            # A fully cached prompt doubles the room.
            room *= 1 + min(cached / max(tokens, 1), 1.0)
            tokens = max(tokens - cached, 0)
        if criteria.blame or criteria.in_place_only:
            penalty, prefill = min((criteria.pair_penalty(each.address, address), each) for each in prefills)
        seconds = prefill.seconds + view.slot_wait_s
        if transfers := prefill.address != address:
            rest_s = tokens * view.transfer_token_s - prefill.compute_s
            seconds += TRANSFER_S + rest_s if rest_s > 0 else TRANSFER_S
        order = round(seconds / TIE_S), view.free_slots <= 0, -room, view.open_requests
        costs.append(PairCost(penalty, prefill.full, order, address, transfers, prefill.address))
    return costs


def least_loaded_pair(
    fleet: FleetView, criteria: SelectionCriteria, *, isolates_decode: bool = True
) -> tuple[WorkerPair, bool] | None:
    """The pair for a request that runs isolated, and whether it serves no request of this router now.

    Without `isolates_decode`, only the prefill worker must be empty. None if there is no pair.
    """

    def requests(address: str) -> int:
        """Requests of this router at a worker; a mixed one has two views."""
        views = fleet.prefill.get(address), fleet.decode.get(address)
        return sum(view.open_requests for view in views if view is not None)

    def cost(address: str) -> tuple[int, int, str]:
        return criteria.worker_penalty(address), requests(address), address

    pairs: list[tuple[tuple[int, int], int, int, WorkerPair]] = []
    for prefills, decodes in fleet.compatible_groups:
        usable = [each for each in decodes if each not in criteria.excluded_decodes] if criteria.needs_decode else [""]
        best = (heapq.nsmallest(ASKED_AT_MOST, addresses, key=cost) for addresses in (prefills, usable))
        pairs += [
            (criteria.pair_penalty(*pair), requests(pair[0]), requests(pair[1]), WorkerPair(*pair))
            for pair in product(*best)
        ]
    if not pairs:
        return None
    _, at_prefill, at_decode, pair = min(pairs)
    return pair, not at_prefill and not (isolates_decode and at_decode)
