"""The workers as placement knows them, kept in order from news to news, so that a choice need not look at all. Pure.

A view is what is known of one worker at a moment; `Fleet.put` replaces it. Workers of a role stand in one row for each
kind. Prefill workers are of one kind if they have the same KV format and about the same rate: within a kind the one
with the shortest wait is then the best for any prompt, but for prefixes. Decode workers are of one kind if the same
prefill workers can hand KV to them; the one with most room comes first. Workers that drain stand in no row.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.kv.format import KvFormat

RECENT_SHARE = 1 / 10
"""What a token of the recent past weighs against one that waits."""

RECENT_S = 60.0
"""Time in which the recent past fades to 1/e."""

_RATES_PER_DOUBLING = 2
"""Rates of a kind differ by a factor of at most 2 ** (1 / this)."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker: what it reports, and what this router has given it.

    `own_tokens` are those that this router's requests there have to compute, `recent_tokens` those that they had to,
    with a weight that fades with time; `rate` is in tokens per second, 0 while unknown.
    """

    name: str
    kv_format: KvFormat
    draining: bool = False
    pending_tokens: int = 0
    rate: float = 0.0
    own_requests: int = 0
    own_tokens: int = 0
    dispatched: int = 0
    recent_tokens: float = 0.0
    incarnation: str = ""

    @property
    def burden(self) -> float:
        """Tokens to be computed before a new prompt's, and a share of those that were.

        Whoever has had more to do than others will be asked for more again, and has evicted more for it. The share lets
        that weigh as much as a short line, so that a prefix which draws requests day and night gets a second holder.
        """
        # What the worker reports includes ours once it knows of them, so the larger of the two counts nothing twice.
        return max(self.pending_tokens, self.own_tokens) + RECENT_SHARE * self.recent_tokens


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
    incarnation: str = ""


V = TypeVar("V", bound=PrefillView | DecodeView)
Kind = tuple[int, int | None]
"""Number of the KV format, and a number of the role's own."""


def pairable(prefill: KvFormat, decode: KvFormat, *, converts: bool) -> bool:
    """Whether KV of one format can be handed to a worker of the other."""
    return prefill == decode or (converts and decode.convertible_from(prefill))


class Fading:
    """A sum whose parts fade to 1/e in `time_s`; times are seconds on the caller's clock."""

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self._sum = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """A new part."""
        self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        """The sum at a time that is not before the last addition."""
        return self._sum * math.exp((self._at - now) / self._time_s)


class Row(Generic[V]):
    """Workers of one kind in the order of their ranks."""

    def __init__(self, kind: Kind, first: V, views: dict[str, V]) -> None:
        self.kind = kind
        self.first = first
        """One of this kind, whatever has become of it."""
        self._views = views
        self._ranks: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[V]:
        return (self._views[rank[-1]] for rank in self._ranks)

    def add(self, rank: tuple[Any, ...]) -> None:
        """Take the worker whose name is the last part of the rank."""
        insort(self._ranks, rank)

    def remove(self, rank: tuple[Any, ...]) -> None:
        """Give it up."""
        del self._ranks[bisect_left(self._ranks, rank)]


class Workers(Generic[V]):
    """The workers of one role: by name, and in rows. Iterates over all, those that drain included."""

    def __init__(self, kind: Callable[[V], Kind], rank: Callable[[V], tuple[Any, ...]]) -> None:
        self._kind, self._rank = kind, rank
        self._views: dict[str, V] = {}
        self._places: dict[str, tuple[Kind, tuple[Any, ...]]] = {}
        self._rows: dict[Kind, Row[V]] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[V]:
        return iter(self._views.values())

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def get(self, name: str) -> V | None:
        """The worker of that name, if it is there and takes work."""
        return self._views[name] if name in self._places else None

    @property
    def rows(self) -> Iterable[Row[V]]:
        """Those that take work, by kind."""
        return self._rows.values()

    def kind(self, name: str) -> Kind:
        """The kind of a worker that takes work."""
        return self._places[name][0]

    def row(self, kind: Kind) -> Row[V] | None:
        """Those of a kind."""
        return self._rows.get(kind)

    @property
    def open(self) -> list[V]:
        """All that take work."""
        return [view for row in self._rows.values() for view in row]

    def put(self, view: V) -> V | None:
        """Take a new view; returns the one before."""
        old = self._views.get(view.name)
        self._views[view.name] = view
        place = None if view.draining else (self._kind(view), (*self._rank(view), view.name))
        if place != self._places.get(view.name):
            self._leave(view.name)
            if place is not None:
                self._places[view.name] = place
                if place[0] not in self._rows:
                    self._rows[place[0]] = Row(place[0], view, self._views)
                self._rows[place[0]].add(place[1])
        return old

    def remove(self, name: str) -> V | None:
        """Forget a worker; returns its last view."""
        self._leave(name)
        return self._views.pop(name, None)

    def _leave(self, name: str) -> None:
        if (place := self._places.pop(name, None)) is not None:
            row = self._rows[place[0]]
            row.remove(place[1])
            if not row:
                del self._rows[place[0]]


class Fleet:
    """All workers that were not refused, as they are now."""

    def __init__(self, prefill: Iterable[PrefillView] = (), decode: Iterable[DecodeView] = ()) -> None:
        self._formats: dict[KvFormat, int] = {}
        self._pairable: dict[tuple[int, Kind], bool] = {}
        self._known = 0.0
        self._own: Counter[int] = Counter()
        self._rates = 0
        self.prefill: Workers[PrefillView] = Workers(self._prefill_kind, _prefill_rank)
        self.decode: Workers[DecodeView] = Workers(self._decode_kind, _decode_rank)
        for prefill_view in prefill:
            self.put_prefill(prefill_view)
        for decode_view in decode:
            self.put_decode(decode_view)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.prefill or name in self.decode)

    @property
    def usual_rate(self) -> float:
        """Mean of the known rates of prefill workers, in tokens per second; 1 while there is none."""
        return self._known / self._rates if self._rates else 1.0

    def seats(self, limit: int) -> bool:
        """Whether some prefill worker has fewer than `limit` of our requests."""
        return any(count < limit for count, workers in self._own.items() if workers)

    def put_prefill(self, view: PrefillView) -> None:
        """Take a new view of a prefill worker."""
        self._count(self.prefill.put(view), view)

    def put_decode(self, view: DecodeView) -> None:
        """Take a new view of a decode worker."""
        self.decode.put(view)

    def remove_prefill(self, name: str) -> None:
        """Forget a prefill worker."""
        self._count(self.prefill.remove(name), None)

    def remove_decode(self, name: str) -> None:
        """Forget a decode worker."""
        self.decode.remove(name)

    def rows_after(self, prefill: Kind) -> list[Row[DecodeView]]:
        """Decode workers that may follow prefill workers of a kind."""
        row = self.prefill.row(prefill)
        return [] if row is None else [decode for decode in self.decode.rows if self._pair(row, decode)]

    def _pair(self, prefill: Row[PrefillView], decode: Row[DecodeView]) -> bool:
        key = prefill.kind[0], decode.kind
        if key not in self._pairable:
            theirs = decode.first
            self._pairable[key] = pairable(prefill.first.kv_format, theirs.kv_format, converts=theirs.converts_kv)
        return self._pairable[key]

    def _count(self, old: PrefillView | None, new: PrefillView | None) -> None:
        for view, sign in ((old, -1), (new, 1)):
            if view is not None:
                self._own[view.own_requests] += sign
                self._rates += sign * (view.rate > 0)
                self._known = self._known + sign * view.rate if self._rates else 0.0

    def _format(self, kv_format: KvFormat) -> int:
        return self._formats.setdefault(kv_format, len(self._formats))

    def _prefill_kind(self, view: PrefillView) -> Kind:
        rate = round(_RATES_PER_DOUBLING * math.log2(view.rate)) if view.rate > 0 else None
        return self._format(view.kv_format), rate

    def _decode_kind(self, view: DecodeView) -> Kind:
        return self._format(view.kv_format), view.converts_kv


def _prefill_rank(view: PrefillView) -> tuple[Any, ...]:
    return view.burden / (view.rate or 1.0), view.own_requests, view.dispatched


def _decode_rank(view: DecodeView) -> tuple[Any, ...]:
    return view.free_slots <= 0, -view.free_tokens, view.own_requests
