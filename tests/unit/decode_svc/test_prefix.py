"""Reservations that pin what is here already, commits that are held against it, and what ends leave behind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import IncompleteTransfer, InvalidRequest
from baton.request import CachePolicy, SamplingParams
from decode_svc.attempts import Attempts, DecodeAttempt, PublishedBlocks
from decode_svc.messages import AttemptKey, Reserve
from tests.decoding import alone, digests, greedy, prefill, take_pages
from tests.property.attempts import check_pool, held_payloads, payloads

PROMPT = list(range(5, 15))
PARAMS = greedy(8)
SALT = b"salt"


def engine(**settings: int) -> FakeEngine:
    return FakeEngine(**{"page_size": 4, "pages": 16, "block_size": 4, "max_model_len": 60, **settings})


class Worker:
    """Attempts over a fake engine, each given the KV that it has not pinned."""

    def __init__(self, **settings: int) -> None:
        self.engine = engine(**settings)
        self.published: list[PublishedBlocks] = []
        self.attempts = Attempts(self.engine, self.published.append)

    def reserve(self, name: str, prompt: Sequence[int] = PROMPT, **change: Any) -> DecodeAttempt:
        names = b"".join(digests(self.engine, prompt, SALT))
        request = Reserve(AttemptKey(name, 0), len(prompt), 8, 1, prefix_digests=names, cache_salt=SALT)
        return take_pages(self.attempts, 1, replace(request, **change), 0.0)

    def commit(
        self, attempt: DecodeAttempt, prompt: Sequence[int] = PROMPT, params: SamplingParams = PARAMS
    ) -> list[Any]:
        ready = prefill(prompt, params, request_id=attempt.key.request_id, choices=range(params.n))
        self.attempts.start(attempt, 0.0)
        ready.write(self.engine, attempt.handle, attempt.handle.cached_tokens)
        names = digests(self.engine, prompt, SALT) if self.attempts.needs_digests(attempt) else None
        self.attempts.check_handoff(attempt, ready.handoff, names or ())
        if names is not None and self.attempts.may_publish(attempt):
            self.engine.publish(attempt.handle, names)
        first = self.attempts.commit(attempt, ready.handoff, 0.0, 0.0, names)
        return (
            []
            if first is None
            else [first, *(self.attempts.fork(attempt) for _ in range(self.attempts.pending_choices))]
        )

    def run(self, sequence: Any, tokens: int) -> None:
        """Decode so many tokens, as the engine thread does."""
        self.engine.insert(sequence)
        for _ in range(tokens):
            for own, infos in self.engine.launch().result().sequences:
                assert own is sequence
                sequence.hasher.extend([info.token_id for info in infos])

    def held(self, ids: Sequence[int]) -> int:
        return self.engine.match_prefix(digests(self.engine, ids, SALT))

    def check(self) -> None:
        """Nobody holds anything, and what is left in the pool is what it is named."""
        assert self.engine.audit() == {}
        check_pool(self.engine, [([*PROMPT, *alone(PROMPT, greedy(30))], SALT)])


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_blocks_brought_by_a_commit_are_pinned_by_the_next_while_it_runs(worker: Worker) -> None:
    first = worker.reserve("a")
    assert first.handle.cached_tokens == 0
    (sequence,) = worker.commit(first)
    second = worker.reserve("b")
    assert second.handle.cached_tokens == 8
    assert worker.engine.stats().used == 5 + 3
    worker.commit(second)
    assert worker.engine.stats().used == 5 + 3
    for each in (first, second):
        worker.attempts.end(each, 1.0)
    assert not sequence.handle.alive
    worker.check()


def test_the_end_leaves_what_is_final_and_the_next_turn_finds_its_answer(worker: Worker) -> None:
    attempt = worker.reserve("a")
    (sequence,) = worker.commit(attempt)
    worker.run(sequence, 7)
    ids = [*PROMPT, *sequence.output_ids]
    assert ids == [*PROMPT, *alone(PROMPT, greedy(8))]
    assert worker.attempts.end(attempt, 1.0) == [sequence.id]
    (left,) = worker.published
    assert (left.owner, len(left.digests), left.context_blocks, left.new) == ("a/0", 4, 2, 2)
    # 18 tokens, of which the last has no KV.
    assert worker.held(ids) == 16
    turn = [*ids, 1, 2, 3]
    assert worker.reserve("b", turn).handle.cached_tokens == 16
    worker.attempts.end(next(iter(worker.attempts)), 2.0)
    worker.check()


@pytest.mark.parametrize("page_size", [2, 3, 8, 12, 32, 256])
def test_all_full_blocks_are_found_again_whatever_the_size_of_pages(page_size: int) -> None:
    worker = Worker(page_size=page_size, pages=40)
    attempt = worker.reserve("a")
    (sequence,) = worker.commit(attempt)
    worker.run(sequence, 7)
    worker.attempts.end(attempt, 1.0)
    ids = [*PROMPT, *sequence.output_ids]
    again = worker.reserve("b", ids)
    assert again.handle.cached_tokens == 16
    (sequence,) = worker.commit(again, ids)
    blocks = len(ids) // 4
    assert held_payloads(worker.engine, sequence.handle, blocks) == payloads(worker.engine, ids)[:blocks]
    worker.attempts.end(again, 2.0)
    worker.check()


def test_choices_share_what_was_pinned_and_write_only_their_own_pages() -> None:
    worker = Worker(pages=13)
    params = SamplingParams(max_tokens=8, seed=3, n=3)
    worker.attempts.end(worker.reserve("a"), 0.0)
    first = worker.reserve("b")
    worker.commit(first)
    worker.attempts.end(first, 0.0)
    attempt = worker.reserve("c", choices=3)
    assert attempt.handle.cached_tokens == 8
    assert worker.engine.stats().used == 2 + 3 + 1
    sequences = worker.commit(attempt, params=params)
    assert worker.engine.stats().used == 2 + 3 * 3
    for each in sequences:
        worker.engine.insert(each)
    for _ in range(7):
        for (_, (token,)), sequence in zip(worker.engine.launch().result().sequences, sequences, strict=True):
            sequence.hasher.extend([token.token_id])
    for choice, each in enumerate(sequences):
        assert each.output_ids == alone(PROMPT, params, choice)
    worker.attempts.end(attempt, 1.0)
    chains = [([*PROMPT, *each.output_ids], SALT) for each in sequences]
    assert [worker.held(ids) for ids, _ in chains] == [16] * 3
    check_pool(worker.engine, chains)
    worker.check()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_router_that_named_other_blocks_fails_the_attempt_and_publishes_nothing(pinned: bool) -> None:
    worker, other = Worker(), list(range(105, 115))
    first = worker.reserve("a")
    if pinned:
        worker.commit(first)
    worker.attempts.end(first, 0.0)
    attempt = worker.reserve("b", other, prefix_digests=b"".join(digests(worker.engine, PROMPT, SALT)))
    assert attempt.handle.cached_tokens == (8 if pinned else 0)
    if pinned:
        with pytest.raises(IncompleteTransfer, match="b/0: the 8 pinned tokens are not those of the handoff"):
            worker.commit(attempt, other)
    else:
        worker.commit(attempt, other)
    worker.attempts.end(attempt, 1.0)
    assert worker.held(other) == (0 if pinned else 8)
    worker.check()


def test_the_salt_of_another_tenant_finds_nothing_and_fails_where_it_is_pinned(worker: Worker) -> None:
    first = worker.reserve("a")
    worker.commit(first)
    names = b"".join(digests(worker.engine, PROMPT, b"other"))
    assert worker.reserve("b", cache_salt=b"other", prefix_digests=names).handle.cached_tokens == 0
    liar = worker.reserve("c", cache_salt=b"other")
    worker.attempts.start(liar, 0.0)
    ready = prefill(PROMPT, greedy(8), request_id="c")
    with pytest.raises(IncompleteTransfer, match="pinned"):
        worker.attempts.check_handoff(liar, ready.handoff, digests(worker.engine, PROMPT, b"other"))


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [(CachePolicy.READ_WRITE, 8, 8), (CachePolicy.WRITE, 8, 0), (CachePolicy.READ, 0, 0), (CachePolicy.OFF, 0, 0)],
)
def test_a_policy_says_who_reads_and_who_writes(worker: Worker, policy: CachePolicy, first: int, second: int) -> None:
    attempt = worker.reserve("a", cache=policy)
    (sequence,) = worker.commit(attempt)
    assert worker.held(PROMPT) == first
    assert worker.reserve("b", cache=policy).handle.cached_tokens == second
    assert (sequence.hasher is not None) is policy.writes
    worker.attempts.end(attempt, 1.0)
    assert bool(worker.published) is policy.writes


def test_after_a_fault_of_the_engine_an_end_leaves_nothing_more(worker: Worker) -> None:
    attempt = worker.reserve("a")
    (sequence,) = worker.commit(attempt)
    worker.run(sequence, 7)
    worker.attempts.end(attempt, 1.0, publish=False)
    assert worker.held([*PROMPT, *sequence.output_ids]) == 8
    assert worker.published == []
    worker.check()


def test_a_replay_finds_prompt_and_outputs(worker: Worker) -> None:
    attempt = worker.reserve("a")
    (sequence,) = worker.commit(attempt)
    worker.run(sequence, 5)
    outputs = list(sequence.output_ids)
    worker.attempts.end(attempt, 1.0)
    context = [*PROMPT, *outputs]
    again = worker.reserve("a", context, key=AttemptKey("a", 1), max_new_tokens=2)
    assert again.handle.cached_tokens == 12
    ready = prefill(PROMPT, greedy(8), request_id="a", attempt=1, outputs=outputs)
    worker.attempts.start(again, 2.0)
    ready.write(worker.engine, again.handle, 12)
    sequence = worker.attempts.commit(again, ready.handoff, 0.0, 2.0, digests(worker.engine, context, SALT))
    assert sequence is not None
    worker.run(sequence, 1)
    assert sequence.output_ids == alone(PROMPT, greedy(8))
    worker.attempts.end(again, 3.0)
    worker.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix_digests": b"x" * 33}, "prefix_digests: its length must be a multiple of 32 bytes, got 33"),
        ({"prefix_digests": b"x" * 96}, "prefix_digests: must have at most one digest for each of the 2 full blocks"),
        ({"cache_salt": b"x" * 65}, "cache_salt: must have at most 64 bytes, got 65"),
    ],
)
def test_malformed_names_are_refused_by_name(worker: Worker, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        worker.reserve("a", **change)
    worker.check()


def test_a_handle_of_another_life_is_left_alone(worker: Worker) -> None:
    """The engine thread has published all that it has freed."""
    attempt = worker.reserve("a")
    (sequence,) = worker.commit(attempt)
    handle: KvHandle = sequence.handle
    worker.engine.free(handle)
    worker.attempts.end(attempt, 1.0)
    assert worker.published == []
    worker.check()
