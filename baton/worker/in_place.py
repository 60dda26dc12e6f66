"""Hand-over of KV between the two services of a mixed worker: nothing is copied, because they share the pages.

    decode    offer ─────────────────── waits ────────────▶ handoff           the pages are decode's all the time
    prefill   announce ── take ──▶ offer ── computes into the pages ── commit

Either side may come first. The pages belong to decode's attempt from its reservation on; prefill never frees them.
`end` ends a transfer from either side: the other side gets an error. Ids of ended transfers are remembered, so that a
late message of a dead attempt ends at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.contract import KvHandle
from baton.errors import InvalidRequest, TransferError
from baton.request import Handoff

_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages of a reservation, for a context of `context_tokens` tokens.

    `pinned_digest` is the digest of the last block that has tokens of `handle.cached_tokens`; empty if there is none.
    """

    handle: KvHandle
    context_tokens: int
    pinned_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Computed:
    """A computed prompt: its handoff, and the digests of its full blocks, or none if they were not needed."""

    handoff: Handoff
    digests: Sequence[bytes]


@dataclass(slots=True)
class _Transfer:
    offer: Offer | None = None
    announced: bool = False
    on_ended: Callable[[TransferError], object] | None = None
    taker: asyncio.Future[Offer] | None = None
    receiver: asyncio.Future[Computed] | None = None


class InPlaceTransfers:
    """The transfers in place of one worker, by transfer id; used on the asyncio loop only."""

    def __init__(self) -> None:
        self._transfers: dict[str, _Transfer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def offer(self, transfer_id: str, offer: Offer) -> asyncio.Future[Computed]:
        """Offer pages; the future gets the prompt that is computed in them, or TransferError if the transfer ends.

        The caller must `end` the transfer before it frees the pages. Raises TransferError if the transfer has ended or
        was offered before; then it is not the caller's to end.
        """
        transfer = self._open(transfer_id)
        if transfer.offer is not None:
            raise TransferError(f"transfer {transfer_id} was offered before")
        transfer.offer, transfer.receiver = offer, asyncio.get_running_loop().create_future()
        if transfer.taker is not None and not transfer.taker.done():
            transfer.taker.set_result(offer)
        return transfer.receiver

    def announce(self, transfer_id: str) -> None:
        """Announce the one job that will take the offer.

        Raises TransferError if the transfer has ended, and InvalidRequest if a job was announced before.
        """
        transfer = self._open(transfer_id)
        if transfer.announced:
            raise InvalidRequest("transfer_id", "was announced already", transfer_id)
        transfer.announced = True

    async def take(self, transfer_id: str, on_ended: Callable[[TransferError], object]) -> Offer:
        """Wait for the offer; for the job that was announced. Raises TransferError if the transfer has ended.

        `on_ended` is called if the transfer ends before its `commit`; the pages are still there at that moment.
        """
        transfer = self._open(transfer_id)
        transfer.on_ended = on_ended
        if transfer.offer is not None:
            return transfer.offer
        transfer.taker = asyncio.get_running_loop().create_future()
        return await transfer.taker

    def commit(self, transfer_id: str, computed: Computed) -> None:
        """Hand the computed prompt to the receiver; does nothing if the transfer has ended."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self._remember(transfer_id, "was handed over")
            if transfer.receiver is not None and not transfer.receiver.done():
                transfer.receiver.set_result(computed)

    def end(self, transfer_id: str, reason: str) -> None:
        """End a transfer, or forbid to open the id later; both sides get a TransferError with the reason. Idempotent.

        Decode calls it before it frees the pages.
        """
        if transfer_id in self._ended:
            return
        self._remember(transfer_id, reason)
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return
        error = TransferError(f"transfer {transfer_id} {reason}")
        for waiting in (transfer.taker, transfer.receiver):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                # The caller may have been cancelled, and then asks for nothing.
                waiting.exception()
        if transfer.on_ended is not None:
            transfer.on_ended(error)

    def _open(self, transfer_id: str) -> _Transfer:
        if (reason := self._ended.get(transfer_id)) is not None:
            raise TransferError(f"transfer {transfer_id} {reason}")
        return self._transfers.setdefault(transfer_id, _Transfer())

    def _remember(self, transfer_id: str, reason: str) -> None:
        self._ended[transfer_id] = reason
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
