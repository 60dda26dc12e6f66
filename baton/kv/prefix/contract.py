"""The prefix cache: KV of full blocks, found by the digests of `baton.kv.hashing`.

    lookup(digests)        → how many leading blocks are cached, and in which tiers
    fetch(digests)         → their payloads, up to the first one that is gone
    select_writes(digests) → which blocks to put; counts that each of them was seen once more
    put(digest, payload)   → returns at once; the block is stored later, or dropped
    save(digests, payloads) → returns when the blocks of a long prompt are stored where other workers find them

A payload is the canonical KV of one block (`baton.kv.format`). A cache never raises: every fault is a miss or a dropped
write, counted by reason in `metrics.PREFIX_FAULTS`. If a block is evicted between look-up and fetch, the hit becomes
shorter, and nothing else happens.

Implementations: `HostPrefixCache` (bounded, in this process), `RedisPrefixCache`, and `TieredPrefixCache` of several.
One contract suite tests all of them, beside a dictionary as their reference. A worker's tiers are put in their order in
`baton.worker.prefix_cache`. The pages of an engine are a tier of their own, without copies: `Engine.publish` and
`Engine.reserve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.ledger import CacheTier

Payload: TypeAlias = bytes | memoryview
"""The KV of a block, which nobody changes. A view keeps no more memory alive than the block's stored record."""

BlocksChanged: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes]], object]
"""Called with the digests of stored blocks and of dropped blocks."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Leading blocks that were found: consecutive runs of (tier, number of blocks)."""

    runs: tuple[tuple[str, int], ...] = ()

    @property
    def blocks(self) -> int:
        """Number of blocks in all runs."""
        return sum(blocks for _, blocks in self.runs)


@dataclass(frozen=True, slots=True)
class FetchRate:
    """The measured speed of fetches from a tier: seconds to the first byte, then bytes per second."""

    latency_s: float
    bytes_per_s: float


class PrefixCache:
    """KV blocks by digest; used from one asyncio loop. This base class finds nothing and stores nothing."""

    @property
    def enabled(self) -> bool:
        """Whether a block that is put here can be found again; if not, callers need not put any."""
        return False

    @property
    def local_tiers(self) -> frozenset[str]:
        """Names of the tiers whose blocks only this worker finds; the other tiers are shared."""
        return frozenset()

    async def check(self) -> None:
        """Try to reach the store, so that an unreachable one is logged now, and not at the first request."""

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading digests whose blocks are cached."""
        return Hits()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests, up to the first miss; callers limit the number of digests."""
        return []

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Whether each block should be put: it is not known to be stored, and was seen often enough.

        Call it once for each request, when its KV is final, with its whole chain from the first block on. It counts how
        often each block was seen, and marks the chain as used, so that its end is evicted before its beginning. The
        first `hits` blocks were hits (in pages, here, or at a peer): only a store that workers share wants these.
        """
        return [False] * len(digests)

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Store a block, now or later; False if it was dropped, and then the later blocks of its chain need not be
        put.
        """
        return False

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Whether `save` should get each block of a long prompt: the shared store is not known to have it.

        The first `hits` blocks were hits. The store is asked about them, because it may have lost blocks that are used
        here. The blocks do not count as seen. Returns an empty list if no other worker could find saved blocks.
        """
        return []

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Store the blocks in the shared store alone, however often they were seen; returns when this is done.

        Returns the number of leading blocks that are stored: 0 at once while the store can't be reached. A call takes
        no longer than the store's time budget. Callers limit the number of blocks.
        """
        return 0

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Remove saved blocks from the shared store, if it can be reached: their KV may be wrong."""

    def touch(self, digests: Sequence[bytes]) -> None:
        """Record that these blocks were used without a look-up here, for example as hits in the engine's pages.

        Renews their expiry in shared stores: in the background, and only for a sample of the calls.
        """

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """The measured fetch rates by tier, without tiers from which nothing was fetched yet."""
        return {}

    def watch(self, changed: BlocksChanged | None) -> None:
        """Call `changed(stored, dropped)` for the blocks in this process; None ends this.

        Blocks that are cached already are reported at once. `changed` must be quick and must not raise.
        """

    async def stats(self) -> list[CacheTier]:
        """The tiers, nearest first. Returns within a limited time."""
        return []

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks in this process, and if `shared` those of this KV format in shared stores.

        Returns the tiers that were cleared, with the blocks and bytes dropped.
        """
        return []

    async def flush(self) -> None:
        """Wait until all blocks that were put are stored or dropped."""

    async def close(self) -> None:
        """Store pending blocks if that takes little time, and release all resources."""
