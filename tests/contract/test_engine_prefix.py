"""Contract of every engine for published prefixes: found, shared, cut by a copy, evicted; and never a wrong token."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.engine.contract import ChunkResult, Engine, KvHandle
from baton.errors import EngineError, OutOfPages
from baton.request import SequenceState
from tests.contract.engines import MIXED, Rig, chunks, generate, ignore, state, step, whole_kv
from tests.decoding import digests
from tests.engine_calls import insert, prefill_chunk

SIZES = [
    pytest.param({"page_size": 16, "block_size": 16}, id="page=block"),
    pytest.param({"page_size": 32, "block_size": 8}, id="page>block"),
    pytest.param({"page_size": 8, "block_size": 32}, id="block>page"),
    pytest.param({"page_size": 8, "block_size": 12}, id="page and block without a common size"),
]


def compute(engine: Engine, handle: KvHandle, wanted: SequenceState, chunk: int = 40) -> ChunkResult:
    """Prefill what is not cached, and sample with all alternatives' log-probabilities."""
    ids = [*wanted.prompt_ids, *wanted.output_ids]
    result = ChunkResult()
    for start, end in chunks(len(ids) - handle.cached_tokens, chunk):
        start, end = start + handle.cached_tokens, end + handle.cached_tokens
        sample = [wanted] if end == len(ids) else ()
        result = prefill_chunk(engine, handle, ids, start, end, on_layer=ignore, sample=sample)
    return result


def leave(engine: Engine, ids: Sequence[int], owner: str = "first") -> None:
    """Compute the KV of `ids` and leave its blocks for others."""
    handle = engine.reserve(owner, len(ids))
    compute(engine, handle, state(ids))
    engine.publish(handle, digests(engine, ids))
    engine.free(handle)


def whole(engine: Engine, tokens: int, sizes: dict[str, int]) -> int:
    """Tokens of `tokens` that fill units."""
    return tokens - tokens % math.lcm(sizes["page_size"], sizes["block_size"])


@pytest.mark.parametrize("sizes", SIZES)
def test_output_with_a_prefix_equals_the_output_without(rig: Rig, sizes: dict[str, int]) -> None:
    prompt = rig.prompt(110)
    wanted = [state(prompt, params) for params in MIXED]
    plain = rig.engine(**sizes, pages=96)
    expected, exact = [], []
    for one in wanted:
        handle = plain.reserve("plain", 130)
        exact.append(compute(plain, handle, one))
        plain.free(handle)
        expected.append(generate(plain, one, 6))
    engine = rig.engine(**sizes, pages=96)
    leave(engine, prompt)
    full = whole(engine, 110, sizes)
    assert full == engine.match_prefix(digests(engine, prompt))
    for most in (0, 1, 15, 40, 64, 77, full - 1, full, 109):
        for one, first, outputs in zip(wanted, exact, expected, strict=True):
            handle = engine.reserve("again", 130, digests(engine, prompt), most)
            assert handle.cached_tokens == min(most, full)
            result = compute(engine, handle, one)
            assert result.tokens[0].token_id == first.tokens[0].token_id
            insert(engine, handle, state(prompt, one.params, [result.tokens[0].token_id]))
            tokens = [result.tokens[0].token_id, *(step(engine)[handle] for _ in range(5))]
            assert tokens == outputs
            engine.free(handle)
            engine.launch()


@pytest.mark.parametrize("sizes", SIZES)
def test_a_prompt_that_goes_on_differently_finds_the_blocks_in_common(rig: Rig, sizes: dict[str, int]) -> None:
    engine = rig.engine(**sizes, pages=96)
    first = rig.prompt(110)
    leave(engine, first)
    for common in (0, 11, 24, 50, 96):
        prompt = [*first[:common], *[(token + 1) % rig.vocab for token in first[common:]]]
        handle = engine.reserve("other", 120, digests(engine, prompt), 109)
        assert handle.cached_tokens == common - common % sizes["block_size"] or common == 96
        assert handle.cached_tokens <= common
        expected = generate(rig.engine(**sizes, pages=96), state(prompt), 4)
        result = compute(engine, handle, state(prompt))
        insert(engine, handle, state(prompt, outputs=[result.tokens[0].token_id]))
        assert [result.tokens[0].token_id, *(step(engine)[handle] for _ in range(3))] == expected
        engine.publish(handle, digests(engine, prompt))
        engine.free(handle)
        engine.launch()
        # Their common tokens are as before, and both continue from them.
        assert engine.match_prefix(digests(engine, first)) == whole(engine, 110, sizes)
        assert engine.match_prefix(digests(engine, prompt)) == whole(engine, 110, sizes)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_handle_can_share_what_was_published_after_its_reservation(rig: Rig, sizes: dict[str, int]) -> None:
    engine, prompt = rig.engine(**sizes, pages=96), rig.prompt(110)
    expected = generate(rig.engine(**sizes, pages=96), state(prompt), 5)
    late = engine.reserve("late/0", 120)
    leave(engine, prompt)
    names, full, free = digests(engine, prompt), whole(engine, 109, sizes), engine.stats().free
    with engine._kv.pool.pin(late):
        assert engine.share_prefix(late, names, 109) == 0, "it is in use"
    for _ in range(2):
        assert engine.share_prefix(late, names, 109) == full
        assert engine.stats().free == free + full // sizes["page_size"]
    result = prefill_chunk(engine, late, prompt, full, 110, on_layer=ignore, sample=[state(prompt)])
    insert(engine, late, state(prompt, outputs=[result.tokens[0].token_id]))
    assert [result.tokens[0].token_id, *(step(engine)[late] for _ in range(4))] == expected
    engine.free(late)
    engine.launch()
    assert engine.share_prefix(late, names, 109) == 0, "it is dead"


def test_pages_are_shared_with_a_sequence_that_still_runs(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=16)
    prompt = rig.prompt(70)
    expected = generate(rig.engine(), state(prompt), 5)
    first = engine.reserve("a/1", 80)
    token = compute(engine, first, state(prompt)).tokens[0].token_id
    insert(engine, first, state(prompt, outputs=[token]))
    engine.publish(first, digests(engine, prompt))
    second = engine.reserve("b/1", 80, digests(engine, prompt), 69)
    assert second.cached_tokens == 64
    assert engine.audit() == {"a/1": 5, "b/1": 5}
    assert engine.stats().used == 6
    assert compute(engine, second, state(prompt)).tokens[0].token_id == token
    insert(engine, second, state(prompt, outputs=[token]))
    outputs = {first: [token], second: [token]}
    for _ in range(2):
        for handle, each in step(engine).items():
            outputs[handle].append(each)  # type: ignore[index]
    engine.free(first)
    for _ in range(2):
        outputs[second].append(step(engine)[second])
    assert outputs[second] == expected
    assert outputs[first] == expected[:3]


def test_published_pages_refuse_writes(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=16)
    prompt = rig.prompt(40)
    heads = range(engine.spec.kv_format.heads)
    handle = engine.reserve("a/1", 48)
    compute(engine, handle, state(prompt))
    parts = engine.read_kv(handle, 0, range(8), heads)
    engine.write_kv(handle, 0, 0, 0, parts)
    engine.publish(handle, digests(engine, prompt))
    sharer = engine.reserve("b/1", 48, digests(engine, prompt))
    kv = whole_kv(engine, sharer, 32)
    for each in (handle, sharer):
        with pytest.raises(EngineError, match="shared or published"):
            engine.write_kv(each, 0, 20, 0, parts)
        with pytest.raises(EngineError, match="shared or published"):
            engine.write_blocks(each, 16, engine.read_blocks(each, 16, 2))
        with pytest.raises(EngineError, match="shared or published"):
            prefill_chunk(engine, each, prompt, 31, 40, on_layer=ignore)
        engine.write_kv(each, 0, 32, 0, parts)
    engine.free(sharer)
    with pytest.raises(EngineError, match="shared or published"):
        engine.write_kv(handle, 0, 0, 0, parts)
    assert whole_kv(engine, handle, 32) == kv


def test_a_sequence_that_is_freed_leaves_its_published_pages_cached_for_its_replay(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=10)
    prompt = rig.prompt(50)
    expected = generate(rig.engine(), state(prompt), 18)
    handle = engine.reserve("a/1", 68)
    outputs = [compute(engine, handle, state(prompt)).tokens[0].token_id]
    insert(engine, handle, state(prompt, outputs=outputs))
    outputs += [step(engine)[handle] for _ in range(15)]
    # All but the last token have KV: 65 tokens.
    names = digests(engine, [*prompt, *outputs[:-1]])
    engine.free(handle, names)
    stats = engine.stats()
    assert (stats.used, stats.free, stats.cached) == (0, 6, 4)
    replay = engine.reserve("a/2", 68, names, 65)
    assert replay.cached_tokens == 64
    outputs.append(compute(engine, replay, state(prompt, outputs=outputs)).tokens[0].token_id)
    insert(engine, replay, state(prompt, outputs=outputs))
    outputs.append(step(engine)[replay])
    assert outputs == expected


def test_a_fork_of_a_shared_prefix_and_its_spare(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=12)
    prompt = rig.prompt(50)
    leave(engine, prompt)
    names = digests(engine, prompt)
    parent, spare = engine.reserve("a/1", 60, names, 49), engine.reserve("a/1/spare", 16)
    first = compute(engine, parent, state(prompt)).tokens[0].token_id
    child = engine.fork(parent, "a/1/0", 50, 60, spare)
    assert engine.audit() == {"a/1": 4, "a/1/0": 4}
    assert child.cached_tokens == 0
    with pytest.raises(EngineError, match="in use"):
        engine.fork(parent, "a/1/1", 50, 60, engine.reserve("shared", 16, names))
    expected = generate(rig.engine(), state(prompt), 4)
    for handle in (parent, child):
        insert(engine, handle, state(prompt, outputs=[first]))
    tokens = [step(engine) for _ in range(3)]
    assert [[first, *(each[handle] for each in tokens)] for handle in (parent, child)] == [expected] * 2


class ActsWhileCopying:
    """An engine's memory during whose page copies `act` is called."""

    def __init__(self, memory: Any, act: Callable[[], None]) -> None:
        self._memory, self._act = memory, act

    def copy_page(self, *args: Any) -> None:
        self._act()
        self._memory.copy_page(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_the_source_of_a_copy_can_not_be_evicted_under_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = rig.engine(page_size=16, pages=6)
    prompt = rig.prompt(16)
    leave(engine, prompt)
    names, seen, memory = digests(engine, prompt), [], engine.memory
    source = engine.reserve("source", 16, names)
    expected = whole_kv(engine, source, 15)
    engine.free(source)

    def meanwhile() -> None:
        seen.append(engine.drop_cached())
        seen.append(engine.audit())
        with pytest.raises(OutOfPages, match="4 pages, 3 of 6"):
            engine.reserve("greedy", 64)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "memory", ActsWhileCopying(memory, meanwhile))
        handle = engine.reserve("a/1", 32, names, 15)
    assert seen == [0, {"a/1": 2, "a/1 (draining)": 1}]
    assert handle.cached_tokens == 15
    assert whole_kv(engine, handle, 15) == expected
    assert engine.match_prefix(names) == 0
    leave(engine, prompt)

    def fail() -> None:
        raise MemoryError("no room")

    before = engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "memory", ActsWhileCopying(memory, fail))
        with pytest.raises(MemoryError):
            engine.reserve("c/1", 32, names, 15)
    assert engine.stats() == before


def test_threads_may_publish_and_reserve_prefixes_while_pages_are_scarce(rig: Rig) -> None:
    engine = rig.engine(page_size=16, pages=14)
    prompts = [[*rig.prompt(32, seed=i % 2), *rig.prompt(20, seed=i)] for i in range(4)]
    donors = []
    for prompt in prompts:
        source = rig.engine()
        handle = source.reserve("donor", len(prompt))
        compute(source, handle, state(prompt))
        donors.append(
            [source.read_kv(handle, layer, range(52), range(source.spec.kv_format.heads)) for layer in (0, 1)]
        )
    start = threading.Barrier(3)

    def work(worker: int) -> int:
        start.wait(60)
        hits = 0
        for turn in range(30):
            index = (worker + turn) % 4
            names = digests(engine, prompts[index])
            try:
                handle = engine.reserve(f"{worker}/{turn}", 52, names, 51)
            except OutOfPages:
                continue
            hits += handle.cached_tokens
            for layer in (0, 1):
                parts = donors[index][layer]
                cut = [_tail(part, handle.cached_tokens) for part in parts]
                engine.write_kv(handle, layer, handle.cached_tokens, 0, cut)
                assert engine.read_kv(handle, layer, range(52), range(engine.spec.kv_format.heads)) == parts
            engine.publish(handle, names)
            engine.free(handle)
        return hits

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(work, range(3)))
    assert engine.audit() == {}


def _tail(part: Any, tokens: int) -> Any:
    row = len(part.data) // part.shape[0]
    return type(part)(
        part.name, part.dtype, (part.shape[0] - tokens, *part.shape[1:]), bytes(part.data)[tokens * row :]
    )
