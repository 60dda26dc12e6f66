"""Channels to the kv listeners of exporters: one for each address and state of the TLS files, shared by all fetches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton.rpc.channel import kv_channel
from baton.rpc.tls import Tls
from baton.tasks import wait_to_end

MAX_IDLE = 32


@dataclass(slots=True)
class _PooledChannel:
    channel: grpc.aio.Channel
    users: int = 0


class KvChannels:
    """Keeps channels open while in use, and the MAX_IDLE idle ones that were used last; used on the asyncio loop
    only.

    With `tls`, exporters must have a certificate of `role`. A channel that was made with older TLS files is closed when
    its last user is done.
    """

    def __init__(self, tls: Tls | None = None, role: str = "prefill") -> None:
        self._tls = tls
        self._role = role
        self._entries: dict[tuple[str, int], _PooledChannel] = {}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield a channel to `address` ("host:port")."""
        key = (address, self._generation)
        entry = self._entries.pop(key, None) or _PooledChannel(kv_channel(address, self._tls, self._role))
        self._entries[key] = entry
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            # The channels to close are in the pool no longer: a cancellation must not leave some of them open.
            await wait_to_end(asyncio.ensure_future(self._close_idle(MAX_IDLE)))

    async def close(self) -> None:
        """Close all channels that are not in use."""
        await self._close_idle(0)

    @property
    def _generation(self) -> int:
        return self._tls.generation if self._tls else 0

    async def _close_idle(self, keep: int) -> None:
        now = self._generation
        idle = [key for key, entry in self._entries.items() if not entry.users]
        current = [key for key in idle if key[1] == now]
        surplus = current[: max(0, len(current) - keep)]
        closing = [self._entries.pop(key) for key in idle if key[1] != now or key in surplus]
        for entry in closing:
            await entry.channel.close()
