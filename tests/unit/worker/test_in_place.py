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
    tasks: dict[bool, asyncio.Task[Any]] = {}
    for offers in (offer_first, not offer_first):
        side = transfers.receive("t", OFFER) if offers else transfers.take("t", ended.append)
        tasks[offers] = asyncio.create_task(cast(Any, side))
        await turns()
    assert await tasks[False] is OFFER
    assert not tasks[True].done()
    transfers.commit("t", COMPUTED)
    transfers.end("t", "is over")
    assert await tasks[True] is COMPUTED
    assert ended == []
    for late in (transfers.receive("t", OFFER), transfers.take("t", ended.append)):
        with pytest.raises(TransferError, match="t was handed over"):
            await late
    with pytest.raises(TransferError, match="t was handed over"):
        transfers.announce("t")


async def test_the_end_of_a_reservation_ends_the_prefill_that_took_its_pages_at_once() -> None:
    transfers, ended = InPlaceTransfers(), list[TransferError]()
    receiving = asyncio.create_task(transfers.receive("t", OFFER))
    await turns()
    await transfers.take("t", ended.append)
    transfers.end("t", "ended with its reservation")
    assert [str(error) for error in ended] == ["transfer t ended with its reservation"]
    with pytest.raises(TransferError, match="ended with its reservation"):
        await receiving
    transfers.commit("t", COMPUTED)
    transfers.end("t", "again")
    assert len(ended) == 1


@pytest.mark.parametrize("by", ["end", "cancel"])
async def test_who_waits_for_the_other_side_learns_of_its_end(by: str) -> None:
    transfers, ended = InPlaceTransfers(), list[TransferError]()
    taking = asyncio.create_task(transfers.take("taken", ended.append))
    receiving = asyncio.create_task(transfers.receive("offered", OFFER))
    await turns()
    if by == "end":
        transfers.end("taken", "failed")
        transfers.end("offered", "failed")
        for task in (taking, receiving):
            with pytest.raises(TransferError, match="failed"):
                await task
    else:
        receiving.cancel()
        await turns()
        with pytest.raises(TransferError, match="offered ended with its reservation"):
            await transfers.take("offered", ended.append)
        taking.cancel()


async def test_ids_are_used_once_and_ends_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_MAX_REMEMBERED", 2)
    transfers = InPlaceTransfers()
    first = [asyncio.create_task(transfers.receive("a", OFFER)), asyncio.create_task(transfers.take("b", print))]
    await turns()
    with pytest.raises(TransferError, match="a was offered before"):
        await transfers.receive("a", OFFER)
    transfers.announce("b")
    with pytest.raises(InvalidRequest, match="was announced already"):
        transfers.announce("b")
    assert not any(task.done() for task in first), "the second one ends nothing"
    transfers.end("a", "is over")
    transfers.end("b", "is over")
    await asyncio.gather(*first, return_exceptions=True)
    transfers.end("c", "is over")
    assert list(transfers._ended) == ["b", "c"]
    assert transfers._transfers == {}
