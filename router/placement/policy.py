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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

from baton.kv.format import KvFormat
from baton.rates import UNKNOWN_PREFILL_RATE
from router.placement.prefix_directory import NO_MATCH, PrefixMatch

ASKED_AT_MOST = 32
"""Most decode workers that a request asks for a reservation in a second."""

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
    number of their tokens still to be computed; `recent_tokens` were computed before, and fade with time.
    `assigned_total` counts all requests so far. `rate` is in tokens per second, 0 while unknown. `running` is the
    number of sequences that decode there: 0 unless the worker is mixed.
    """

    address: str
    kv_format: KvFormat
    draining: bool = False
    pending_tokens: int = 0
    rate: float = 0.0
    open_requests: int = 0
    open_tokens: int = 0
    assigned_total: int = 0
    recent_tokens: float = 0.0
    incarnation: str = ""
    running: int = 0
    load_tokens: float = field(init=False)
    """Tokens to be computed before a new prompt, plus a fraction of the recently computed ones.

    The fraction weighs as much as a short queue. So a prefix that attracts requests all the time is computed at a
    second worker too, which then shares the load.
    """

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

    def __post_init__(self) -> None:
        bandwidth = self.transfer_bytes_per_second or UNKNOWN_BANDWIDTH
        wait_s = 0.0 if self.free_slots > 0 else SLOT_STEPS * self.step_seconds / max(self.slots, 1)
        # As in PrefillView.
        object.__setattr__(self, "transfer_token_s", self.kv_format.token_bytes / bandwidth)
        object.__setattr__(self, "slot_wait_s", wait_s)

    def has_room(self, tokens: int) -> bool:
        """Whether a slot and pages for `tokens` tokens are free, as far as is known."""
        return self.free_slots > 0 and self.free_tokens >= tokens


V = TypeVar("V", PrefillView, DecodeView)
Group = dict[str, V]
"""Workers with the same KV format, by address ("host:port")."""


def can_pair(prefill: KvFormat, decode: KvFormat, *, converts: bool) -> bool:
    """Whether a decode worker can take KV in the format of a prefill worker; `converts` if it converts dtypes."""
    return prefill == decode or (converts and decode.can_convert_from(prefill))


class FleetView:
    """The views of all accepted workers by address, draining ones included."""

    def __init__(self, prefill: Iterable[PrefillView] = (), decode: Iterable[DecodeView] = ()) -> None:
        self.prefill: dict[str, PrefillView] = {}
        self.decode: dict[str, DecodeView] = {}
        self.isolated: frozenset[str] = frozenset()
        """Addresses of the workers that a suspected request has for itself; no other request is placed there."""
        self._prefill_groups: dict[KvFormat, Group[PrefillView]] = {}
        self._decode_groups: dict[tuple[KvFormat, bool], Group[DecodeView]] = {}
        self._compatible_groups: list[tuple[Collection[PrefillView], list[Collection[DecodeView]]]] | None = None
        for prefill_view in prefill:
            self.put_prefill(prefill_view)
        for decode_view in decode:
            self.put_decode(decode_view)

    def __contains__(self, address: object) -> bool:
        return address in self.prefill or address in self.decode

    @property
    def mean_rate(self) -> float:
        """Mean of the known rates of prefill workers, in tokens/s; UNKNOWN_PREFILL_RATE while there is none."""
        rates = [view.rate for view in self.prefill.values() if view.rate > 0]
        return sum(rates) / len(rates) if rates else UNKNOWN_PREFILL_RATE

    @property
    def compatible_groups(self) -> list[tuple[Collection[PrefillView], list[Collection[DecodeView]]]]:
        """Groups of prefill workers, each with the groups of decode workers that can take its KV."""
        if self._compatible_groups is None:
            self._compatible_groups = [
                (
                    prefills.values(),
                    [
                        decodes.values()
                        for (theirs, converts), decodes in self._decode_groups.items()
                        if can_pair(kv_format, theirs, converts=converts)
                    ],
                )
                for kv_format, prefills in self._prefill_groups.items()
            ]
        return self._compatible_groups

    @property
    def usable_prefills(self) -> int:
        """Number of prefill workers that take new requests: they neither drain nor are isolated."""
        groups = self._prefill_groups.values()
        return sum(len(group) - sum(address in group for address in self.isolated) for group in groups)

    def has_capacity(self, limit: int) -> bool:
        """Whether some prefill worker takes new requests and has fewer than `limit` requests of this router."""
        return any(
            view.open_requests < limit and view.address not in self.isolated
            for group in self._prefill_groups.values()
            for view in group.values()
        )

    def put_prefill(self, view: PrefillView) -> None:
        """Add or replace the view of a prefill worker."""
        old = self.prefill.get(view.address)
        if old is not None and (old.kv_format != view.kv_format or old.draining != view.draining):
            self.remove_prefill(view.address)
        self.prefill[view.address] = view
        if not view.draining:
            if (group := self._prefill_groups.get(view.kv_format)) is None:
                group, self._compatible_groups = self._prefill_groups.setdefault(view.kv_format, {}), None
            group[view.address] = view

    def put_decode(self, view: DecodeView) -> None:
        """Add or replace the view of a decode worker."""
        old, kind = self.decode.get(view.address), (view.kv_format, view.converts_kv)
        if old is not None and ((old.kv_format, old.converts_kv) != kind or old.draining != view.draining):
            self.remove_decode(view.address)
        self.decode[view.address] = view
        if not view.draining:
            if (group := self._decode_groups.get(kind)) is None:
                group, self._compatible_groups = self._decode_groups.setdefault(kind, {}), None
            group[view.address] = view

    def remove_prefill(self, address: str) -> None:
        """Remove the view of a prefill worker, if there is one."""
        view = self.prefill.pop(address, None)
        if view is not None and not view.draining:
            group = self._prefill_groups[view.kv_format]
            del group[address]
            if not group:
                del self._prefill_groups[view.kv_format]
                self._compatible_groups = None

    def remove_decode(self, address: str) -> None:
        """Remove the view of a decode worker, if there is one."""
        view = self.decode.pop(address, None)
        if view is not None and not view.draining:
            group = self._decode_groups[view.kv_format, view.converts_kv]
            del group[address]
            if not group:
                del self._decode_groups[view.kv_format, view.converts_kv]
                self._compatible_groups = None


@dataclass(frozen=True, slots=True)
class SelectionCriteria:
    """The needs of a request that a selection must meet; workers are given by address.

    `tokens` is the number of tokens to prefill. `prefill_match` and `decode_match` tell which workers hold leading
    tokens. `avoided_workers` and `avoided_pairs` (prefill, decode) failed the request before. `excluded_decodes` are
    decode workers that it can't use, or must not be asked again. `in_place_only` are mixed workers that should not
    prefill for another worker.
    """

    tokens: int
    needs_decode: bool = True
    avoided_workers: frozenset[str] = frozenset()
    avoided_pairs: frozenset[tuple[str, str]] = frozenset()
    in_place_only: frozenset[str] = frozenset()
    prefill_match: PrefixMatch = NO_MATCH
    decode_match: PrefixMatch = NO_MATCH
    excluded_decodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OpenBreakers:
    """Addresses of workers, and (prefill, decode) pairs of addresses, with an open breaker; they are used last."""

    workers: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()


NO_OPEN_BREAKERS = OpenBreakers()


class WorkerPair(NamedTuple):
    """Addresses of a prefill worker and of a decode worker, which is "" if none is needed; equal if in place."""

    prefill: str
    decode: str = ""


class AvoidancePenalty:
    """Penalties of workers and pairs, from earlier attempts of the request and from breakers; less is better."""

    def __init__(self, criteria: SelectionCriteria, open_breakers: OpenBreakers) -> None:
        self._workers = (criteria.avoided_workers, open_breakers.workers)
        self._pairs = (criteria.avoided_pairs, open_breakers.pairs)
        self._in_place_only = criteria.in_place_only
        self.pairs = sum(map(len, (*self._pairs, self._in_place_only)))
        """Number of prefill workers, at most, whose pair with a decode worker has a penalty."""

    def __bool__(self) -> bool:
        return bool(self.pairs) or any(self._workers)

    def of_worker(self, address: str) -> int:
        """The penalty of the worker at an address; 0 is best."""
        return sum(address in each for each in self._workers)

    def of_pair(self, prefill: str, decode: str) -> tuple[int, int]:
        """The sum of the penalties of two workers, or of one that does both, and the penalty of their pair."""
        workers = self.of_worker(prefill) + (self.of_worker(decode) if decode != prefill else 0)
        in_place_only = prefill != decode and prefill in self._in_place_only
        return workers, sum((prefill, decode) in each for each in self._pairs) + in_place_only


def can_serve(fleet: FleetView, *, needs_decode: bool) -> bool:
    """Whether the fleet has a prefill worker or, if `needs_decode`, a matching pair, whatever their load is."""
    return any(decode_groups or not needs_decode for _, decode_groups in fleet.compatible_groups)


def compatible_decode_addresses(fleet: FleetView) -> frozenset[str]:
    """Addresses of the decode workers that some prefill worker can hand KV to."""
    return frozenset(decode.address for _, decode_groups in fleet.compatible_groups for decode in chain(*decode_groups))


class PrefillCost(NamedTuple):
    """The cost of a prompt at a prefill worker, by which workers are compared; less is better.

    `full` tells that the worker has as many requests of this router as it may have. `seconds` are those of queue,
    computing, and harm to others; `compute_s` those of the computing alone.
    """

    penalty: int
    full: bool
    seconds: float
    open_requests: int
    assigned_total: int
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


class PlacementCosts:
    """The costs of workers and pairs for one request."""

    def __init__(
        self, fleet: FleetView, criteria: SelectionCriteria, penalty: AvoidancePenalty, prefill_limit: float
    ) -> None:
        self._penalty = penalty if penalty else None
        self._tokens, self._limit, self._mean_rate = criteria.tokens, prefill_limit, fleet.mean_rate
        self._at_prefill, self._at_decode = criteria.prefill_match.by_worker, criteria.decode_match.by_worker

    def of_prefills(self, views: Iterable[PrefillView]) -> list[PrefillCost]:
        """The costs of the prompt at prefill workers."""
        tokens, cached_tokens, penalty, limit, costs = self._tokens, self._at_prefill, self._penalty, self._limit, []
        for view in views:
            rate, address, requests = view.rate or self._mean_rate, view.address, view.open_requests
            compute_s = max(tokens - cached_tokens.get(address, 0), 0) / rate
            seconds = view.load_tokens / rate + compute_s * (1 + view.running)
            blame = 0 if penalty is None else penalty.of_worker(address)
            costs.append(
                PrefillCost(blame, requests >= limit, seconds, requests, view.assigned_total, address, compute_s)
            )
        return costs

    def of_pairs(self, prefills: Sequence[PrefillCost], views: Iterable[DecodeView]) -> list[PairCost]:
        """The costs of decoding at the workers, if the best one of `prefills` for each computes the prompt."""
        prefill, cached_tokens, penalty, pair_penalty, costs = prefills[0], self._at_decode, self._penalty, (0, 0), []
        for view in views:
            address, tokens, room = view.address, self._tokens, float(view.free_tokens)
            if cached := cached_tokens.get(address):
                # A fully cached prompt doubles the room.
                room *= 1 + min(cached / max(tokens, 1), 1.0)
                tokens = max(tokens - cached, 0)
            if penalty is not None:
                pair_penalty, prefill = min((penalty.of_pair(each.address, address), each) for each in prefills)
            seconds = prefill.seconds + view.slot_wait_s
            if transfers := prefill.address != address:
                rest_s = tokens * view.transfer_token_s - prefill.compute_s
                seconds += TRANSFER_S + rest_s if rest_s > 0 else TRANSFER_S
            order = round(seconds / TIE_S), view.free_slots <= 0, -room, view.open_requests
            costs.append(PairCost(pair_penalty, prefill.full, order, address, transfers, prefill.address))
        return costs


def rank_pairs(
    fleet: FleetView,
    criteria: SelectionCriteria,
    *,
    prefill_limit: float,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
    only: str | None = None,
    most: int = 1,
) -> list[WorkerPair]:
    """The best pairs for a request, best first, each with another decode worker; `most` at most.

    Only pairs with the least penalty are used, and of these the ones whose prefill worker has fewer than
    `prefill_limit` requests of this router: a request waits rather than use a pair with a higher penalty. If the
    address `only` is given, it is that of the only decode worker to look at.
    """
    penalty, excluded = AvoidancePenalty(criteria, open_breakers), fleet.isolated | criteria.excluded_decodes
    costs = PlacementCosts(fleet, criteria, penalty, prefill_limit)
    alone: list[PrefillCost] = []
    pairs: dict[str, PairCost] = {}
    for group, decode_groups in fleet.compatible_groups:
        prefills = costs.of_prefills(view for view in group if view.address not in fleet.isolated)
        if not criteria.needs_decode or not prefills:
            alone += prefills
            continue
        decodes = [view for view in chain(*decode_groups) if only in (None, view.address)]
        decodes = [view for view in decodes if view.address not in excluded]
        mixed = {view.address: view for view in decodes if view.address in fleet.prefill}
        # For each decode worker, at least one of the first prefill workers is in no pair with a penalty.
        found = costs.of_pairs(heapq.nsmallest(1 + penalty.pairs, prefills), decodes)
        for prefill in prefills if mixed else ():
            if prefill.address in mixed:
                found += costs.of_pairs([prefill], [mixed[prefill.address]])
        for cost in found:
            known = pairs.setdefault(cost.decode, cost)
            if cost < known:
                pairs[cost.decode] = cost
    if not criteria.needs_decode:
        return [WorkerPair(cost.address) for cost in heapq.nsmallest(1, alone) if not cost.full]
    least = min((cost.penalty for cost in pairs.values()), default=None)
    usable = [cost for cost in pairs.values() if cost.penalty == least and not cost.full]
    return [WorkerPair(cost.prefill, cost.decode) for cost in heapq.nsmallest(most, usable)]


def least_loaded_pair(
    fleet: FleetView,
    criteria: SelectionCriteria,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
    *,
    isolates_decode: bool = True,
) -> tuple[WorkerPair, bool] | None:
    """The pair for a request that runs isolated, and whether it serves no request of this router now.

    Without `isolates_decode`, only the prefill worker must be empty. None if there is no pair.
    """
    penalty, none, excluded_decodes = (
        AvoidancePenalty(criteria, open_breakers),
        frozenset[str](),
        criteria.excluded_decodes,
    )

    def requests(address: str) -> int:
        """Requests of this router at a worker; a mixed one has two views."""
        views = fleet.prefill.get(address), fleet.decode.get(address)
        return sum(view.open_requests for view in views if view is not None)

    def busy(address: str) -> tuple[int, int, str]:
        return penalty.of_worker(address), requests(address), address

    def least_busy(views: Iterable[PrefillView] | Iterable[DecodeView], excluded: frozenset[str]) -> list[str]:
        addresses = (view.address for view in views if view.address not in excluded)
        return heapq.nsmallest(ASKED_AT_MOST, addresses, key=busy)

    pairs: list[tuple[tuple[int, int], int, int, str, str]] = []
    for group, decode_groups in fleet.compatible_groups:
        for prefill in least_busy(group, none):
            for decode in least_busy(chain(*decode_groups), excluded_decodes) if criteria.needs_decode else [""]:
                own = {prefill, decode} if isolates_decode else {prefill}
                pairs.append(
                    (penalty.of_pair(prefill, decode), sum(map(requests, own)), requests(decode), prefill, decode)
                )
    if not pairs:
        return None
    _, count, _, *addresses = min(pairs)
    return WorkerPair(*addresses), count == 0
