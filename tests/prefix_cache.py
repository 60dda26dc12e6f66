"""The simplest prefix cache that stores: a dictionary."""

from collections.abc import Sequence
from itertools import takewhile

from baton.kv.prefix.contract import BlocksChanged, Hits, Payload, PrefixCache
from baton.kv.prefix.host import HOST
from baton.ledger import CacheTier


class MemoryPrefixCache(PrefixCache):
    """An unbounded dictionary: the reference for the other caches."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Payload] = {}
        self._hits = self._misses = 0
        self._changed: BlocksChanged | None = None

    @property
    def enabled(self) -> bool:
        return True

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        found = sum(1 for _ in takewhile(self.blocks.__contains__, digests))
        self._hits += found
        self._misses += len(digests) - found
        return Hits(((HOST, found),) if found else ())

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        return [self.blocks[digest] for digest in takewhile(self.blocks.__contains__, digests)]

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        return [index >= hits and digest not in self.blocks for index, digest in enumerate(digests)]

    def put(self, digest: bytes, payload: Payload) -> bool:
        news = digest not in self.blocks
        self.blocks[digest] = payload
        if news and self._changed is not None:
            self._changed((digest,), ())
        return True

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        return [digest not in self.blocks for digest in digests]

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        return sum(self.put(digest, payload) for digest, payload in zip(digests, payloads, strict=True))

    async def remove(self, digests: Sequence[bytes]) -> None:
        dropped = [digest for digest in digests if self.blocks.pop(digest, None) is not None]
        if dropped and self._changed is not None:
            self._changed((), dropped)

    def watch(self, changed: BlocksChanged | None) -> None:
        self._changed = changed
        if changed is not None and self.blocks:
            changed(tuple(self.blocks), ())

    async def stats(self) -> list[CacheTier]:
        held = sum(len(payload) for payload in self.blocks.values())
        return [CacheTier(HOST, len(self.blocks), held, hits=self._hits, misses=self._misses)]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        held, self.blocks = self.blocks, {}
        if held and self._changed is not None:
            self._changed((), tuple(held))
        return [CacheTier(HOST, len(held), sum(len(payload) for payload in held.values()))]

    async def close(self) -> None:
        self.blocks.clear()
