"""Exports that hand nothing over, and consumers that have the beginning already."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from baton.errors import CorruptFrame, IncompleteTransfer, InvalidRequest, TransferError
from baton.transfer import wire
from baton.transfer.export import KEEPALIVE_S, ExportRegistry
from baton.transfer.fetcher import Receiver, fetch_from
from baton.transfer.wire import KvSlice
from tests.property.virtual import VirtualLoop
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    SEED,
    WHOLE,
    Engine,
    Gate,
    MemorySource,
    collect,
    decoded,
    handoff,
    mark_all_final,
    prefilled,
    ready,
    unchanged,
    whole,
)

TOKENS = 12
NAME = bytes(range(32))
REST = KvSlice(range(8, TOKENS), range(LAYERS), range(HEADS))
NOTHING = KvSlice(range(TOKENS, TOKENS), range(LAYERS), range(HEADS))


@pytest.fixture
async def exports(engine: Engine) -> AsyncIterator[ExportRegistry]:
    exports = ExportRegistry(engine, INCARNATION, lease_s=30.0)
    yield exports
    exports.close()
    await exports.wait_closed()


async def test_a_prefix_is_final_and_leased_at_once_without_handoff(exports: ExportRegistry, engine: Engine) -> None:
    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    export.commit_prefix(NAME)
    assert export.lease_left <= 30.0
    *data, manifest, commit = [decoded(frame) for frame in await collect(export, whole(TOKENS))]
    assert [(each.layer, each.tokens) for each in data if isinstance(each, wire.KvData)] == [
        (layer, range(TOKENS)) for layer in range(LAYERS)
    ]
    assert isinstance(manifest, wire.Manifest)
    assert commit == wire.Commit(TOKENS, 0, None, (WHOLE,), NAME)
    with pytest.raises(InvalidRequest, match="was committed already"):
        export.commit_prefix(NAME)


async def test_a_prefill_worker_that_takes_a_request_over_insists_on_the_handoff(
    exports: ExportRegistry, engine: Engine
) -> None:
    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    export.commit_prefix(NAME)
    consumer = Engine(page_size=4)
    handle = consumer.reserve("decode", TOKENS)
    with pytest.raises(IncompleteTransfer, match="has no handoff"):
        await fetch_from(
            [MemorySource(export, unchanged)], consumer, handle, whole(TOKENS), length=TOKENS, timeout_s=20
        )


async def test_a_read_of_a_handle_freed_after_the_end_tells_of_it(exports: ExportRegistry, engine: Engine) -> None:
    handle = prefilled(engine, TOKENS)
    gate = engine.before_read = Gate()
    export = exports.open("t", handle, TOKENS, on_closed=lambda: None)
    export.commit_prefix(NAME)
    collecting = asyncio.create_task(collect(export, whole(TOKENS)))
    await asyncio.to_thread(gate.reached.wait, 60)
    export.end("ended with its attempt")
    engine.free(handle)
    gate.open()
    with pytest.raises(TransferError, match="transfer t ended with its attempt"):
        await collecting
    await exports.wait_closed()
    assert engine.stats().used == 0


@pytest.mark.parametrize("kv_slice", [REST, NOTHING], ids=["the rest", "nothing"])
def test_a_consumer_of_the_end_hears_that_the_beginning_is_being_computed(kv_slice: KvSlice) -> None:
    """Once in KEEPALIVE_S, also while the engine computes something else."""
    loop, engine = VirtualLoop(), Engine()

    async def run() -> list[tuple[float, bytes]]:
        exports, heard = ExportRegistry(engine, INCARNATION), list[tuple[float, bytes]]()
        export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)

        async def listen() -> None:
            async with aclosing(export.frames(kv_slice)) as frames:
                async for frame in frames:
                    heard.append((loop.time(), frame))

        listening = asyncio.create_task(listen())
        for token in range(1, 8):
            await asyncio.sleep(0.4)
            mark_all_final(export, token)
        await asyncio.sleep(5 * KEEPALIVE_S)
        mark_all_final(export, TOKENS)
        export.commit(handoff(TOKENS))
        await listening
        exports.close()
        return heard

    heard = loop.run_until_complete(run())
    told = [round(at, 3) for at, frame in heard if frame == wire.KEEPALIVE]
    assert told == [KEEPALIVE_S * second for second in range(1, 8)]
    assert [type(decoded(frame)) for _, frame in heard if frame != wire.KEEPALIVE] == [
        *[wire.KvData] * (LAYERS if kv_slice is REST else 0),
        wire.Manifest,
        wire.Commit,
    ]
    loop.finish()
    loop.close()


async def test_progress_is_no_frame_and_nothing_follows_the_commit(exports: ExportRegistry, engine: Engine) -> None:
    export, _ = ready(exports, engine, "t", TOKENS)
    frames = await collect(export, REST)
    consumer = Engine(page_size=4)
    receiver = Receiver(consumer, consumer.reserve("decode", TOKENS), REST, TOKENS, [WHOLE], SEED)
    for frame in frames:
        receiver.add_frame(wire.KEEPALIVE)
        receiver.add_frame(frame)
    assert receiver.gaps() == []
    with pytest.raises(CorruptFrame, match="after the commit"):
        receiver.add_frame(wire.KEEPALIVE)
