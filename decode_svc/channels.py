"""Channels to the kv listeners of exporters, one per address, shared by all fetches from it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.rpc.channel import kv_channel

MAX_IDLE = 32


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class KvChannels:
    """Keeps channels open while in use, and MAX_IDLE more that were used last; lives on the asyncio loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to `address` ("host:port")."""
        entry = self._entries.pop(address, None) or _Entry(kv_channel(address))
        self._entries[address] = entry
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            await self._close_idle(MAX_IDLE)

    async def close(self) -> None:
        """Close all channels that are not in use."""
        await self._close_idle(0)

    async def _close_idle(self, keep: int) -> None:
        idle = [address for address, entry in self._entries.items() if not entry.users]
        closing = [self._entries.pop(address) for address in idle[: max(0, len(idle) - keep)]]
        for entry in closing:
            await entry.channel.close()
