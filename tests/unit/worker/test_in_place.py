"""Hand-over in place: either side first, and the end of each side."""

import asyncio
from typing import Any, cast

import pytest

from baton.errors import InvalidRequest, TransferError
from baton.request import Handoff
from baton.worker import in_place
from baton.worker.in_place import Computed, InPlaceTransfers, Offer

OFFER = Offer(cast(Any, "pages"), 3)
COMPUTED = Computed(cast(Handoff, "handoff"), ())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("offer_first", [True, False])
async def test_either_side_may_come_first(offer_first: bool) -> None:
    transfers, ended = InPlaceTransfers(), list[TransferError]()
    tasks: dict[bool, asyncio.Future[Any]] = {}
    for offers in (offer_first, not offer_first):
        side = transfers.offer("t", OFFER) if offers else transfers.take("t", ended.append)
        tasks[offers] = asyncio.ensure_future(cast(Any, side))
        await turns()
    assert await tasks[False] is OFFER
    assert not tasks[True].done()
    transfers.commit("t", COMPUTED)
    transfers.end("t", "is over")
    assert await tasks[True] is COMPUTED
    assert ended == []
    with pytest.raises(TransferError, match="t was handed over"):
        await transfers.take("t", ended.append)
    with pytest.raises(TransferError, match="t was handed over"):
        transfers.offer("t", OFFER)
    with pytest.raises(TransferError, match="t was handed over"):
        transfers.announce("t")


async def test_the_end_of_a_reservation_ends_the_prefill_that_took_its_pages_at_once() -> None:
    transfers, ended = InPlaceTransfers(), list[TransferError]()
    receiving = transfers.offer("t", OFFER)
    await transfers.take("t", ended.append)
    transfers.end("t", "ended with its reservation")
    assert [str(error) for error in ended] == ["transfer t ended with its reservation"]
    with pytest.raises(TransferError, match="ended with its reservation"):
        await receiving
    transfers.commit("t", COMPUTED)
    transfers.end("t", "again")
    assert len(ended) == 1


async def test_who_waits_for_the_other_side_learns_of_its_end() -> None:
    transfers, ended = InPlaceTransfers(), list[TransferError]()
    taking = asyncio.create_task(transfers.take("taken", ended.append))
    receiving = transfers.offer("offered", OFFER)
    await turns()
    transfers.end("taken", "failed")
    transfers.end("offered", "failed")
    for waiting in (taking, receiving):
        with pytest.raises(TransferError, match="failed"):
            await waiting


async def test_ids_are_used_once_and_ends_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_MAX_REMEMBERED", 2)
    transfers = InPlaceTransfers()
    first: list[asyncio.Future[Any]] = [transfers.offer("a", OFFER), asyncio.create_task(transfers.take("b", print))]
    await turns()
    with pytest.raises(TransferError, match="a was offered before"):
        transfers.offer("a", OFFER)
    transfers.announce("b")
    with pytest.raises(InvalidRequest, match="was announced already"):
        transfers.announce("b")
    assert not any(each.done() for each in first), "the second one ends nothing"
    transfers.end("a", "is over")
    transfers.end("b", "is over")
    await asyncio.wait(first)
    transfers.end("c", "is over")
    assert list(transfers._ended) == ["b", "c"]
    assert transfers._transfers == {}
