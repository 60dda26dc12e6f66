"""The rule for waiters after a refusal: a test for each line of the tables in `router/placement/refusals.py`."""

from baton.lifecycle import Lifecycle, State
from router.placement.refusals import RefusalGate
from router.placement.waiter import PlacementRequest, Refusal, Waiter

NONE: frozenset[str] = frozenset()


def waiter(tokens: int, *, choices: int = 1, too_small: tuple[str, ...] = ()) -> Waiter:
    lifecycle = Lifecycle(State.QUEUED, 0.0)
    request = PlacementRequest(f"{tokens}", 0, "", lifecycle, tokens, 4, tuple(range(choices)), is_retry=False)
    return Waiter(request, 0.0, Refusal(too_small_reasons=dict.fromkeys(too_small, "too small")))


def ask(gate: RefusalGate, asking: Waiter, refusal: Refusal | None, now: float = 0.0) -> None:
    """Let the waiter ask; without a refusal it gets pages."""
    gate.begin_reserving(asking)
    if refusal is None:
        gate.record_grant(asking)
    else:
        asking.refusal = refusal
        gate.record_refusal(asking, now)
    gate.end_reserving(asking)


def refused(*, room: int = 50) -> tuple[RefusalGate, Waiter]:
    """A gate whose head of line, of 100 tokens, was refused in this epoch, and the head of line."""
    gate, head = RefusalGate(), waiter(100)
    ask(gate, head, Refusal(reservable_tokens=room))
    gate.record_head_of_line(head, 0.0)
    return gate, head


def restricted(gate: RefusalGate, tokens: int, *, room: int = 0, now: float = 0.0) -> Waiter:
    """A waiter that worker "a" is too small for, and that the others have refused."""
    waiting = waiter(tokens, too_small=("a",))
    answer = Refusal({"a": "too small"}, reservable_tokens=room, excluded_workers=frozenset({"a"}))
    ask(gate, waiting, answer, now)
    return waiting


def test_without_a_refusal_all_may_ask_at_the_same_time() -> None:
    gate, first = RefusalGate(), waiter(100)
    gate.begin_reserving(first)
    assert gate.may_reserve(waiter(1000), None, NONE)
    assert not gate.head_of_line_waits


def test_in_the_epoch_of_the_refusal_those_that_fit_the_room_may_ask() -> None:
    gate, head = refused(room=50)
    assert gate.head_of_line_waits
    assert gate.may_reserve(waiter(50), head, NONE)
    assert not gate.may_reserve(waiter(51), head, NONE)
    assert not gate.may_reserve(head, head, NONE)


def test_in_a_later_epoch_the_head_of_line_may_ask_and_those_that_fit() -> None:
    gate, head = refused(room=50)
    gate.begin_epoch()
    assert gate.may_reserve(head, head, NONE)
    assert gate.may_reserve(waiter(50), head, NONE)
    assert not gate.may_reserve(waiter(51), head, NONE)


def test_after_a_refusal_one_waiter_asks_at_a_time() -> None:
    gate, head = refused(room=50)
    gate.begin_reserving(small := waiter(10))
    assert not gate.may_reserve(waiter(10), head, NONE)
    gate.end_reserving(small)
    assert gate.may_reserve(waiter(10), head, NONE)


def test_pages_for_the_head_of_line_end_the_state() -> None:
    gate, head = refused(room=50)
    gate.begin_epoch()
    ask(gate, head, None)
    assert not gate.head_of_line_waits
    assert gate.may_reserve(waiter(1000), None, NONE)


def test_pages_for_an_overtaker_make_the_room_smaller() -> None:
    gate, head = refused(room=50)
    ask(gate, waiter(20), None)
    assert gate.head_of_line_waits
    assert gate.may_reserve(waiter(30), head, NONE)
    assert not gate.may_reserve(waiter(31), head, NONE)


def test_the_refusal_of_an_overtaker_halves_the_room() -> None:
    gate, head = refused(room=50)
    ask(gate, waiter(40), Refusal(reservable_tokens=50))
    assert gate.may_reserve(waiter(20), head, NONE)
    assert not gate.may_reserve(waiter(21), head, NONE)


def test_a_refused_restricted_waiter_and_its_like_ask_again_in_the_next_epoch() -> None:
    gate = RefusalGate()
    waiting = restricted(gate, 40, room=50)
    same, fits, free = (waiter(60, too_small=("a",)), waiter(50, too_small=("a",)), waiter(100))
    assert not gate.may_reserve(waiting, None, NONE)
    assert not gate.may_reserve(same, None, NONE)
    assert gate.may_reserve(fits, None, NONE)
    assert gate.may_reserve(free, None, NONE), "it can also ask worker a"
    assert not gate.may_reserve(free, None, frozenset({"a"})), "worker a is isolated"
    gate.begin_epoch()
    assert all(gate.may_reserve(each, None, NONE) for each in (waiting, same))


def test_a_refusal_for_the_number_of_choices_stops_those_with_several() -> None:
    gate = RefusalGate()
    many = waiter(10, choices=8)
    ask(gate, many, Refusal(reservable_tokens=100, refused_for_choices=True))
    assert not gate.may_reserve(many, None, NONE)
    assert not gate.may_reserve(waiter(10, choices=2), None, NONE)
    assert gate.may_reserve(waiter(10), None, NONE)
    gate.begin_epoch()
    assert gate.may_reserve(many, None, NONE)


def test_the_one_that_has_waited_longer_asks_first_of_head_of_line_and_restricted_waiter() -> None:
    for head_since, restricted_goes_first in ((1.0, False), (3.0, True)):
        gate = RefusalGate()
        waiting = restricted(gate, 100, now=2.0)
        head = waiter(100)
        ask(gate, head, Refusal(reservable_tokens=0))
        gate.record_head_of_line(head, head_since)
        assert not gate.restricted_may_reserve(head), "it was refused in this epoch"
        gate.begin_epoch()
        assert gate.restricted_waiter is waiting
        assert gate.restricted_may_reserve(head) is restricted_goes_first


def test_a_waiter_that_has_left_is_forgotten() -> None:
    gate, head = refused()
    waiting = restricted(gate, 100)
    gate.forget(head)
    gate.forget(waiting)
    assert not gate.head_of_line_waits
    assert gate.restricted_waiter is None
