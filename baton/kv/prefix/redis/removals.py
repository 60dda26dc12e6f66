"""Deletes refused records from a shared store, in the background, and only if they are still there.

A refused record is a miss for its reader. If it stayed, every look-up would find it again by its size. But another
worker may have replaced it by a valid record meanwhile. So a value is deleted only if it has the wrong size, or if it
begins with the refused header. Each header has a random nonce, so no new record begins with the same bytes.

Whoever can write to the store can produce any number of refused records. Each costs at most one command, and at most
MOST of them wait at a time. Others are forgotten: they are overwritten by the next computation, or found again by the
next fetch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from baton.kv.prefix.redis.nodes import Command
from baton.telemetry import metrics

MAX_WAITING = 256

_SCRIPT = """
local size = redis.call('STRLEN', KEYS[1])
local header = ARGV[2]
if size ~= tonumber(ARGV[1]) or (#header > 0 and redis.call('GETRANGE', KEYS[1], 0, #header - 1) == header) then
  return redis.call('UNLINK', KEYS[1])
end
return 0
"""

_log = logging.getLogger(__name__)

Remove = Callable[[Mapping[bytes, bytes]], Awaitable[Sequence[object]]]
"""Called with headers by digest; returns the replies to their `removal_command`."""


def removal_command(key: bytes, size: int, header: bytes) -> Command:
    """The command that deletes the value at `key` if it has not `size` bytes, or begins with the non-empty `header`.

    Its reply is the number of deleted keys.
    """
    return ("EVAL", _SCRIPT, 1, key, size, header)


class RemovalQueue:
    """Deletes refused records in batches, one after the other; used on the asyncio loop only."""

    def __init__(self, tier: str, remove: Remove) -> None:
        self._remove = remove
        self._waiting: dict[bytes, bytes] = {}
        self._task: asyncio.Task[None] | None = None
        self._removed = metrics.PREFIX_BLOCKS.labels(tier, "removed")
        self._tier = tier

    def add(self, refused: Mapping[bytes, bytes]) -> None:
        """Queue refused records: headers by digest, empty for a record without one."""
        for digest, header in refused.items():
            if len(self._waiting) < MAX_WAITING:
                self._waiting[digest] = header
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="prefix-cache-removals")

    async def flush(self) -> None:
        """Wait until all are deleted or given up."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Give up the records that are left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            try:
                replies = await self._remove(batch)
            except Exception:  # the records stay, until they are overwritten or refused again
                _log.exception("refused records could not be removed from %s", self._tier)
                return
            self._removed.inc(sum(reply for reply in replies if isinstance(reply, int)))
