"""KV over real gRPC servers and sockets: every fault is caught, counted, and ends where it should."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from baton.errors import EngineError, IncompleteTransfer, SourceUnreachable, StaleIncarnation, TransferError
from baton.rpc.channel import kv_channel
from baton.transfer.transport import GrpcSource
from tests.integration.transfer_pair import TOKENS, Cable, Pair, flip, running
from tests.unit.transfer.support import Gate, advance_all, faults, handoff, prefilled, ready


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running() as pair:
        yield pair


async def test_a_flipped_bit_costs_one_frame(pair: Pair) -> None:
    ready(pair.exports, pair.exporter, "t", TOKENS)
    pair.servicer.mangle = lambda stream, number, frame: [flip(frame) if (stream, number) == (0, 4) else frame]
    before = faults("bad_frame")
    assert await pair.fetch() == handoff(TOKENS)
    pair.assert_equal()
    again = pair.servicer.requests[1]
    assert (again.token_start, again.token_end) == (8, 16)
    assert (again.layer_start, again.layer_end) == (1, 2)
    # A ticket is good for each retry once.
    assert [request.retry for request in pair.servicer.requests] == [0, 1]
    assert len(pair.servicer.requests) == 2
    assert faults("bad_frame") == before + 1


async def test_another_incarnation_is_told_apart(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    before = faults("stale_incarnation")
    with pytest.raises(StaleIncarnation, match="'second'"):
        await pair.fetch(incarnation="second")
    assert faults("stale_incarnation") == before + 1
    assert ends == []


async def test_a_failing_exporter_ends_the_stream(pair: Pair) -> None:
    handle = prefilled(pair.exporter, TOKENS)
    export = pair.exports.open("t", handle, TOKENS, on_closed=lambda: pair.exporter.free(handle))
    export.mark_final(0, TOKENS)
    written = threading.Event()
    pair.engine.before_write = written.set
    fetching = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(written.wait, 60)
    export.fail(EngineError("NaN in layer 1"))
    with pytest.raises(TransferError, match="NaN in layer 1"):
        await fetching


@pytest.mark.parametrize("final", [0, 10])
async def test_a_stalled_exporter_is_left(pair: Pair, final: int) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.mark_final(0, final)
    before = faults("source_unreachable")
    with pytest.raises(SourceUnreachable, match=r"nothing for 0\.1 s"):
        await pair.fetch(stall_timeout_s=0.1)
    assert export.ended
    assert faults("source_unreachable") == before + 1


async def test_standing_in_line_is_no_stall(pair: Pair) -> None:
    pair.exports.announce("t")
    fetching = asyncio.create_task(pair.fetch(stall_timeout_s=0.1))
    await pair.servicer.requested.wait()
    done, _ = await asyncio.wait({fetching}, timeout=0.3)
    assert not done
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching


async def test_the_whole_is_bounded(pair: Pair) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    advance_all(export, TOKENS)
    before = faults("timeout") + faults("incomplete_transfer")
    with pytest.raises(IncompleteTransfer):
        await pair.fetch(timeout_s=0.2)
    assert faults("timeout") + faults("incomplete_transfer") == before + 1


async def test_a_cut_connection_is_noticed_at_both_ends(pair: Pair) -> None:
    export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
    export.mark_final(0, 10)
    written = threading.Event()
    pair.engine.before_write = written.set
    async with Cable(pair.address) as cable, kv_channel(cable.address) as pair.channel:
        fetching = asyncio.create_task(pair.fetch())
        await asyncio.to_thread(written.wait, 60)
        assert not pair.servicer.stopped.is_set()
        cable.cut()
        with pytest.raises(SourceUnreachable):
            await fetching
        await asyncio.wait_for(pair.servicer.stopped.wait(), 60)


@pytest.mark.parametrize("opened", [False, True])
async def test_a_closed_channel_is_an_error_not_a_cancellation(pair: Pair, opened: bool) -> None:
    pair.exports.announce("t")
    fetching = asyncio.create_task(pair.fetch())
    await pair.servicer.requested.wait()
    if opened:
        written = threading.Event()
        pair.engine.before_write = written.set
        export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
        export.mark_final(0, 10)
        await asyncio.to_thread(written.wait, 60)
    await pair.channel.close()
    with pytest.raises(SourceUnreachable):
        await fetching
    with pytest.raises(SourceUnreachable):
        await pair.fetch()


async def test_after_a_cancel_no_write_is_in_flight_and_the_export_is_gone(pair: Pair) -> None:
    _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
    gate = pair.engine.before_write = Gate()
    fetching = asyncio.create_task(pair.fetch())
    await asyncio.to_thread(gate.reached.wait, 60)
    for _ in range(3):
        fetching.cancel()
        await asyncio.sleep(0)
    assert not fetching.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert pair.engine.copies == 0
    pair.engine.free(pair.handle)
    assert pair.engine.stats().used == 0
    await pair.exports.wait_closed()
    assert ends == ["t"]


async def test_a_cancel_during_the_release_does_not_end_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    releasing, go_on = asyncio.Event(), asyncio.Event()
    honest = GrpcSource.release

    async def release(self: GrpcSource) -> None:
        releasing.set()
        await go_on.wait()
        await honest(self)

    monkeypatch.setattr(GrpcSource, "release", release)
    async with running() as pair:
        _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
        fetching = asyncio.create_task(pair.fetch())
        await releasing.wait()
        fetching.cancel()
        await asyncio.sleep(0)
        assert ends == []
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert ends == ["t"]
