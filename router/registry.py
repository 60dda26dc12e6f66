"""What the router holds: every attempt from its birth to its end, for the ledger.

An attempt is entered before it waits and leaves when all that it held was given back, so an empty ledger means that
nothing is left of anybody.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import Lifecycle


@dataclass(slots=True)
class Live:
    """An attempt that has not ended; `detail` tells its workers in words."""

    request_id: str
    attempt: int
    tenant: str
    life: Lifecycle
    detail: str = ""

    def entry(self, now: float) -> LedgerEntry:
        """Its line in the ledger, at `now` on the event loop's clock."""
        deadline = self.life.deadline
        return LedgerEntry(
            owner=f"{self.request_id}/{self.attempt}",
            kind="request",
            state=self.life.state.value,
            age_s=now - self.life.since,
            deadline_s=None if math.isinf(deadline) else deadline - now,
            tenant=self.tenant,
            detail=self.detail,
        )


class Registry:
    """All attempts of a router that live."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._entries: dict[int, Live] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def entered(self, live: Live) -> Iterator[Live]:
        """List the attempt until the block ends."""
        self._entries[id(live)] = live
        try:
            yield live
        finally:
            del self._entries[id(live)]

    def ledger(self, now: float) -> Ledger:
        """The ledger at `now` on the event loop's clock."""
        return Ledger(self._router_id, "router", entries=tuple(live.entry(now) for live in self._entries.values()))
