"""A prefix cache that stores nothing, and the base of caches that no other worker sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.kv.prefix.contract import CacheTier, FetchRate, Hits, Payload, PrefixesChanged


class NullPrefixCache:
    """Finds nothing and stores nothing."""

    @property
    def enabled(self) -> bool:
        """False."""
        return False

    async def check(self) -> None:
        """Do nothing: there is no server to reach."""

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """No hits."""
        return Hits()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """No payloads."""
        return []

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """No block."""
        return [False] * len(digests)

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Drop the block."""
        return False

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Empty: no other worker finds anything here."""
        return []

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Store nothing."""
        return 0

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Do nothing: nothing was saved."""

    def touch(self, digests: Sequence[bytes]) -> None:
        """Do nothing: nothing expires."""

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """Empty: nothing is ever fetched."""
        return {}

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Do nothing: nothing ever changes."""

    async def stats(self) -> list[CacheTier]:
        """No tiers."""
        return []

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Do nothing: there is nothing to drop."""
        return []

    async def flush(self) -> None:
        """Do nothing: nothing is ever pending."""

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
