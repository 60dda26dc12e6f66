"""Contract of every engine for pages: reserve, extend, free at any moment, refuse what does not fit."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.contract import Engine, KvHandle
from baton.engine.core import EngineCore
from baton.errors import CorruptFrame, EngineError, InvalidRequest, OutOfPages
from baton.kv.format import PartData
from tests.contract.engines import (
    MIXED,
    ExecutorStub,
    Rig,
    advance,
    generate,
    ignore,
    prefill,
    start,
    state,
    step,
    whole_kv,
)
from tests.engine_calls import found, insert, prefill_chunk


def test_dead_handles_are_refused(engine: EngineCore, rig: Rig) -> None:
    donor = engine.reserve("donor", 20)
    prompt = rig.prompt(10)
    prefill(engine, donor, state(prompt))
    parts = engine.read_kv(donor, 0, range(3), range(1))
    handle = engine.reserve("a/1", 20)
    engine.free(handle)
    engine.free(handle)
    assert not handle.alive
    calls: list[Callable[[], Any]] = [
        lambda: engine.extend(handle, 30),
        lambda: engine.fork(handle, "b/1", 3, 20),
        lambda: prefill_chunk(engine, handle, prompt, 0, 4, on_layer=ignore),
        lambda: engine.read_kv(handle, 0, range(3), range(1)),
        lambda: engine.write_kv(handle, 0, 0, 0, parts),
        lambda: engine.read_blocks(handle, 0, 1),
        lambda: engine.write_blocks(handle, 0, engine.read_blocks(donor, 0, 1)),
        lambda: insert(engine, handle, state(prompt, outputs=[1])),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="a/1: its KV was freed"):
            call()
    assert engine.audit() == {"donor": 2}


def test_a_handle_is_inserted_once(engine: EngineCore, rig: Rig) -> None:
    handle, outputs = start(engine, "a/1", state(rig.prompt(10)))
    again = state(rig.prompt(10), outputs=outputs)
    with pytest.raises(EngineError, match="inserted before"):
        insert(engine, handle, again)
    small = engine.reserve("b/1", 5)
    with pytest.raises(EngineError, match="in pages for 16"):
        insert(engine, small, state(rig.prompt(18), outputs=[1]))


def test_a_launch_that_fails_leaves_the_batch_as_it_was(rig: Rig) -> None:
    engine: Any = rig.engine()
    expected = generate(engine, state(rig.prompt(10)), 5)
    handle, outputs = start(engine, "a/1", state(rig.prompt(10)))
    other, late = start(engine, "b/1", state(rig.prompt(12)))

    def fail(*_plan: Any) -> Any:
        raise EngineError("no room for a row")

    stub = ExecutorStub(engine, fail)
    for _ in range(2):
        with pytest.raises(EngineError, match="no room for a row"):
            engine.launch()
    engine.executor = stub.next
    tokens = step(engine)
    outputs.append(tokens[handle])
    assert [*late, tokens[other]] == generate(rig.engine(), state(rig.prompt(12)), 2)
    engine.free(other)
    for _ in range(3):
        outputs.append(step(engine)[handle])
    assert outputs == expected


def test_a_freed_sequence_leaves_at_the_next_step(engine: EngineCore, rig: Rig) -> None:
    wanted = [state(rig.prompt(10 + i, seed=i), MIXED[i]) for i in range(3)]
    expected = [generate(engine, one, 6) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted)]
    advance(engine, running)
    engine.free(running[0][0])
    # Its pages are someone else's before the next step.
    other = engine.reserve("other", 16 * engine.stats().free)
    other_kv = whole_kv(engine, other, other.capacity)
    for _ in range(4):
        tokens = step(engine)
        assert set(tokens) == {running[1][0], running[2][0]}
        for handle, outputs in running[1:]:
            outputs.append(tokens[handle])
    assert whole_kv(engine, other, other.capacity) == other_kv
    assert [outputs for _, outputs in running[1:]] == expected[1:]
    engine.free(running[1][0])
    engine.free(running[2][0])
    assert engine.launch().result().sequences == []


def test_a_result_read_late_leaves_out_what_was_freed(engine: EngineCore, rig: Rig) -> None:
    first, _ = start(engine, "a/1", state(rig.prompt(10)))
    second, _ = start(engine, "b/1", state(rig.prompt(10)))
    pending = engine.launch()
    engine.free(first)
    assert [handle for handle, _ in found(pending.result())] == [second]


def test_free_in_the_midst_of_a_step_waits_for_it(engine: EngineCore, rig: Rig) -> None:
    handle, _ = start(engine, "a/1", state(rig.prompt(10)))
    other, _ = start(engine, "b/1", state(rig.prompt(10)))
    seen = []

    def freed_meanwhile(*plan: Any) -> Any:
        engine.free(handle)
        assert not handle.alive
        seen.append(engine.audit())
        return stub.next.launch(*plan)

    stub = ExecutorStub(engine, freed_meanwhile)
    assert set(step(engine)) == {other}
    assert seen == [{"a/1 (draining)": 4, "b/1": 4}]
    assert engine.audit() == {"b/1": 4}


class GatedMemory:
    """An engine's memory whose reads and writes wait inside for the test."""

    def __init__(self, engine: Any) -> None:
        self._memory = engine.memory
        self.entered, self.go_on = threading.Event(), threading.Event()
        engine.memory = self

    def read(self, *args: Any) -> Any:
        self.entered.set()
        assert self.go_on.wait(60)
        return self._memory.read(*args)

    def write(self, *args: Any) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        self._memory.write(*args)

    def read_blocks(self, *args: Any) -> list[bytes]:
        self.entered.set()
        assert self.go_on.wait(60)
        return self._memory.read_blocks(*args)

    def write_blocks(self, *args: Any) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        self._memory.write_blocks(*args)


@pytest.mark.parametrize("kind", ["read", "write", "read blocks", "write blocks"])
def test_free_while_a_copy_is_in_flight_returns_pages_after_it(engine: EngineCore, rig: Rig, kind: str) -> None:
    handle = engine.reserve("a/1", 40)
    prefill(engine, handle, state(rig.prompt(40)))
    parts, blocks = engine.read_kv(handle, 1, range(40), range(1)), engine.read_blocks(handle, 0, 2)
    total = engine.stats().total
    gate = GatedMemory(engine)
    with ThreadPoolExecutor(1) as threads:
        calls: dict[str, tuple[Callable[..., Any], Any]] = {
            "read": (engine.read_kv, (1, range(40), range(1))),
            "write": (engine.write_kv, (1, 0, 0, parts)),
            "read blocks": (engine.read_blocks, (0, 2)),
            "write blocks": (engine.write_blocks, (0, blocks)),
        }
        call, place = calls[kind]
        copy = threads.submit(call, handle, *place)
        assert gate.entered.wait(60)
        engine.free(handle)
        assert not handle.alive
        assert engine.audit() == {"a/1 (draining)": 3}
        with pytest.raises(OutOfPages):
            engine.reserve("b/1", 16 * total)
        gate.go_on.set()
        found = copy.result(10)
    if kind == "read":
        assert [bytes(part.data) for part in found] == [bytes(part.data) for part in parts]
    if kind == "read blocks":
        assert found == blocks
    assert engine.audit() == {}


def test_ranges_that_are_not_there_are_refused(engine: EngineCore) -> None:
    handle = engine.reserve("a/1", 20)
    kv_format = engine.spec.kv_format
    heads = range(kv_format.heads)
    for layer, tokens, wanted, field in (
        (kv_format.layers, range(3), heads, "layer"),
        (-1, range(3), heads, "layer"),
        (0, range(30, 33), heads, "tokens"),
        (0, range(-1, 3), heads, "tokens"),
        (0, range(3, 3), heads, "tokens"),
        (0, range(0, 8, 2), heads, "tokens"),
        (0, range(3), range(kv_format.heads + 1), "heads"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            engine.read_kv(handle, layer, tokens, wanted)


def _shape(parts: list[PartData], *shape: int) -> list[PartData]:
    return [replace(part, shape=shape + part.shape[len(shape) :]) for part in parts]


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda parts: parts[:1], {}),
        (lambda parts: [*parts, parts[0]], {}),
        (lambda parts: [replace(parts[0], name="q"), parts[1]], {}),
        (lambda parts: [replace(parts[0], dtype="float64"), parts[1]], {}),
        (lambda parts: [replace(parts[0], data=bytes(parts[0].data)[:-1]), parts[1]], {}),
        (lambda parts: [parts[0], *_shape(parts[1:], 5)], {}),
        (lambda parts: _shape(parts, 4, 1, 99), {}),
        (lambda parts: [replace(part, shape=part.shape[:2]) for part in parts], {}),
        (lambda parts: [replace(p, shape=(0, *p.shape[1:]), data=b"") for p in parts], {}),
        (lambda parts: parts, {"token_start": 30}),
        (lambda parts: parts, {"token_start": -1}),
        (lambda parts: parts, {"head_start": 99}),
        (lambda parts: parts, {"head_start": -1}),
        (lambda parts: parts, {"layer": 99}),
    ],
)
def test_parts_that_do_not_fit_are_corrupt(
    rig: Rig, spoil: Callable[[list[PartData]], list[PartData]], where: dict[str, int]
) -> None:
    engine = rig.engine()
    handle = engine.reserve("a/1", 20)
    good = engine.read_kv(handle, 0, range(4), range(1))
    place = {"layer": 0, "token_start": 0, "head_start": 0, **where}
    with pytest.raises(CorruptFrame):
        engine.write_kv(handle, place["layer"], place["token_start"], place["head_start"], spoil(good))
    engine.write_kv(handle, 0, 0, 0, good)


def test_threads_may_copy_and_free_while_steps_run(rig: Rig) -> None:
    engine = rig.engine(pages=96)
    wanted = [state(rig.prompt(12 + i, seed=i), MIXED[i]) for i in range(3)]
    expected = [generate(engine, one, 16) for one in wanted]
    running = [start(engine, f"a/{i}", one) for i, one in enumerate(wanted)]
    donor = engine.reserve("donor", 60)
    prefill(engine, donor, state(rig.prompt(60)))
    stop = threading.Event()

    def transfer(worker: int) -> int:
        rounds = 0
        while not stop.is_set() or not rounds:
            _round_trip(engine, donor, f"t{worker}/{rounds}", worker)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as threads:
        transfers = [threads.submit(transfer, worker) for worker in range(2)]
        try:
            while len(running[0][1]) < 16:
                advance(engine, running)
                engine.audit()
        finally:
            stop.set()
        assert all(done.result(10) for done in transfers)
    assert [outputs for _, outputs in running] == expected
    assert set(engine.audit()) == {"a/0", "a/1", "a/2", "donor"}


def _round_trip(engine: Engine, donor: KvHandle, owner: str, seed: int) -> None:
    heads = range(engine.spec.kv_format.heads)
    handle = engine.reserve(owner, 60)
    for layer in range(engine.spec.kv_format.layers):
        parts = engine.read_kv(donor, layer, range(60), heads)
        engine.write_kv(handle, layer, 0, 0, parts)
        assert engine.read_kv(handle, layer, range(60), heads) == parts
    child = engine.fork(handle, f"{owner}/0", 20 + seed, 64)
    engine.free(handle)
    engine.extend(child, 70)
    engine.free(child)
