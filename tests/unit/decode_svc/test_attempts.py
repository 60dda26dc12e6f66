"""Attempts: sizing, ownership, handing over to sequences, and the one way out."""

from dataclasses import replace

import pytest

from baton.engine.fake import FakeEngine
from baton.errors import BatonError, IncompleteTransfer, InvalidRequest, OutOfPages
from baton.lifecycle import State
from baton.request import FinishReason, Handoff, SamplingParams
from decode_svc.attempts import Attempts, DecodeAttempt, ledger_entries
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.reservation import ReservationTooLarge, size_reservation
from decode_svc.scheduler import DecodeSequence
from tests.decoding import greedy, prefill, take_pages

KEY = AttemptKey("r", 0)


def engine(**settings: int) -> FakeEngine:
    return FakeEngine(**{"page_size": 4, "pages": 16, "max_model_len": 40, **settings})


def committed(attempts: Attempts, ours: DecodeAttempt, **handoff: object) -> int:
    ready = replace(prefill([1, 2, 3, 4, 5]).handoff, **handoff)
    attempts.check_handoff(ours, ready, ())
    first = attempts.commit(ours, ready, 0.0, 0.0)
    return (first is not None) + attempts.pending_choices


def started(attempts: Attempts, request: Reserve) -> DecodeAttempt:
    attempt = take_pages(attempts, 1, request, 0.0)
    attempts.start(attempt, 0.0)
    return attempt


def forked(attempts: Attempts, ours: DecodeAttempt, ready: Handoff, now: float = 0.0) -> list[DecodeSequence]:
    """All sequences of an attempt, begun at once."""
    first = attempts.commit(ours, ready, 1.0, now)
    return [] if first is None else [first, *(attempts.fork(ours) for _ in range(attempts.pending_choices))]


def test_a_request_that_was_tried_before_is_older() -> None:
    attempts = Attempts(engine())
    tries = [("a", 0), ("b", 0), ("c", 1), ("d", 2), ("e", 1)]
    reserved = [take_pages(attempts, 1, Reserve(AttemptKey(*each), 4, 4, 1), 0.0) for each in tries]
    oldest_first = sorted(reserved, key=lambda each: each.order_key)
    assert [each.key.request_id for each in oldest_first] == ["d", "c", "e", "a", "b"]


@pytest.mark.parametrize(
    ("context", "new", "choices", "first", "tokens", "spare", "pages"),
    [
        (5, 3, 1, 100, 8, 0, 2),
        (8, 1, 1, 100, 9, 0, 3),
        (6, 6, 3, 100, 12, 4, 4),
        (6, 6, 64, 100, 12, 4, 4),
        (8, 8, 2, 100, 16, 0, 4),
        (5, 30, 1, 3, 8, 0, 2),
        (8, 30, 3, 8, 16, 0, 4),
        (29, 11, 64, 100, 40, 4, 11),
    ],
)
def test_a_reservation_holds_the_context_and_one_choices_first_outputs_and_the_page_that_forks_cant_share(
    context: int, new: int, choices: int, first: int, tokens: int, spare: int, pages: int
) -> None:
    need = size_reservation(engine().spec, Reserve(KEY, context, new, choices), first)
    assert (need.tokens, need.spare_tokens, need.pages) == (tokens, spare, pages)


@pytest.mark.parametrize(
    ("context", "new", "choices", "error", "words"),
    [
        (0, 1, 1, InvalidRequest, "reserve.context_tokens: .* got 0"),
        (4, 0, 1, InvalidRequest, "reserve.max_new_tokens: .* got 0"),
        (4, 4, 0, InvalidRequest, "reserve.choices: .* got 0"),
        (4, 4, 65, InvalidRequest, "reserve.choices: .*at most 64, got 65"),
        (40, 1, 1, ReservationTooLarge, "max_new_tokens: with 40 tokens of context it exceeds max_model_len 40, got 1"),
        (30, 11, 1, ReservationTooLarge, "max_new_tokens: with 30 tokens of context it exceeds max_model_len 40"),
    ],
)
def test_malformed_and_too_large_reservations_are_refused(
    context: int, new: int, choices: int, error: type[BatonError], words: str
) -> None:
    attempts = Attempts(engine())
    with pytest.raises(InvalidRequest, match=words) as refused:
        take_pages(attempts, 1, Reserve(KEY, context, new, choices), 0.0)
    assert type(refused.value) is error
    assert len(attempts) == 0


def test_a_request_that_does_not_fit_alone_into_an_empty_pool_is_refused_however_little_is_reserved() -> None:
    with pytest.raises(ReservationTooLarge, match="needs 10 pages, there are 9"):
        size_reservation(engine(pages=9).spec, Reserve(KEY, 10, 30, 1), 1)
    assert size_reservation(engine(pages=10).spec, Reserve(KEY, 10, 30, 1), 1).pages == 3
    many, one = (size_reservation(engine(pages=10).spec, Reserve(KEY, 30, 10, choices), 100) for choices in (64, 1))
    assert many == one


def test_a_reservation_takes_all_its_pages_or_none() -> None:
    attempts = Attempts(fake := engine())
    take_pages(attempts, 1, Reserve(KEY, 10, 26, 1), 0.0)
    with pytest.raises(OutOfPages, match=r"needs 8 pages, 7 of 16 are free"):
        take_pages(attempts, 1, Reserve(AttemptKey("other", 0), 9, 19, 2), 0.0)
    assert fake.audit() == {"r/0": 9}
    assert len(attempts) == 1


def test_further_choices_take_their_pages_one_by_one_and_the_last_takes_the_context_over() -> None:
    attempts = Attempts(fake := engine(pages=9))
    attempt = take_pages(attempts, 1, Reserve(KEY, 6, 6, 4), 0.0)
    assert fake.audit() == {"r/0": 3, "r/0/spare": 1}
    attempts.start(attempt, 0.0)
    ready = prefill([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=6, seed=1, n=4), choices=range(4))
    ready.write(fake, attempt.handle)
    first = attempts.commit(attempt, ready.handoff, 1.0, 2.0)
    assert first is not None
    assert (fake.audit(), attempts.held_sequences, attempts.pending_choices) == ({"r/0": 3, "r/0/context": 2}, 1, 3)
    sequences = [first]
    for pages, owner in ((2, "r/0/1"), (2, "r/0/2")):
        before = fake.stats().used
        assert attempts.fork_pages(attempt) == pages
        sequences.append(attempts.fork(attempt))
        assert fake.stats().used == before + pages
        assert owner in fake.audit()
    # The first choice has ended: its pages are another's, and the context is still there.
    fake.free(first.handle)
    attempts.end_sequence(first.id, 3.0)
    assert attempts.fork_pages(attempt) == 1
    sequences.append(attempts.fork(attempt))
    assert [each.state.choice_index for each in sequences] == [0, 1, 2, 3]
    assert (attempts.pending_choices, attempts.pending, attempt.pending) == (0, [], None)
    assert all(each.handle.capacity >= 12 for each in sequences)
    for each in sequences[1:]:
        expected, got = prefill([1, 2, 3, 4, 5, 6]).layers[0], fake.read_kv(each.handle, 0, range(6), range(2))
        assert [bytes(part.data) for part in got] == [bytes(part.data) for part in expected]
        fake.free(each.handle)
        attempts.end_sequence(each.id, 4.0)
    assert attempts.is_finished(attempt)
    attempts.end(attempt, 4.0)
    assert fake.audit() == {}


def test_a_fork_without_pages_changes_nothing_and_its_attempt_keeps_its_turn() -> None:
    attempts = Attempts(fake := engine(pages=5))
    attempt = started(attempts, Reserve(KEY, 6, 6, 3))
    ready = prefill([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=6, seed=1, n=3), choices=range(3)).handoff
    attempts.commit(attempt, ready, 0.0, 0.0)
    with pytest.raises(OutOfPages):
        attempts.fork(attempt)
    assert (attempts.pending_choices, attempts.pending, fake.stats().used) == (2, [attempt], 4)
    attempts.end(attempt, 0.0)
    assert (fake.audit(), attempts.pending) == ({}, [])


def test_a_pending_choice_that_is_cancelled_never_runs_and_the_last_gives_the_context_back() -> None:
    attempts = Attempts(fake := engine())
    attempt = started(attempts, Reserve(KEY, 5, 4, 3))
    ready = prefill([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, seed=1, n=3), choices=range(3)).handoff
    first = attempts.commit(attempt, ready, 0.0, 0.0)
    attempts.join(first.id, 0.0)
    fake.free(first.handle)
    attempts.end_sequence(first.id, 1.0)
    assert (attempts.is_finished(attempt), attempt.lifecycle.state) == (False, State.SLOT_WAIT)
    assert attempts.cancel_choice(attempt, 2, 1.0) == []
    assert set(fake.audit()) == {"r/0/context"}
    assert attempts.cancel_choice(attempt, 1, 1.0) == []
    assert attempts.is_finished(attempt)
    assert fake.audit() == {}
    assert attempts.end(attempt, 1.0) == []


def test_choices_that_ended_with_their_first_token_or_were_cancelled_are_not_decoded() -> None:
    attempts = Attempts(fake := engine())
    attempt = started(attempts, Reserve(KEY, 5, 4, 4))
    assert attempts.cancel_choice(attempt, 3, 0.0) == []
    ready = prefill([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, seed=1, n=4), choices=range(4)).handoff
    firsts = list(ready.first_tokens)
    firsts[0] = replace(firsts[0], finish=FinishReason.STOP)
    sequences = forked(attempts, attempt, replace(ready, first_tokens=tuple(firsts)))
    assert [each.state.choice_index for each in sequences] == [1, 2]
    assert fake.stats().used == 3 + 2
    dropped = attempts.cancel_choice(attempt, 1, 0.0)
    assert dropped == [sequences[0].id]
    assert not attempts.is_finished(attempt)
    assert attempts.end(attempt, 0.0) == [sequences[1].id]


def test_with_no_choice_left_nothing_is_decoded_and_the_end_frees_all() -> None:
    attempts = Attempts(fake := engine())
    attempt = started(attempts, Reserve(KEY, 5, 4, 1))
    first = replace(prefill([1, 2, 3, 4, 5]).handoff.first_tokens[0], finish=FinishReason.STOP)
    assert committed(attempts, attempt, first_tokens=(first,)) == 0
    assert attempts.end(attempt, 0.0) == []
    assert attempts.end(attempt, 0.0) == []
    assert attempt.lifecycle.state is State.ENDED
    assert fake.audit() == {}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"request_id": "other"}, IncompleteTransfer, "attempt"),
        ({"attempt": 1}, IncompleteTransfer, "attempt"),
        ({"prompt_ids": (1, 2, 3)}, IncompleteTransfer, "context is 3, reserved was 5"),
        ({"first_tokens": ()}, IncompleteTransfer, "first tokens is 0, reserved was 1"),
        ({"params": greedy(5)}, IncompleteTransfer, "allows 5 new tokens, reserved was 4"),
        ({"params": SamplingParams()}, IncompleteTransfer, "allows 0 new tokens"),
        ({"params": greedy(4, stop_token_ids=(5000,))}, InvalidRequest, "stop_token_ids.*5000"),
    ],
)
def test_a_handoff_of_another_shape_is_refused(change: dict[str, object], error: type[BatonError], words: str) -> None:
    attempts = Attempts(fake := engine())
    attempt = started(attempts, Reserve(KEY, 5, 4, 1))
    with pytest.raises(error, match=words):
        committed(attempts, attempt, **change)
    attempts.end(attempt, 0.0)
    assert fake.audit() == {}


def test_a_replay_reserves_what_is_left_and_continues_its_choice() -> None:
    attempts = Attempts(engine())
    attempt = started(attempts, Reserve(AttemptKey("r", 1), 7, 2, 1))
    params = SamplingParams(max_tokens=4, seed=3, n=4)
    ready = prefill([1, 2, 3, 4, 5], params, attempt=1, choices=[2], outputs=[8, 9]).handoff
    (sequence,) = forked(attempts, attempt, ready)
    assert sequence.state.choice_index == 2
    assert sequence.output_ids[:2] == [8, 9]
    assert attempts.find_owner(sequence.id) == (attempt, 2)


def test_every_state_has_the_deadline_of_the_request_or_its_own_if_that_comes_first() -> None:
    attempts = Attempts(engine())
    attempt = take_pages(attempts, 1, Reserve(KEY, 5, 4, 1, deadline_s=30.0), 100.0, 10.0)
    assert (attempt.lifecycle.state, attempt.lifecycle.deadline) == (State.RESERVED, 110.0)
    attempts.start(attempt, 105.0, 60.0)
    assert (attempt.lifecycle.state, attempt.lifecycle.deadline) == (State.TRANSFERRING, 130.0)
    (sequence,) = forked(attempts, attempt, prefill([1, 2, 3, 4, 5]).handoff, 107.0)
    assert (attempt.lifecycle.state, attempt.lifecycle.deadline) == (State.SLOT_WAIT, 130.0)
    attempts.join(sequence.id, 108.0)
    assert (attempt.lifecycle.state, attempt.lifecycle.deadline) == (State.DECODING, 130.0)
    attempts.end(attempt, 109.0)
    attempts.join(sequence.id, 110.0)
    assert attempt.lifecycle.ended
    sooner = take_pages(attempts, 1, Reserve(KEY, 5, 4, 1, deadline_s=30.0), 100.0, 10.0)
    attempts.start(sooner, 105.0, 60.0, deadline_s=3.0)
    assert sooner.lifecycle.deadline == 108.0


def test_an_attempt_is_where_the_foremost_of_its_choices_is() -> None:
    attempts = Attempts(fake := engine())
    attempt = started(attempts, Reserve(KEY, 5, 4, 3))
    ready = prefill([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, seed=1, n=3), choices=range(3))
    one, two, three = (each.id for each in forked(attempts, attempt, ready.handoff))
    assert attempt.lifecycle.state is State.SLOT_WAIT
    for sequence in (two, one):
        attempts.join(sequence, 1.0)
        assert attempt.lifecycle.state is State.DECODING
    assert attempts.held_sequences == 3
    attempts.cancel_choice(attempt, 1, 2.0)
    assert attempt.lifecycle.state is State.DECODING
    attempts.cancel_choice(attempt, 0, 2.0)
    assert attempt.lifecycle.state is State.SLOT_WAIT
    assert attempts.held_sequences == 1
    attempts.end(attempt, 3.0)
    assert three not in attempts._owners
    assert fake.audit() == {}


def test_the_context_takes_over_its_spare_though_others_wait_for_every_page() -> None:
    attempts = Attempts(fake := engine(pages=9))
    attempt = started(attempts, Reserve(KEY, 6, 6, 4))
    ready = prefill([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=6, seed=1, n=4), choices=range(4))
    # A page that is returned for a moment would be taken by others.
    fake.watch_pages(lambda: fake.reserve("thief", 4))
    assert attempts.commit(attempt, ready.handoff, 1.0, 2.0) is not None
    fake.watch_pages(None)
    assert set(fake.audit()) == {"r/0", "r/0/context"}


def test_the_ledger_names_every_handle_and_where_its_bytes_are() -> None:
    attempts = Attempts(fake := engine())
    asked = Reserve(AttemptKey("w", 0), 9, 30, 2, deadline_s=50.0)
    waiting = take_pages(attempts, 1, asked, 10.0, reserve_tokens=1)
    running = take_pages(attempts, 1, Reserve(KEY, 5, 4, 1), 10.0)
    attempts.start(running, 11.0)
    (sequence,) = forked(attempts, running, prefill([1, 2, 3, 4, 5]).handoff, 12.0)
    page = 4 * fake.spec.kv_format.token_bytes
    assert {entry.owner: entry.pages for entry in ledger_entries(attempts, fake, 13.0)} == fake.audit()
    first, spare, ours = ledger_entries(attempts, fake, 13.0)
    assert (first.owner, first.state, first.pages, first.bytes) == ("w/0", "reserved", 3, 3 * page)
    assert (first.age_s, first.deadline_s) == (3.0, 47.0)
    assert (spare.owner, spare.kind, spare.pages) == ("w/0/spare", "kv", 1)
    assert (ours.owner, ours.state, ours.age_s, ours.deadline_s) == ("r/0", "slot_wait", 1.0, None)
    attempts.join(sequence.id, 14.0)
    decoding = ledger_entries(attempts, fake, 16.0)[-1]
    assert (decoding.kind, decoding.state, decoding.age_s) == ("kv", "decoding", 2.0)
    attempts.end(waiting, 17.0)
    attempts.end(running, 17.0)
    assert ledger_entries(attempts, fake, 17.0) == []
    assert fake.audit() == {}
