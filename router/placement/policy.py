"""Placement: which prefill and which decode workers a request goes to. A pure function of the fleet as it is known.

Prefill goes where the prompt will be done first: tokens pending there, and those of the prompt that are not cached
there, over the measured rate. Decode goes where most room is: workers with a free slot first, then by free pages and by
what they hold of the prompt. Workers that drain, and pairs whose KV does not match, are left out. What failed the
request before, or has an open breaker, is used only if nothing else is there, and then what is least to be avoided. A
request that must run alone gets the pair that is soonest empty of this router's requests; while it waits for that pair,
and runs there, others get none of the two.

In a small fleet every worker is looked at. In a large one those are that can be the best: some of those that hold most
of the prompt, and the first few of each row of the fleet. The choice then costs no more than any of these, and where it
misses a better one, that is a holder of less, or by a factor of the rates within one row.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from router.placement import exhaustive
from router.placement.demand import Against, Choice, Demand, Hits, decode_cost, prefill_cost
from router.placement.fleet import DecodeView, Fleet, PrefillView, Row, V, Workers, pairable
from router.workers.breaker import NOTHING_SHUT, Shut

SMALL = 32
"""Workers of a role, all of which are looked at; of more, so many are when something speaks against each of them."""

_FIRST = 2
"""Prefill workers of a row that are looked at."""

_ASKED = 6
"""Decode workers that are asked for a reservation."""

_HOLDERS = 6
"""Of the workers that hold the same, so many are looked at."""


def servable(fleet: Fleet, *, decodes: bool) -> bool:
    """Whether some worker, or some pair, could serve a request at all, now or later."""
    return any(not decodes or fleet.rows_after(row.kind) for row in fleet.prefill.rows)


def matching_decodes(fleet: Fleet) -> frozenset[str]:
    """Names of all decode workers that some prefill worker can hand KV to."""
    return frozenset(decode.name for decode in _decodes(fleet))


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
    if not fleet.seats(prefill_limit):
        return None
    look = _Look(fleet, demand, prefill_limit, shut, held)
    few = look.prefills()
    choice = look.best(few)
    if choice is None and few and len(fleet.prefill) > SMALL:
        choice = look.best(look.every_prefill())
    if choice is not None or look.may_wait():
        return choice
    against = Against.of(demand, shut)
    return exhaustive.choose(
        _least(_prefills(fleet, demand), lambda view: (against.worker(view.name), view.burden)),
        _least(_decodes(fleet), lambda view: (against.worker(view.name), decode_cost(view, demand))),
        demand,
        prefill_limit=prefill_limit,
        usual_rate=fleet.usual_rate,
        shut=shut,
        held=held,
    )


def quietest(fleet: Fleet, demand: Demand, shut: Shut = NOTHING_SHUT) -> tuple[Choice, bool] | None:
    """The pair to be kept for a request that runs alone, and whether nothing of ours runs there now.

    None when there is no pair at all.
    """
    against = Against.of(demand, shut)

    def busy(view: PrefillView | DecodeView) -> tuple[int, int, str]:
        return against.worker(view.name), view.own_requests, view.name

    prefills = _least((view for view in _prefills(fleet, demand) if view.name not in demand.never), busy)
    if not demand.decodes:
        return (Choice(prefills[0].name), prefills[0].own_requests == 0) if prefills else None
    decodes = _least((view for view in _decodes(fleet) if view.name not in demand.never), busy)
    pairs = [
        (against.pair(prefill.name, decode.name), prefill.own_requests + decode.own_requests, prefill.name, decode.name)
        for prefill in prefills
        for decode in decodes
        if pairable(prefill.kv_format, decode.kv_format, converts=decode.converts_kv)
    ]
    if not pairs:
        return None
    _, requests, prefill_name, decode_name = min(pairs)
    return Choice(prefill_name, (decode_name,)), requests == 0


class _Look:
    """One choice among what nothing speaks against: the candidates of either role."""

    def __init__(self, fleet: Fleet, demand: Demand, limit: int, shut: Shut, held: frozenset[str]) -> None:
        self._fleet, self._demand, self._limit = fleet, demand, limit
        self._out = held | demand.never | demand.avoid | shut.workers
        self._pairs = demand.avoid_pairs | shut.pairs
        self._decodes: dict[int, list[str]] = {}

    def prefills(self) -> list[PrefillView]:
        """Those with a seat that can be the best."""
        workers, demand = self._fleet.prefill, self._demand
        return _candidates(workers, workers.rows, demand.held, demand.number, _FIRST, self._free)

    def every_prefill(self) -> list[PrefillView]:
        """All with a seat."""
        return list(filter(self._free, self._fleet.prefill.open))

    def best(self, prefills: Collection[PrefillView]) -> Choice | None:
        """The first of them to be done that has decode workers to follow."""
        demand, usual = self._demand, self._fleet.usual_rate
        for *_, name in sorted(prefill_cost(view, demand, usual) for view in prefills):
            if not demand.decodes:
                return Choice(name)
            if decodes := self._after(name):
                return Choice(name, decodes)
        return None

    def may_wait(self) -> bool:
        """Whether some prefill worker has decode workers to follow, and only lacks a seat."""
        return any(
            not self._demand.decodes or self._after(view.name)
            for row in self._fleet.prefill.rows
            for view in row
            if view.name not in self._out
        )

    def _free(self, view: PrefillView) -> bool:
        return view.own_requests < self._limit and view.name not in self._out

    def _after(self, prefill: str) -> tuple[str, ...]:
        """Decode workers that may follow, best first."""
        kind = self._fleet.prefill.kind(prefill)
        if kind[0] not in self._decodes:
            rows = self._fleet.rows_after(kind)
            workers, demand, out = self._fleet.decode, self._demand, self._out
            # As many more as pairs are spoken against, so that these can't leave a worker without any.
            first = _ASKED + len(self._pairs)
            found = _candidates(workers, rows, demand.pinnable, demand.number, first, lambda view: view.name not in out)
            self._decodes[kind[0]] = [name for *_, name in sorted(decode_cost(view, demand) for view in found)]
        names = self._decodes[kind[0]]
        if self._pairs:
            names = [name for name in names if (prefill, name) not in self._pairs]
        return tuple(names if len(self._fleet.decode) <= SMALL else names[:_ASKED])


def _candidates(
    workers: Workers[V], rows: Iterable[Row[V]], hits: Hits, number: int, first: int, fits: Callable[[V], bool]
) -> list[V]:
    """All that fit in a small fleet; else the first of each row, and holders of prefixes."""
    if len(workers) <= SMALL:
        return [view for row in rows for view in row if fits(view)]
    found = {view.name: view for row in rows for view in islice(filter(fits, row), first)}
    kinds = {row.kind for row in rows}
    for _, names in hits.levels:
        # Where many hold the same, each request looks at others of them, so that none is everybody's favourite.
        start = number % (len(names) - _HOLDERS + 1) if len(names) > _HOLDERS else 0
        for name in islice(names, start, start + _HOLDERS):
            view = workers.get(name)
            if view is not None and workers.kind(name) in kinds and fits(view):
                found[name] = view
        if len(names) > _HOLDERS:
            break
    return list(found.values())


def _prefills(fleet: Fleet, demand: Demand) -> Iterable[PrefillView]:
    """All that take work, and have decode workers to follow if there is something to decode."""
    return (view for row in fleet.prefill.rows if not demand.decodes or fleet.rows_after(row.kind) for view in row)


def _decodes(fleet: Fleet) -> Iterable[DecodeView]:
    """All that some prefill worker can hand KV to."""
    rows = {row.kind: row for prefill in fleet.prefill.rows for row in fleet.rows_after(prefill.kind)}
    return (view for row in rows.values() for view in row)


def _least(views: Iterable[V], cost: Callable[[V], tuple[Any, ...]]) -> list[V]:
    """The SMALL of least cost."""
    return heapq.nsmallest(SMALL, views, key=cost)
