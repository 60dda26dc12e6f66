"""The trivial prefix caches: none at all, and a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from baton.kv.prefix.contract import Payload


class NullPrefixCache:
    """Finds nothing and keeps nothing."""

    @property
    def stores(self) -> bool:
        """False."""
        return False

    async def check(self) -> None:
        """Nothing can be out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> int:
        """0."""
        return 0

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Nothing."""
        return []

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Drop the block."""
        return False

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Nothing is ever held."""


class MemoryPrefixCache:
    """A dictionary, unbounded: for tests, and as the measure of what the others must do."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Payload] = {}

    @property
    def stores(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """Nothing can be out of reach."""

    async def lookup(self, digests: Sequence[bytes]) -> int:
        """Length of the longest run of leading hits."""
        return sum(1 for _ in takewhile(self.blocks.__contains__, digests))

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss."""
        return [self.blocks[digest] for digest in takewhile(self.blocks.__contains__, digests)]

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Keep the block."""
        self.blocks[digest] = payload
        return True

    async def flush(self) -> None:
        """Nothing is ever pending."""

    async def close(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
