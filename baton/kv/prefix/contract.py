"""The prefix cache: KV of full blocks, found again by the digests of `baton.kv.hashing`.

    lookup(digests) → how many leading blocks are there, and in which tiers
    fetch(digests)  → their payloads, up to the first that is gone
    wants(digests)  → which of them are worth a put; counts as one sighting of each
    put(digest, payload) → at once; stored later, or dropped

A payload is the canonical KV of one block (`baton.kv.format`). A cache never fails: whatever goes wrong
inside is a miss or a dropped write, counted by reason in `metrics.PREFIX_FAULTS`. A block may go between
look-up and fetch; that only shortens the hit.

Implementations: `NullPrefixCache`, `MemoryPrefixCache` (a dictionary, the measure for the others), `HostPrefixCache`
(bounded, in this process), `RedisPrefixCache` and `TieredPrefixCache`; one contract suite runs over all that store.
The pages of an engine are a tier of their own, without copies: `Engine.publish` and `Engine.reserve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from baton.cache_report import CacheTier as CacheTier

Payload: TypeAlias = bytes | memoryview

PrefixesChanged: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes]], object]
"""Gets the digests of blocks that are held now, and of those that are no longer."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Leading blocks that were found: runs of (tier, blocks), one after the other."""

    runs: tuple[tuple[str, int], ...] = ()

    @property
    def blocks(self) -> int:
        """All of them."""
        return sum(blocks for _, blocks in self.runs)


@dataclass(frozen=True, slots=True)
class FetchRate:
    """What fetching from a tier was measured to take: seconds to the first byte, then bytes per second."""

    latency_s: float
    bytes_per_s: float


class PrefixCache(Protocol):
    """KV blocks by digest; used from one asyncio loop."""

    @property
    def stores(self) -> bool:
        """Whether anything put here can ever be found again; if not, callers spare themselves the work."""

    async def check(self) -> None:
        """Try the store, so that the log tells now, and not at the first request, if it is out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading digests whose blocks are there."""

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests, up to the first miss; callers bound how many."""

    def wants(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Whether each block is worth a put: it is not known to be there, and was seen often enough.

        Asked once a request, when its KV is final, with its whole chain from the first block on: that counts its
        sightings, and a bounded cache evicts the end of a chain before its beginning. The first `hits` blocks were
        not computed but found (in pages, here, at a peer): those are wanted only for stores that others share.
        """

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Take a block for storing; False if it was dropped: the rest of its chain is then useless."""

    def touch(self, digests: Sequence[bytes]) -> None:
        """These blocks were used without a look-up here, as hits in the engine's pages are.

        Keeps them from going stale in shared stores: in the background, and only for a sample of the calls.
        """

    def rates(self) -> Mapping[str, FetchRate]:
        """What fetching takes, by tier; tiers from which nothing was fetched yet lack."""

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Call `changed(stored, dropped)` for the blocks held in this process; None ends it. Quick, must not raise.

        Blocks that are there already are told at once.
        """

    async def stats(self) -> list[CacheTier]:
        """The tiers, nearest first; bounded in time."""

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks held in this process, and those of this KV format in shared stores if asked to.

        Returns the tiers that were cleared, with the blocks and bytes dropped.
        """

    async def flush(self) -> None:
        """Wait until what was put is stored or dropped."""

    async def close(self) -> None:
        """Store what is pending if that is quickly done, and let go of all resources."""
