"""Where prefixes are: an index for each role, fed by what workers report and by what this router sends them.

Several routers know nothing of each other, and need not: what one of them has sent a worker, the worker reports to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.cache_report import CacheTier
from baton.telemetry.metrics import INDEX_BLOCKS
from baton.worker.status import PrefixChange, WorkerRole
from router.placement.block_hasher import BlockNamespace, Digests
from router.placement.prefix_index import NO_MATCH, PrefixIndex, PrefixMatch

_MORE_BLOCKS = 16
"""Digests sent to a decode worker beyond those that it is thought to hold: reports are late, and may be coarse."""


class PrefixDirectory:
    """The indexes of a router, one for each role."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._indexes = {role: PrefixIndex() for role in WorkerRole}
        self._hits = self._misses = 0

    def update(self, role: WorkerRole, worker: str, change: PrefixChange) -> None:
        """Take a worker's report."""
        index = self._indexes[role]
        index.update(worker, reset=change.reset, stored=change.stored, dropped=change.dropped)
        INDEX_BLOCKS.labels(role.value).set(len(index))

    def forget(self, role: WorkerRole, worker: str) -> None:
        """A worker is lost, and all that it held."""
        self._indexes[role].forget(worker)
        INDEX_BLOCKS.labels(role.value).set(len(self._indexes[role]))

    def match_prefix(self, role: WorkerRole, digests: Digests) -> PrefixMatch:
        """Which workers hold how much of a context; valid until the next report."""
        now, index = self._clock(), self._indexes[role]
        matches = [index.match(chain, namespace.block_size, now) for namespace, chain in digests.items()]
        if len(matches) <= 1:
            return matches[0] if matches else NO_MATCH
        return PrefixMatch(sorted((level for each in matches for level in each.levels), key=lambda level: -level[0]))

    def dispatch(self, worker: str, digests: Digests, cached_tokens: int, *, writes: bool) -> None:
        """A prompt goes to a prefill worker that is thought to hold some of it, and keeps the rest if it `writes`."""
        for namespace, chain in digests.items():
            found = min(cached_tokens // namespace.block_size, len(chain))
            self._hits += found
            self._misses += len(chain) - found
            if writes:
                self._indexes[WorkerRole.PREFILL].expect(worker, chain, self._clock(), found)

    def digests_to_pin(self, worker: str, namespace: BlockNamespace | None, digests: Digests) -> bytes:
        """Digests to send to a decode worker, one after the other: of what it is thought to hold, and some more."""
        if namespace is None or not (chain := digests.get(namespace)):
            return b""
        match = self._indexes[WorkerRole.DECODE].match(chain, namespace.block_size, self._clock())
        tokens = match.tokens(worker)
        return b"".join(chain[: tokens // namespace.block_size + _MORE_BLOCKS]) if tokens else b""

    async def tiers(self) -> list[CacheTier]:
        """The indexes as a tier of a cache: blocks by worker that holds them, and how many were found at dispatch."""
        blocks = sum(map(len, self._indexes.values()))
        coarsest = max(index.granularity for index in self._indexes.values())
        state = "" if coarsest == 1 else f"knows one block in {coarsest}"
        return [CacheTier("index", blocks=blocks, hits=self._hits, misses=self._misses, state=state)]
