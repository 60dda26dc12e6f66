"""Blocks that wait to be written to a shared store: a queue bounded in bytes, written in batches by one task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from baton.kv.prefix.contract import Payload
from baton.telemetry import metrics

_log = logging.getLogger(__name__)

Write = Callable[[Sequence[tuple[bytes, Payload]]], Awaitable[Sequence[bool]]]
"""Writes (digest, payload) pairs and returns which of them were stored."""

OnLost = Callable[[Sequence[bytes]], object]
"""Called with the digests of blocks that a store had accepted, but does not have."""


class WriteQueue:
    """A block stays in the queue, and counts towards `queue_bytes`, until it is written or dropped.

    `lost` is called with the digests of dropped blocks.
    """

    def __init__(
        self, tier: str, write: Write, queue_bytes: int, batch_bytes: int, lost: OnLost = lambda _: None
    ) -> None:
        self._write, self._queue_bytes, self._batch_bytes, self._lost = write, queue_bytes, batch_bytes, lost
        self._queue: dict[bytes, Payload] = {}
        self._bytes = 0
        self._has_blocks, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self._tier = tier
        self._written = metrics.PREFIX_BLOCKS.labels(tier, "written")
        self._dropped = metrics.PREFIX_BLOCKS.labels(tier, "dropped")

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._queue

    def put(self, digest: bytes, payload: Payload, accepted: bool = True) -> bool:
        """Queue a block; False if `accepted` is False or the queue is full."""
        if digest in self._queue:
            return True
        if self._closed or not accepted or self._bytes + len(payload) > self._queue_bytes:
            self._dropped.inc()
            return False
        self._queue[digest] = payload
        self._bytes += len(payload)
        self._idle.clear()
        self._has_blocks.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._run(), name="prefix-cache-writer")
        return True

    async def flush(self) -> None:
        """Wait until the queue is written or dropped."""
        await self._idle.wait()

    def clear(self) -> None:
        """Drop all queued blocks; a batch that is being written may still be stored."""
        self._drop(list(self._queue))

    async def close(self, within_s: float) -> None:
        """Write for at most `within_s` seconds more, then drop the rest."""
        self._closed = True
        try:
            async with asyncio.timeout(within_s):
                await self.flush()
        except TimeoutError:
            self.clear()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})

    async def _run(self) -> None:
        while True:
            await self._has_blocks.wait()
            batch = self._batch()
            try:
                written = await self._write(batch)
            except Exception:  # otherwise `flush` would wait for ever
                _log.exception("blocks could not be written to %s", self._tier)
                written = [False] * len(batch)
            self._written.inc(sum(written))
            left = [self._queue.get(digest) is payload for digest, payload in batch]  # not cleared meanwhile
            ended = list(zip(batch, left, written, strict=True))
            self._forget([digest for (digest, _), here, stored in ended if here and stored])
            self._drop([digest for (digest, _), here, stored in ended if here and not stored])

    def _batch(self) -> list[tuple[bytes, Payload]]:
        batch: list[tuple[bytes, Payload]] = []
        size = 0
        for digest, payload in self._queue.items():
            if batch and size + len(payload) > self._batch_bytes:
                break
            batch.append((digest, payload))
            size += len(payload)
        return batch

    def _drop(self, digests: Sequence[bytes]) -> None:
        self._dropped.inc(len(digests))
        self._lost(digests)
        self._forget(digests)

    def _forget(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._bytes -= len(self._queue.pop(digest))
        if not self._queue:
            self._has_blocks.clear()
            self._idle.set()
