"""The state machine that router, prefill and decode share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import EngineError
from baton.lifecycle import FIRST, Lifecycle, State

PATHS = {
    "router": "queued reserving queued reserving prefilling transferring decoding",
    "router without decode": "queued prefilling",
    "prefill": "preparing prefilling held",
    "decode": "reserved transferring slot_wait decoding slot_wait decoding",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_each_part_goes_its_way_and_may_end_anywhere(path: str) -> None:
    states = [State(name) for name in path.split()]
    for length in range(1, len(states) + 1):
        life = Lifecycle(states[0], 0.0)
        for state in states[1:length]:
            life.enter(state, 1.0)
        assert life.end(2.0)
        assert not life.end(3.0)
        assert life.since == 2.0


def test_a_step_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    life = Lifecycle(State.QUEUED, 0.0)
    with pytest.raises(EngineError, match="from queued to decoding"):
        life.enter(State.DECODING, 1.0)
    assert (life.state, life.since) == (State.QUEUED, 0.0)
    with pytest.raises(EngineError, match="can't begin in state decoding"):
        Lifecycle(State.DECODING, 0.0)


@given(
    st.sampled_from(sorted(FIRST, key=str)),
    st.lists(st.tuples(st.sampled_from(list(State)), st.floats(0, 100), st.floats(0, 50) | st.just(math.inf))),
    st.floats(0, 100) | st.just(math.inf),
)
def test_every_state_has_the_nearer_deadline_and_the_end_is_final(
    first: State, steps: list[tuple[State, float, float]], request_deadline: float
) -> None:
    life, now = Lifecycle(first, 0.0, request_deadline=request_deadline), 0.0
    for state, later, limit_s in steps:
        now += later
        before = life.state
        try:
            life.enter(state, now, limit_s)
        except EngineError:
            assert life.state is before
            continue
        assert before is not State.ENDED
        assert life.deadline == min(request_deadline, now + limit_s)
        assert life.is_overdue(life.deadline)
        assert life.is_request_deadline() == (request_deadline < math.inf and request_deadline <= now + limit_s)
    assert life.end(now)
    assert not life.is_overdue(now + 1e9)
    for state in State:
        with pytest.raises(EngineError):
            life.enter(state, now)
