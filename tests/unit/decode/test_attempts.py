"""Attempts: sizing, ownership, handing over to sequences, and the one way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.fake import FakeEngine
from baton.errors import BatonError, IncompleteTransfer, InvalidRequest, OutOfPages
from baton.request import FinishReason, SamplingParams
from decode_svc.attempts import Attempt, Attempts, AttemptState, Refused, sizes
from decode_svc.messages import AttemptKey, Reserve
from tests.decoding import greedy, prefill

KEY = AttemptKey("r", 0)


def engine(**settings: int) -> FakeEngine:
    return FakeEngine(**{"page_size": 4, "pages": 16, "max_model_len": 40, **settings})


def committed(attempts: Attempts, ours: Attempt, **handoff: object) -> int:
    ready = replace(prefill([1, 2, 3, 4, 5]).handoff, **handoff)
    return len(attempts.commit(ours, ready, 0.0, 0.0))


@pytest.mark.parametrize(
    ("context", "new", "choices", "tokens", "spare", "pages"),
    [
        (5, 3, 1, 8, 4, 2),
        (8, 1, 1, 9, 4, 3),
        (6, 6, 3, 12, 8, 7),
        (8, 8, 2, 16, 8, 6),
        (30, 100, 1, 40, 12, 10),
    ],
)
def test_a_reservation_holds_context_and_new_tokens_and_shares_only_full_pages(
    context: int, new: int, choices: int, tokens: int, spare: int, pages: int
) -> None:
    need = sizes(engine().spec, Reserve(KEY, context, new, choices))
    assert (need.tokens, need.spare_tokens, need.pages) == (tokens, spare, pages)


@pytest.mark.parametrize(
    ("context", "new", "choices", "words"),
    [
        (0, 1, 1, "context_tokens: .* got 0"),
        (40, 1, 1, "context_tokens: .*at most 39, got 40"),
        (4, 0, 1, "max_new_tokens: .* got 0"),
        (4, 4, 0, "choices: .* got 0"),
        (4, 4, 65, "choices: .*at most 64, got 65"),
        (4, 36, 9, "needs 82 pages, there are 16"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(context: int, new: int, choices: int, words: str) -> None:
    attempts = Attempts(engine())
    with pytest.raises(Refused, match=words):
        attempts.reserve(1, Reserve(KEY, context, new, choices))
    assert len(attempts) == 0


def test_a_reservation_takes_all_its_pages_or_none() -> None:
    fake = engine()
    attempts = Attempts(fake)
    attempts.reserve(1, Reserve(KEY, 10, 26, 1))
    with pytest.raises(OutOfPages, match=r"needs 8 pages, 7 of 16 are free"):
        attempts.reserve(1, Reserve(AttemptKey("other", 0), 8, 12, 2))
    assert fake.audit() == {"r/0": 9}
    assert len(attempts) == 1


def test_a_live_name_is_not_given_twice_but_each_session_has_its_own() -> None:
    fake = engine()
    attempts = Attempts(fake)
    first = attempts.reserve(1, Reserve(KEY, 4, 4, 1))
    with pytest.raises(Refused, match="attempt r/0 is reserved already"):
        attempts.reserve(1, Reserve(KEY, 4, 4, 1))
    assert attempts.reserve(2, Reserve(KEY, 4, 4, 1)) is not first
    attempts.end(first)
    attempts.reserve(1, Reserve(KEY, 4, 4, 1))
    assert fake.stats().used == 4


def test_choices_share_the_prompt_and_never_need_more_pages_than_reserved() -> None:
    fake = engine(pages=9)
    attempts = Attempts(fake)
    attempt = attempts.reserve(1, Reserve(KEY, 6, 6, 4))
    used = fake.stats().used
    attempts.start(attempt)
    ready = prefill([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=6, seed=1, n=4), choices=range(4))
    ready.write(fake, attempt.handle)
    sequences = attempts.commit(attempt, ready.handoff, 1.0, 2.0)
    assert [each.state.choice_index for each in sequences] == [0, 1, 2, 3]
    assert fake.stats().used == used
    assert all(each.handle.capacity >= 12 for each in sequences)
    assert set(fake.audit()) == {"r/0", "r/0/1", "r/0/2", "r/0/3"}
    for each in sequences:
        fake.free(each.handle)
        attempts.sequence_ended(each.id)
    assert attempts.over(attempt)
    attempts.end(attempt)
    assert fake.audit() == {}


def test_choices_that_ended_with_their_first_token_or_were_cancelled_are_not_decoded() -> None:
    fake = engine()
    attempts = Attempts(fake)
    attempt = attempts.reserve(1, Reserve(KEY, 5, 4, 4))
    attempts.start(attempt)
    assert attempts.cancel_choice(attempt, 3) == []
    ready = prefill([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, seed=1, n=4), choices=range(4)).handoff
    firsts = list(ready.first_tokens)
    firsts[0] = replace(firsts[0], finish=FinishReason.STOP)
    sequences = attempts.commit(attempt, replace(ready, first_tokens=tuple(firsts)), 0.0, 0.0)
    assert [each.state.choice_index for each in sequences] == [1, 2]
    assert fake.stats().used == 3 + 2
    dropped = attempts.cancel_choice(attempt, 1)
    assert dropped == [sequences[0].id]
    assert not attempts.over(attempt)
    assert attempts.end(attempt) == [sequences[1].id]


def test_with_no_choice_left_nothing_is_decoded_and_the_end_frees_all() -> None:
    fake = engine()
    attempts = Attempts(fake)
    attempt = attempts.reserve(1, Reserve(KEY, 5, 4, 1))
    attempts.start(attempt)
    first = replace(prefill([1, 2, 3, 4, 5]).handoff.first_tokens[0], finish=FinishReason.STOP)
    assert committed(attempts, attempt, first_tokens=(first,)) == 0
    assert attempts.end(attempt) == []
    assert attempts.end(attempt) == []
    assert attempt.state is AttemptState.ENDED
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
        ({"prompt_ids": (1, 2, 3, 4, 1000)}, InvalidRequest, "prompt_token_ids.*1000"),
    ],
)
def test_a_handoff_that_is_not_what_was_reserved_is_refused(
    change: dict[str, object], error: type[BatonError], words: str
) -> None:
    fake = engine()
    attempts = Attempts(fake)
    attempt = attempts.reserve(1, Reserve(KEY, 5, 4, 1))
    attempts.start(attempt)
    with pytest.raises(error, match=words):
        committed(attempts, attempt, **change)
    attempts.end(attempt)
    assert fake.audit() == {}


def test_a_replay_reserves_what_is_left_and_continues_its_choice() -> None:
    attempts = Attempts(engine())
    attempt = attempts.reserve(1, Reserve(AttemptKey("r", 1), 7, 2, 1))
    attempts.start(attempt)
    params = SamplingParams(max_tokens=4, seed=3, n=4)
    ready = prefill([1, 2, 3, 4, 5], params, attempt=1, choices=[2], outputs=[8, 9]).handoff
    (sequence,) = attempts.commit(attempt, ready, 0.0, 0.0)
    assert sequence.state.choice_index == 2
    assert sequence.output_ids[:2] == [8, 9]
    assert attempts.owner(sequence.id) == (attempt, 2)
