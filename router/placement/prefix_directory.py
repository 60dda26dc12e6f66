"""Where prefixes are: one index for each role, fed by what workers tell and by what this router sends them.

Several routers know nothing of each other, and need not: what one of them has sent a worker, the worker tells all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from baton.cache_report import CacheTier
from baton.telemetry.metrics import INDEX_BLOCKS
from baton.worker.status import PrefixChange, WorkerRole
from router.placement.chains import Digests, Form
from router.placement.demand import NO_HITS, Hits
from router.placement.prefix_index import PrefixIndex

_MORE_BLOCKS = 16
"""Digests sent to a decode worker beyond those that it is thought to hold: news is late, and may be coarse."""


class Whereabouts:
    """The indexes of a router; lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._indexes = {role: PrefixIndex() for role in WorkerRole}
        self._hits = self._misses = 0

    def told(self, role: WorkerRole, worker: str, news: PrefixChange | None) -> None:
        """Take a worker's news; None: it is lost."""
        index = self._indexes[role]
        if news is None:
            index.forget(worker)
        else:
            index.told(worker, reset=news.reset, stored=news.stored, dropped=news.dropped)
        INDEX_BLOCKS.labels(role.value).set(len(index))

    def find(self, role: WorkerRole, digests: Digests) -> Hits:
        """Who holds how much of a context; valid until the next news."""
        now, index = self._clock(), self._indexes[role]
        found = [index.find(chain, form.block_size, now) for form, chain in digests.items()]
        if not found:
            return NO_HITS
        return found[0] if len(found) == 1 else _Either(found)

    def sent(self, worker: str, digests: Digests, cached_tokens: int, *, stays: bool) -> None:
        """A prompt was sent to a prefill worker thought to hold some of it, where it stays unless told not to."""
        for form, chain in digests.items():
            found = min(cached_tokens // form.block_size, len(chain))
            self._hits += found
            self._misses += len(chain) - found
            if stays:
                self._indexes[WorkerRole.PREFILL].expect(worker, chain, self._clock(), found)

    def pinnable(self, worker: str, form: Form | None, digests: Digests) -> bytes:
        """Digests to send to a decode worker, one after the other: of what it is thought to hold, and some more."""
        if form is None or not (chain := digests.get(form)):
            return b""
        tokens = self._indexes[WorkerRole.DECODE].find(chain, form.block_size, self._clock()).tokens(worker)
        return b"".join(chain[: tokens // form.block_size + _MORE_BLOCKS]) if tokens else b""

    async def tiers(self) -> list[CacheTier]:
        """The indexes as a tier of a cache: blocks by worker that holds them, and how many were found at dispatch."""
        blocks = sum(map(len, self._indexes.values()))
        coarsest = max(index.granularity for index in self._indexes.values())
        state = "" if coarsest == 1 else f"knows one block in {coarsest}"
        return [CacheTier("index", blocks=blocks, hits=self._hits, misses=self._misses, state=state)]


@dataclass(frozen=True, slots=True)
class _Either:
    """Hits of workers that name their blocks in different ways."""

    all: Sequence[Hits]

    @property
    def levels(self) -> Sequence[tuple[int, Collection[str]]]:
        """Tokens and holders, the most first."""
        return sorted((level for hits in self.all for level in hits.levels), key=lambda level: -level[0])

    def tokens(self, worker: str) -> int:
        """Leading tokens that the worker holds."""
        return max(hits.tokens(worker) for hits in self.all)
