"""The prefix cache: KV of full blocks, found again by the digests of `baton.kv.hashing`.

    lookup(digests) → how many leading blocks are there
    fetch(digests)  → their payloads, up to the first that is gone
    put(digest, payload) → at once; stored later, or dropped

A payload is the canonical KV of one block (`baton.kv.prefix.block`). A cache never fails: whatever goes wrong
inside is a miss or a dropped write, counted by reason in `metrics.PREFIX_FAULTS`. A block may go between
look-up and fetch; that only shortens the hit.

Implementations: `NullPrefixCache`, `MemoryPrefixCache` (a dictionary, the measure for the others) and
`RedisPrefixCache`; one contract suite runs over all that store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Payload: TypeAlias = bytes | memoryview


class PrefixCache(Protocol):
    """KV blocks by digest; used from one asyncio loop."""

    @property
    def stores(self) -> bool:
        """Whether anything put here can ever be found again; if not, callers spare themselves the work."""

    async def check(self) -> None:
        """Try the store, so that the log tells now, and not at the first request, if it is out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> int:
        """Length of the longest run of leading digests whose blocks are there."""

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads of the leading digests, up to the first miss; callers bound how many."""

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Take a block for storing; False if it was dropped: the rest of its chain is then useless."""

    async def flush(self) -> None:
        """Wait until what was put is stored or dropped."""

    async def close(self) -> None:
        """Store what is pending if that is quickly done, and let go of all resources."""
