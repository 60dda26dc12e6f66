"""What belongs to a dead attempt finds no home: late frames, late progress, late commits, late renewals."""

from __future__ import annotations

import pytest

from baton.errors import EngineError, TransferError
from baton.transfer.receiver import Receiver
from baton.transfer.registry import ExportRegistry
from tests.unit.transfer.support import (
    INCARNATION,
    SEED,
    WHOLE,
    Engine,
    collect,
    contents,
    prefilled,
    ready,
    whole,
)

TOKENS = 12


async def test_a_late_frame_does_not_reach_the_pages_next_owner() -> None:
    source, target = Engine(), Engine(page_size=2048)
    exports = ExportRegistry(source, INCARNATION)
    export, _ = ready(exports, source, "t", TOKENS)
    first, *_ = await collect(export, whole(TOKENS))
    dead = target.reserve("dead", 12)
    receiver = Receiver(target, dead, whole(TOKENS), TOKENS, [WHOLE], SEED)
    target.free(dead)
    owner = prefilled(target, 12)
    assert list(owner.pages) == list(dead.pages)
    before = contents(target, owner, whole(TOKENS))
    with pytest.raises((EngineError, TransferError)):
        receiver.add_frame(first)
    assert contents(target, owner, whole(TOKENS)) == before
    target.free(owner)
    exports.close()
