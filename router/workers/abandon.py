"""Tells prefill workers which exports nobody will fetch, so that KV is not pinned until its lease ends.

Best effort, in the background: the lease is what frees KV when a call gets lost. Calls are bounded in time, and there
is at most one for each attempt; `finish` waits for those under way.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from baton.pb import prefill_pb2, prefill_pb2_grpc
from router.workers.link import Seat

_TIMEOUT_S = 2.0

_logger = logging.getLogger(__name__)


class Abandoner:
    """Owns the calls; lives on the event loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[None]] = set()

    def abandon(self, seat: Seat, transfer_id: str) -> None:
        """End the export of an attempt, unless its worker is lost and holds nothing."""
        if seat.lost.is_set():
            return
        call = asyncio.create_task(_call(seat, transfer_id), name=f"abandon {transfer_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def finish(self) -> None:
        """Wait for the calls under way, which takes no longer than their timeout."""
        await asyncio.gather(*self._calls, return_exceptions=True)


async def _call(seat: Seat, transfer_id: str) -> None:
    request = prefill_pb2.AbandonRequest(transfer_id=transfer_id, incarnation=seat.incarnation)
    try:
        await prefill_pb2_grpc.PrefillStub(seat.link.channel).Abandon(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        _logger.warning("transfer %s was not abandoned at %s: %s", transfer_id, seat.link.name, error.code().name)
