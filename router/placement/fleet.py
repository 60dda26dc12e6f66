"""The workers as placement knows them. Pure.

A view is what is known of one worker at a moment; the next one replaces it. Workers with the same KV format form a
group, so that placement asks once for two groups, and not for each pair of workers, whether KV can be handed over.
Workers that drain are in no group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from baton.kv.format import KvFormat

RECENT_FRACTION = 1 / 10
"""The weight of a token of the recent past against one that waits."""

RECENT_S = 60.0
"""Time in which the recent past fades to 1/e."""


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
    load_tokens: float = field(init=False)
    """Tokens to be computed before a new prompt's, and a share of those that were.

    A worker that has had more to do than others will be asked for more again, and has evicted more for it. The share
    lets that weigh as much as a short queue, so that a prefix which draws requests all the time gets a second holder.
    """

    def __post_init__(self) -> None:
        # The worker's report includes ours once it knows of them, so the larger of the two counts nothing twice.
        load = max(self.pending_tokens, self.own_tokens) + RECENT_FRACTION * self.recent_tokens
        # Once a view and not once a placement, of which each looks at all views.
        object.__setattr__(self, "load_tokens", load)


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


V = TypeVar("V", PrefillView, DecodeView)
Group = dict[str, V]
"""Workers with the same KV format, by name."""


def can_pair(prefill: KvFormat, decode: KvFormat, *, converts: bool) -> bool:
    """Whether KV of one format can be handed to a worker of the other."""
    return prefill == decode or (converts and decode.can_convert_from(prefill))


class FleetView:
    """All workers that were not refused, as they are now; those that drain included."""

    def __init__(self, prefill: Iterable[PrefillView] = (), decode: Iterable[DecodeView] = ()) -> None:
        self.prefill: dict[str, PrefillView] = {}
        self.decode: dict[str, DecodeView] = {}
        self.isolated: frozenset[str] = frozenset()
        """Workers of a request that runs alone; no other is placed there."""
        self._prefill_groups: dict[KvFormat, Group[PrefillView]] = {}
        self._decode_groups: dict[tuple[KvFormat, bool], Group[DecodeView]] = {}
        self._pairs: list[tuple[Collection[PrefillView], list[Collection[DecodeView]]]] | None = None
        for prefill_view in prefill:
            self.put_prefill(prefill_view)
        for decode_view in decode:
            self.put_decode(decode_view)

    def __contains__(self, name: object) -> bool:
        return name in self.prefill or name in self.decode

    @property
    def usual_rate(self) -> float:
        """Mean of the known rates of prefill workers, in tokens per second; 1 while there is none."""
        rates = [view.rate for view in self.prefill.values() if view.rate > 0]
        return sum(rates) / len(rates) if rates else 1.0

    @property
    def pairs(self) -> list[tuple[Collection[PrefillView], list[Collection[DecodeView]]]]:
        """Groups of prefill workers, each with the groups of decode workers that can take over their KV."""
        if self._pairs is None:
            self._pairs = [
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
        return self._pairs

    def followers(self, prefill: PrefillView) -> list[DecodeView]:
        """Decode workers that can take over the KV of a prefill worker."""
        return [
            view
            for (theirs, converts), decodes in self._decode_groups.items()
            if can_pair(prefill.kv_format, theirs, converts=converts)
            for view in decodes.values()
        ]

    def has_capacity(self, limit: int) -> bool:
        """Whether some prefill worker has fewer than `limit` of our requests."""
        return any(view.own_requests < limit for view in self.prefill.values())

    def put_prefill(self, view: PrefillView) -> None:
        """Take a new view of a prefill worker."""
        old = self.prefill.get(view.name)
        if old is not None and (old.kv_format != view.kv_format or old.draining != view.draining):
            self.remove_prefill(view.name)
        self.prefill[view.name] = view
        if not view.draining:
            if (group := self._prefill_groups.get(view.kv_format)) is None:
                group, self._pairs = self._prefill_groups.setdefault(view.kv_format, {}), None
            group[view.name] = view

    def put_decode(self, view: DecodeView) -> None:
        """Take a new view of a decode worker."""
        old, kind = self.decode.get(view.name), (view.kv_format, view.converts_kv)
        if old is not None and ((old.kv_format, old.converts_kv) != kind or old.draining != view.draining):
            self.remove_decode(view.name)
        self.decode[view.name] = view
        if not view.draining:
            if (group := self._decode_groups.get(kind)) is None:
                group, self._pairs = self._decode_groups.setdefault(kind, {}), None
            group[view.name] = view

    def remove_prefill(self, name: str) -> None:
        """Forget a prefill worker."""
        view = self.prefill.pop(name, None)
        if view is not None and not view.draining:
            group = self._prefill_groups[view.kv_format]
            del group[name]
            if not group:
                del self._prefill_groups[view.kv_format]
                self._pairs = None

    def remove_decode(self, name: str) -> None:
        """Forget a decode worker."""
        view = self.decode.pop(name, None)
        if view is not None and not view.draining:
            group = self._decode_groups[view.kv_format, view.converts_kv]
            del group[name]
            if not group:
                del self._decode_groups[view.kv_format, view.converts_kv]
                self._pairs = None
