"""Contract of every engine for a sequence that can't join, or whose numbers are not finite: it fails alone."""

from typing import cast

import pytest

from baton.engine.contract import Engine, KvHandle
from baton.engine.core import EngineCore
from baton.errors import NoToken
from baton.request import SequenceState
from tests.contract.engines import MIXED, Rig, generate, ignore, prefill, spoil, start, state, step
from tests.decoding import digests
from tests.engine_calls import found, insert, prefill_chunk

ROOM = 40


def spoiled(engine: Engine, owner: str, wanted: SequenceState) -> KvHandle:
    """As `start`, of a sequence that no token can be computed for."""
    handle = engine.reserve(owner, wanted.length + ROOM)
    first = prefill(engine, handle, wanted).token_id
    spoil(engine, handle, 1)
    insert(engine, handle, SequenceState(wanted.params, wanted.prompt_ids, [first], wanted.choice_index))
    return handle


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sequence_without_a_token_fails_alone(rig: Rig, ahead: int) -> None:
    engine = rig.engine(slots=6, steps_ahead=ahead)
    wanted = [state(rig.prompt(9 + i, seed=i), params) for i, params in enumerate(MIXED)]
    expected = [generate(rig.engine(), one, 8) for one in wanted]
    first = start(engine, "a/0", wanted[0])
    bad = spoiled(engine, "bad/1", state(rig.prompt(12, seed=9)))
    running = [first, *(start(engine, f"a/{i}", one) for i, one in enumerate(wanted) if i)]
    outcomes: list[object] = []
    steps = [engine.launch() for _ in range(7)]
    for each in steps:
        for handle, got in found(each.result()):
            if isinstance(got, NoToken):
                outcomes.append((handle, str(got)))
            else:
                next(outputs for one, outputs in running if one is handle).extend(info.token_id for info in got)
    assert [outputs for _, outputs in running] == expected
    assert outcomes == [(bad, "bad/1: logits are not finite")], "once, and it has left"
    # Its slot is free, its pages are not.
    assert engine.audit()["bad/1"] > 0
    other = state(rig.prompt(5, seed=20))
    handle, outputs = start(engine, "new/1", other)
    outputs.append(step(engine)[handle])
    assert outputs == generate(rig.engine(), other, 2)
    engine.free(bad)
    assert "bad/1" not in engine.audit()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sequence_that_cant_join_fails_alone(rig: Rig, ahead: int) -> None:
    engine = rig.engine(slots=6, steps_ahead=ahead)
    wanted = [state(rig.prompt(9 + i, seed=i), params) for i, params in enumerate(MIXED)]
    expected = [generate(rig.engine(), one, 5) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted[:2])]
    steps = [engine.launch(), engine.launch()]
    running += [start(engine, f"a/{i}", one) for i, one in enumerate(wanted[2:], 2)]
    bad = engine.reserve("bad/1", 40)
    # No prompt that was checked has such tokens: they stand for all that may go wrong while a sequence joins.
    insert(engine, bad, SequenceState(MIXED[3], cast(list[int], [None] * 12), [1]))
    steps += [engine.launch() for _ in range(4)]
    lost: list[str] = []
    for each in steps:
        for handle, got in found(each.result()):
            if isinstance(got, NoToken):
                assert handle is bad
                lost.append(str(got))
            else:
                next(outputs for one, outputs in running if one is handle).extend(info.token_id for info in got)
    assert [outputs[:5] for _, outputs in running] == expected
    ((message),) = lost
    assert message.startswith("bad/1: can't join the batch: TypeError")
    engine.free(bad)
    assert len(step(engine)) == len(wanted), "its slot is free, and no one else's"


def test_the_next_owner_of_its_pages_sees_nothing_of_it(rig: Rig) -> None:
    engine: EngineCore = rig.engine(pages=4, slots=2)
    bad = spoiled(engine, "bad/1", state(rig.prompt(20, seed=9)))
    ((_, got),) = engine.launch().result().sequences
    assert isinstance(got, NoToken)
    engine.free(bad)
    wanted = state(rig.prompt(20, seed=3))
    assert generate(engine, wanted, 10) == generate(rig.engine(), wanted, 10)


def test_a_prompt_without_a_token_says_so(engine: EngineCore, rig: Rig) -> None:
    wanted = state(rig.prompt(20))
    handle = engine.reserve("bad/1", ROOM)
    prefill_chunk(engine, handle, wanted.prompt_ids, 0, 16, on_layer=ignore)
    spoil(engine, handle, 1)
    with pytest.raises(NoToken, match="not finite"):
        prefill_chunk(engine, handle, wanted.prompt_ids, 16, 20, on_layer=ignore, sample=[wanted])
    engine.free(handle)
    assert generate(engine, wanted, 4) == generate(rig.engine(), wanted, 4)


def test_uncache_removes_only_its_own_prefix(engine: EngineCore) -> None:
    names, others = digests(engine, range(48)), digests(engine, range(100, 148))
    for owner, published in (("a/1", names), ("b/1", others)):
        idle = engine.reserve(owner, 48)
        engine.publish(idle, published)
        engine.free(idle)
    bad, mate = engine.reserve("bad/1", 64, names[:2]), engine.reserve("mate/1", 64, names)
    assert (bad.cached_tokens, mate.cached_tokens) == (32, 48)
    engine.uncache(bad)
    engine.uncache(bad)
    assert (engine.match_prefix(names), engine.match_prefix(others)) == (0, 48)
    engine.free(bad)
    engine.uncache(bad)
    engine.free(mate)
    assert engine.audit() == {}
