"""Waits for pages in every engine: spares of forks, reports of returned pages."""

from typing import Any

import pytest

from baton.errors import OutOfPages
from baton.request import SamplingParams
from tests.contract.engines import ExecutorStub, Rig, generate, prefill, start, state, step, whole_kv
from tests.engine_calls import insert


def test_a_fork_takes_over_the_pages_of_its_spare_and_nobody_gets_in_between(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=6)
    prompt = rig.prompt(37)
    params = SamplingParams(seed=2, temperature=1.5, n=2)
    wanted = state(prompt, params, choice=1)
    expected = generate(rig.engine(), wanted, 6)
    parent = engine.reserve("a/1", 37)
    first = prefill(engine, parent, wanted).token_id
    spare = engine.reserve("a/1/spare", 32)
    rest = engine.reserve("other", 16)
    kv = whole_kv(engine, parent, 37)
    with pytest.raises(OutOfPages):
        engine.fork(parent, "a/1/1", 37, 64)
    child = engine.fork(parent, "a/1/1", 37, 64, spare)
    assert not spare.alive
    assert engine.audit() == {"a/1": 3, "a/1/1": 4, "other": 1}
    assert whole_kv(engine, child, 37) == kv
    insert(engine, child, state(prompt, params, [first], 1))
    assert [first, *(step(engine)[child] for _ in range(5))] == expected
    engine.free(rest)


def test_every_return_of_pages_is_reported_once_they_can_be_had(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig.engine(page_size=16, pages=16)
    seen: list[int] = []
    engine.watch_pages(lambda: seen.append(engine.stats().free))
    handle, _ = start(engine, "a/1", state(rig.prompt(10)), 20)
    other, _ = start(engine, "b/1", state(rig.prompt(10)), 4)
    fork = engine.fork(handle, "a/1/0", 16, 16)
    engine.free(fork)
    assert seen == []
    engine.extend(handle, 40)
    step(engine)
    engine.free(other)
    assert seen == [13]

    def freed_meanwhile(*plan: Any) -> Any:
        engine.free(handle)
        assert seen == [13]
        return stub.next.launch(*plan)

    stub = ExecutorStub(engine, freed_meanwhile)
    step(engine)
    assert seen == [13, 16]
    engine.reserve("c/1", 20)
    spare = engine.reserve("spare", 32)
    engine.fork(engine.reserve("d/1", 16), "d/1/0", 16, 32, spare)
    assert seen == [13, 16, 12]
    engine.watch_pages(None)
    engine.close()
    assert seen == [13, 16, 12]
