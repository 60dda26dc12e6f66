"""The trivial prefix caches: none at all, and a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from baton.kv.prefix.contract import CacheTier, FetchRate, Hits, Payload, PrefixesChanged

TIER = "host"


class NullPrefixCache:
    """Finds nothing and keeps nothing."""

    @property
    def enabled(self) -> bool:
        """False."""
        return False

    async def check(self) -> None:
        """Nothing can be out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """No hits."""
        return Hits()

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Nothing."""
        return []

    def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Nothing."""
        return [False] * len(digests)

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Drop the block."""
        return False

    def touch(self, digests: Sequence[bytes]) -> None:
        """Nothing can go stale."""

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """Nothing is ever fetched."""
        return {}

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Nothing ever changes."""

    async def stats(self) -> list[CacheTier]:
        """No tiers."""
        return []

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Nothing is ever dropped."""
        return []

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing is ever held."""


class MemoryPrefixCache:
    """A dictionary, unbounded: for tests, and as the reference for the other caches."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Payload] = {}
        self._hits = self._misses = 0
        self._changed: PrefixesChanged | None = None

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """Nothing can be out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading hits."""
        found = sum(1 for _ in takewhile(self.blocks.__contains__, digests))
        self._hits += found
        self._misses += len(digests) - found
        return Hits(((TIER, found),) if found else ())

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss."""
        return [self.blocks[digest] for digest in takewhile(self.blocks.__contains__, digests)]

    def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Whatever is not there, unless it was a hit nearer by."""
        return [index >= hits and digest not in self.blocks for index, digest in enumerate(digests)]

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Keep the block."""
        news = digest not in self.blocks
        self.blocks[digest] = payload
        if news and self._changed is not None:
            self._changed((digest,), ())
        return True

    def touch(self, digests: Sequence[bytes]) -> None:
        """Nothing goes stale."""

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """Nothing is measured."""
        return {}

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Tell of each block."""
        self._changed = changed
        if changed is not None and self.blocks:
            changed(tuple(self.blocks), ())

    async def stats(self) -> list[CacheTier]:
        """The one tier."""
        held = sum(len(payload) for payload in self.blocks.values())
        return [CacheTier(TIER, len(self.blocks), held, hits=self._hits, misses=self._misses)]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Forget all blocks."""
        held, self.blocks = self.blocks, {}
        if held and self._changed is not None:
            self._changed((), tuple(held))
        return [CacheTier(TIER, len(held), sum(len(payload) for payload in held.values()))]

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
