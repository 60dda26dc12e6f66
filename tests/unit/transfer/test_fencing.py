"""What belongs to a dead attempt finds no home: late frames, late progress, late commits, late renewals."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

import pytest

from baton.errors import EngineError, TransferError
from baton.transfer.exports import Exports
from baton.transfer.receiver import Receiver
from tests.unit.transfer.support import (
    INCARNATION,
    SEED,
    WHOLE,
    Engine,
    Gate,
    advance_all,
    collect,
    contents,
    handoff,
    prefilled,
    ready,
    whole,
)

TOKENS = 12


async def test_a_late_frame_does_not_reach_the_pages_next_owner() -> None:
    source, target = Engine(), Engine(page_size=2048)
    exports = Exports(source, INCARNATION)
    export, _ = ready(exports, source, "t", TOKENS)
    first, *_ = await collect(export, whole(TOKENS))
    dead = target.reserve("dead", 12)
    receiver = Receiver(target, dead, whole(TOKENS), TOKENS, [WHOLE], SEED)
    target.free(dead)
    owner = prefilled(target, 12)
    assert list(owner.pages) == list(dead.pages)
    before = contents(target, owner, whole(TOKENS))
    with pytest.raises((EngineError, TransferError)):
        receiver.take(first)
    assert contents(target, owner, whole(TOKENS)) == before
    target.free(owner)
    exports.close()


async def test_a_read_in_flight_at_the_end_is_waited_for_and_not_sent() -> None:
    engine, gate = Engine(), Gate()
    exports = Exports(engine, INCARNATION)
    export, ends = ready(exports, engine, "t", TOKENS)
    engine.before_read = gate
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        sent = asyncio.ensure_future(anext(frames))
        await asyncio.to_thread(gate.reached.wait, 60)
        exports.release("t", INCARNATION, "was abandoned")
        assert (export.ended, export.closed, ends, engine.stats().used) == (True, False, [], 1)
        gate.open()
        with pytest.raises(TransferError, match="was abandoned"):
            await sent
    await exports.drained()
    assert (export.closed, ends, engine.stats().used) == (True, ["t"], 0)


async def test_nothing_brings_an_ended_export_back() -> None:
    engine, ends = Engine(), list[str]()
    exports = Exports(engine, INCARNATION)
    handle = prefilled(engine, TOKENS)
    export = exports.open("t", handle, TOKENS, on_closed=lambda: ends.append("t"))
    exports.release("t", INCARNATION)
    advance_all(export, TOKENS)
    export.commit(handoff(TOKENS))
    export.fail(RuntimeError("late"))
    exports.release("t", INCARNATION)
    assert (ends, export.lease_left) == (["t"], math.inf)
    with pytest.raises(TransferError, match="was released"):
        await collect(export, whole(TOKENS))
    committed, _ = ready(exports, engine, "u", TOKENS)
    assert committed.lease_left < math.inf
    exports.release("u", INCARNATION)
    assert committed.lease_left == math.inf
    engine.free(handle)
