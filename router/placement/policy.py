"""Placement policy: selects the prefill and decode workers of a request from the router's view of the fleet. Pure.

The prefill worker is the one with the least (waiting tokens + a fraction of the recently computed ones + uncached
tokens of the prompt) / measured rate: it will finish the prompt first. Decode workers are ordered by room: a free slot
first, then free pages and cached tokens of the prompt. Draining workers, and pairs whose KV formats do not match, are
left out. A worker or pair that failed the request before, or has an open breaker, gets a penalty, and only those with
the least penalty are used. A request that must run isolated gets the pair with the fewest requests of this router. No
other request is placed on the isolated workers (`FleetView.isolated`): the prefill worker, and in the cases that
`router/isolation.py` names, the decode worker.

A view is the state of one worker as the router knows it, and each new view replaces the last one. Workers with the same
KV format form a group, so that formats are compared for each pair of groups, and not for each pair of workers. Draining
workers are in no group.

One pass looks at every worker: about 0.5 ms with 500 prefill and 500 decode workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from baton.kv.format import KvFormat
from baton.rates import UNKNOWN_PREFILL_RATE
from router.placement.prefix_directory import NO_MATCH, PrefixMatch

ASK_ALL_UP_TO, ASKED_IF_MORE = 32, 6
"""Number of decode workers up to which all are asked for a reservation, and the number asked if there are more."""

RECENT_FRACTION = 1 / 10
"""Weight of a recently computed token in the load, where a waiting token has weight 1."""

RECENT_S = 60.0
"""Seconds in which the weight of a computed token falls to 1/e."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """The state of a prefill worker, from its reports and from this router's requests there.

    `address` is its "host:port". `open_requests` is the number of this router's requests there, and `open_tokens` the
    number of their tokens still to be computed; `recent_tokens` were computed before, and fade with time.
    `assigned_total` counts all requests so far. `rate` is in tokens per second, 0 while unknown.
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

    `address` is its "host:port"; `free_tokens` is the size of its free pages, in tokens.
    """

    address: str
    kv_format: KvFormat
    converts_kv: bool = False
    draining: bool = False
    free_tokens: int = 0
    free_slots: int = 0
    open_requests: int = 0
    incarnation: str = ""


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

    def compatible_decodes(self, prefill: PrefillView) -> list[DecodeView]:
        """Decode workers that can take the KV of a prefill worker."""
        return [
            view
            for (theirs, converts), decodes in self._decode_groups.items()
            if can_pair(prefill.kv_format, theirs, converts=converts)
            for view in decodes.values()
        ]

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
    tokens. `avoided_workers` and `avoided_pairs` (prefill, decode) failed the request before. `too_small_workers` are
    decode workers that can't hold it even when empty.
    """

    tokens: int
    needs_decode: bool = True
    avoided_workers: frozenset[str] = frozenset()
    avoided_pairs: frozenset[tuple[str, str]] = frozenset()
    prefill_match: PrefixMatch = NO_MATCH
    decode_match: PrefixMatch = NO_MATCH
    too_small_workers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OpenBreakers:
    """Addresses of workers, and (prefill, decode) pairs of addresses, with an open breaker; they are used last."""

    workers: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()


NO_OPEN_BREAKERS = OpenBreakers()


@dataclass(frozen=True, slots=True)
class WorkerSelection:
    """Addresses of a prefill worker and of the decode workers to ask for a reservation, best first."""

    prefill: str
    decode: tuple[str, ...] = ()


class AvoidancePenalty:
    """Penalties of workers and pairs, from earlier attempts of the request and from breakers."""

    def __init__(self, criteria: SelectionCriteria, open_breakers: OpenBreakers) -> None:
        self._workers = (criteria.avoided_workers, open_breakers.workers)
        self._pairs = (criteria.avoided_pairs, open_breakers.pairs)
        self._paired = {prefill for prefill, _ in chain(*self._pairs)}

    def __bool__(self) -> bool:
        return any(self._workers) or any(self._pairs)

    def of_worker(self, address: str) -> int:
        """The penalty of the worker at an address; 0 is best."""
        return sum(address in each for each in self._workers)

    def of_pair(self, prefill: str, decode: str) -> tuple[int, int]:
        """The sum of the penalties of two workers, and the penalty of their pair; less is better."""
        return self.of_worker(prefill) + self.of_worker(decode), sum((prefill, decode) in each for each in self._pairs)

    def of_best_pair(self, prefill: str, decodes: Collection[DecodeView], least_decode: int) -> tuple[int, int]:
        """The penalty of the best pair with a prefill worker; `least_decode` is the least penalty among `decodes`."""
        if prefill in self._paired and decodes:
            return min(self.of_pair(prefill, decode.address) for decode in decodes)
        return self.of_worker(prefill) + least_decode, 0


def can_serve(fleet: FleetView, *, needs_decode: bool) -> bool:
    """Whether the fleet has a prefill worker or, if `needs_decode`, a matching pair, whatever their load is."""
    return any(decode_groups or not needs_decode for _, decode_groups in fleet.compatible_groups)


def compatible_decode_addresses(fleet: FleetView) -> frozenset[str]:
    """Addresses of the decode workers that some prefill worker can hand KV to."""
    return frozenset(decode.address for _, decode_groups in fleet.compatible_groups for decode in chain(*decode_groups))


def select_workers(
    fleet: FleetView, criteria: SelectionCriteria, *, prefill_limit: int, open_breakers: OpenBreakers = NO_OPEN_BREAKERS
) -> WorkerSelection | None:
    """The best workers for a request.

    None if no prefill worker of the least penalty has fewer than `prefill_limit` requests of this router: a request
    waits rather than use a worker with a higher penalty.
    """
    penalty = AvoidancePenalty(criteria, open_breakers)
    found = [
        (view, decodes)
        for prefills, decodes in _usable_groups(fleet, criteria, fleet.isolated | criteria.too_small_workers)
        for view in prefills
    ]
    if penalty:
        found = _least_penalty(found, penalty)
    found = [(view, decodes) for view, decodes in found if view.open_requests < prefill_limit]
    if not found:
        return None
    seconds = _prefill_seconds([view for view, _ in found], criteria, fleet.mean_rate)
    least = min(seconds)
    view, decodes = min(
        (each for each, time in zip(found, seconds, strict=True) if time == least),
        key=lambda each: (each[0].open_requests, each[0].assigned_total, each[0].address),
    )
    if penalty:
        best = min((penalty.of_pair(view.address, decode.address) for decode in decodes), default=None)
        decodes = [decode for decode in decodes if penalty.of_pair(view.address, decode.address) == best]
    return WorkerSelection(view.address, _best_decodes(decodes, criteria))


def least_loaded_pair(
    fleet: FleetView,
    criteria: SelectionCriteria,
    open_breakers: OpenBreakers = NO_OPEN_BREAKERS,
    *,
    isolates_decode: bool = True,
) -> tuple[WorkerSelection, bool] | None:
    """The pair for a request that runs isolated, and whether it serves no request of this router now.

    Without `isolates_decode`, only the prefill worker must be empty. None if there is no pair.
    """
    penalty = AvoidancePenalty(criteria, open_breakers)

    def busy(view: PrefillView | DecodeView) -> tuple[int, int, str]:
        return penalty.of_worker(view.address), view.open_requests, view.address

    groups = list(_usable_groups(fleet, criteria, criteria.too_small_workers))
    prefills = heapq.nsmallest(ASK_ALL_UP_TO, (view for group, _ in groups for view in group), key=busy)
    if not criteria.needs_decode:
        return (WorkerSelection(prefills[0].address), prefills[0].open_requests == 0) if prefills else None
    decodes = {view.address: view for _, group in groups for view in group}
    best_decodes = heapq.nsmallest(ASK_ALL_UP_TO, decodes.values(), key=busy)
    pairs = [
        (
            penalty.of_pair(prefill.address, decode.address),
            prefill.open_requests + decode.open_requests * isolates_decode,
            decode.open_requests,
            prefill.address,
            decode.address,
        )
        for prefill in prefills
        for decode in best_decodes
        if can_pair(prefill.kv_format, decode.kv_format, converts=decode.converts_kv)
    ]
    if not pairs:
        return None
    _, requests, _, prefill_address, decode_address = min(pairs)
    return WorkerSelection(prefill_address, (decode_address,)), requests == 0


def _usable_groups(
    fleet: FleetView, criteria: SelectionCriteria, excluded: frozenset[str]
) -> Iterator[tuple[Collection[PrefillView], list[DecodeView]]]:
    """Groups of prefill workers with the decode workers that can take their KV, except the addresses in `excluded`."""
    for group, decode_groups in fleet.compatible_groups:
        prefills = [view for view in group if view.address not in excluded] if excluded else group
        if not criteria.needs_decode:
            yield prefills, []
        elif decodes := [view for view in chain(*decode_groups) if view.address not in excluded]:
            yield prefills, decodes


def _least_penalty(
    found: list[tuple[PrefillView, list[DecodeView]]], penalty: AvoidancePenalty
) -> list[tuple[PrefillView, list[DecodeView]]]:
    """The prefill workers whose best pair has the least penalty of all."""
    least_decode_of = {
        id(decodes): min((penalty.of_worker(each.address) for each in decodes), default=0)
        for decodes in {id(decodes): decodes for _, decodes in found}.values()
    }
    penalties = [penalty.of_best_pair(view.address, decodes, least_decode_of[id(decodes)]) for view, decodes in found]
    least = min(penalties, default=None)
    return [each for each, theirs in zip(found, penalties, strict=True) if theirs == least]


def _prefill_seconds(views: list[PrefillView], criteria: SelectionCriteria, mean_rate: float) -> list[float]:
    """Seconds until the prompt would be computed at each worker, in the order of `views`.

    So cached and waiting tokens have the same unit: a cached prefix makes a worker better by the time that it saves.
    """
    tokens, cached = criteria.tokens, criteria.prefill_match.by_worker
    return [
        (view.load_tokens + max(tokens - cached.get(view.address, 0), 0)) / (view.rate or mean_rate) for view in views
    ]


def _best_decodes(views: list[DecodeView], criteria: SelectionCriteria) -> tuple[str, ...]:
    """Addresses of the best workers: a free slot first, then most room; a fully cached prompt doubles the room."""
    tokens, cached = max(criteria.tokens, 1), criteria.decode_match.by_worker
    ranks = [
        (
            view.free_slots <= 0,
            -view.free_tokens * (1 + min(cached.get(view.address, 0) / tokens, 1.0)),
            view.open_requests,
            view.address,
        )
        for view in views
    ]
    most = ASK_ALL_UP_TO if len(ranks) <= ASK_ALL_UP_TO else ASKED_IF_MORE
    return tuple(rank[-1] for rank in heapq.nsmallest(most, ranks))
