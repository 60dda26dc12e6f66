"""Between prefix cache and KV pages: name a sequence's blocks, load cached ones, write new ones back.

It works beside the engine, off the asyncio loop. Blocks go in slices of SLICE_BYTES, so that a long prefix is never
whole in memory beside the pages: one slice is fetched while the one before is copied. Copies run in threads, which
can't be cancelled: a job that no longer goes on, or `stop`, ends a load after COPY_BYTES and a write-back after the
slice, and the caller keeps the handle until they have returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.contract import Engine, KvHandle
from baton.kv.hashing import block_digests, chain_root, end_digest
from baton.kv.prefix import Payload, PrefixCache
from baton.kv.prefix.end import PromptEnd
from baton.telemetry import metrics

SLICE_BYTES = 16 << 20
COPY_BYTES = 4 << 20
MOST_WRITE_BACKS = 4
LONG_TOKENS = 8192
"""From here on hashing leaves the loop; below, it takes less time than to reach another thread and come back."""


@dataclass(frozen=True, slots=True)
class EndOf:
    """The end of a sequence of `length` tokens, `hidden` being the last one's hidden state.

    Empty if the end was found: then it is not put, but counts as seen.
    """

    name: bytes
    length: int
    hidden: bytes


class Blocks:
    """The prefix blocks of one worker's sequences; lives on the asyncio loop."""

    def __init__(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine = engine
        self._format = engine.spec.kv_format
        self.size = self._format.block_size
        self._fingerprint = engine.spec.fingerprint
        self._hidden_bytes = engine.spec.hidden_bytes
        self._slice = max(1, SLICE_BYTES // self._format.block_bytes)
        self._copy = max(1, COPY_BYTES // self._format.block_bytes)
        self._cache = cache
        self._writing_back = 0
        self._stopped = False

    def stop(self) -> None:
        """Make `load` and `write_back` return soon."""
        self._stopped = True

    async def names(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """The digests of all full blocks of `ids`; at once unless there are many."""
        if len(ids) < LONG_TOKENS:
            return self.digests(ids, salt)
        return await asyncio.to_thread(self.digests, ids, salt)

    def digests(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """What `names` gives; about a microsecond for each block."""
        root = chain_root(self._fingerprint, self._format.digest, salt)
        return block_digests(root, ids, self._format.block_size)

    def end_name(self, ids: Sequence[int], digests: Sequence[bytes], salt: bytes) -> bytes:
        """The digest of the end of the sequence `ids`, whose full blocks `digests` name."""
        parent = digests[-1] if digests else chain_root(self._fingerprint, self._format.digest, salt)
        return end_digest(parent, ids[len(digests) * self._format.block_size :])

    def end_fits(self, length: int) -> bool:
        """Whether the end of a sequence of `length` tokens finds room in a block."""
        return 0 < self._hidden_bytes <= self._format.block_bytes - self._end_kv_bytes(length)

    async def fetch_end(self, name: bytes, length: int) -> PromptEnd | None:
        """The end of a sequence of `length` tokens, if the cache has it under this name."""
        payloads = await self._cache.fetch([name])
        return PromptEnd.unpack(payloads[0], self._end_kv_bytes(length), self._hidden_bytes) if payloads else None

    async def load_end(self, handle: KvHandle, end: PromptEnd, length: int) -> None:
        """Write the KV of a sequence's end into the handle's pages, as `load` does that of blocks."""
        if count := self._after_blocks(length):
            await _through(asyncio.to_thread(self._engine.write_blocks, handle, length - count, [end.kv], count))

    async def load(
        self,
        handle: KvHandle,
        digests: Sequence[bytes],
        blocks: range,
        going: Callable[[], bool],
        loaded: Callable[[int], object] = lambda _: None,
    ) -> int:
        """Write the cached `blocks` of the chain `digests` into the handle's pages, as far as they are there.

        Returns the end of what is in place, of which `loaded` is told after each slice. Returns or raises, when
        cancelled as well, only once nothing is being written any more.
        """
        at, fetching = blocks.start, self._fetch(digests, blocks)
        try:
            while fetching is not None:
                wanted = min(blocks.stop - at, self._slice)
                payloads, start = await fetching, at
                rest, fetching = range(start + len(payloads), blocks.stop), None
                if not payloads or not self._goes_on(going):
                    break
                if len(payloads) == wanted:
                    fetching = self._fetch(digests, rest)
                await _through(asyncio.to_thread(self._write, handle, start, payloads, going))
                if not self._goes_on(going):
                    break
                at = rest.start
                loaded(at)
        finally:
            if fetching is not None:
                fetching.cancel()
                await asyncio.wait({fetching})
        return at

    async def write_back(
        self,
        handle: KvHandle,
        digests: Sequence[bytes],
        first: int,
        going: Callable[[], bool],
        *,
        least: int = 0,
        end: EndOf | None = None,
    ) -> bool:
        """Put those blocks of the chain that the cache wants, and the end of it, until the cache takes no more.

        All of them are final. The first `first` blocks were not computed but found; the first `least` are others' to
        put. The caller keeps the handle meanwhile. MOST_WRITE_BACKS run at a time; the blocks of more are dropped.
        Returns whether an end was put.
        """
        if not self._cache.stores:
            return False
        wants = self._cache.wants([*digests, end.name] if end else digests, first)
        wanted = [block for block in range(least, len(digests)) if wants[block]]
        if self._writing_back >= MOST_WRITE_BACKS:
            metrics.PREFIX_BLOCKS.labels("any", "dropped").inc(len(wanted))
            return False
        self._writing_back += 1
        try:
            for blocks in _slices(wanted, self._slice):
                if not self._goes_on(going):
                    return False
                payloads = await _through(asyncio.to_thread(self._read, handle, blocks))
                for block, payload in zip(blocks, payloads, strict=True):
                    if not self._cache.put(digests[block], payload):
                        return False
            if end is None or not (end.hidden and wants[-1] and self._goes_on(going)):
                return False
            return self._cache.put(end.name, await _through(asyncio.to_thread(self._read_end, handle, end)))
        finally:
            self._writing_back -= 1

    def _goes_on(self, going: Callable[[], bool]) -> bool:
        return going() and not self._stopped

    def _fetch(self, digests: Sequence[bytes], blocks: range) -> asyncio.Task[list[Payload]] | None:
        if not blocks:
            return None
        return asyncio.ensure_future(self._cache.fetch(digests[blocks.start : blocks.stop][: self._slice]))

    def _write(self, handle: KvHandle, block: int, payloads: Sequence[Payload], going: Callable[[], bool]) -> None:
        for start in range(0, len(payloads), self._copy):
            if not self._goes_on(going):
                return
            token = (block + start) * self._format.block_size
            self._engine.write_blocks(handle, token, payloads[start : start + self._copy])

    def _read(self, handle: KvHandle, blocks: range) -> list[bytes]:
        return self._engine.read_blocks(handle, blocks.start * self._format.block_size, len(blocks))

    def _read_end(self, handle: KvHandle, end: EndOf) -> bytes:
        count = self._after_blocks(end.length)
        kv = self._engine.read_blocks(handle, end.length - count, 1, count)[0] if count else b""
        return PromptEnd(kv, end.hidden).pack(self._format.block_bytes)

    def _end_kv_bytes(self, length: int) -> int:
        return self._after_blocks(length) * self._format.token_bytes

    def _after_blocks(self, length: int) -> int:
        """Tokens of a sequence that follow its last full block."""
        return length % self._format.block_size


async def _through(copy: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a copy, through a cancel as well, which is raised after it."""
    copying = asyncio.ensure_future(copy)
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait({copying})
        raise


def _slices(blocks: Sequence[int], most: int) -> list[range]:
    """Ascending numbers as runs of neighbours, each of at most `most`."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs
