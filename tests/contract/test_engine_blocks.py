"""Prefix blocks in and out of every engine's pages, whatever their sizes; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import CorruptFrame, InvalidRequest
from tests.contract.engines import Rig, generate, ignore, payload_of, prefill, state, step, whole_kv


@pytest.mark.parametrize(("there", "here"), [(16, 16), (32, 16), (16, 48), (256, 16), (12, 20)])
def test_blocks_move_kv_between_pages_of_any_size(rig: Rig, there: int, here: int) -> None:
    """Block 0 is computed, the others come as payloads, of which two begin within the pages of either size."""
    source, target = (rig.engine(page_size=size, pages=64, max_model_len=256) for size in (there, here))
    wanted = state(rig.prompt(70))
    origin, home = source.reserve("a/1", 90), target.reserve("a/1", 90)
    first = prefill(source, origin, wanted).token_id
    payloads = source.read_blocks(origin, 16, 3)
    assert payloads == [payload for token in (16, 32, 48) for payload in source.read_blocks(origin, token, 1)]
    assert b"".join(payloads) == payload_of(source, origin, [range(16, 32), range(32, 48), range(48, 64)])
    target.prefill_chunk(home, wanted.prompt_ids, 0, 16, on_layer=ignore)
    target.write_blocks(home, 16, [payloads[0], memoryview(b"\0" + payloads[1])[1:]])
    target.write_blocks(home, 48, payloads[2:])
    assert target.read_blocks(home, 16, 3) == payloads
    result = target.prefill_chunk(home, wanted.prompt_ids, 64, 70, on_layer=ignore, sample=[wanted])
    assert result.tokens[0].token_id == first
    target.insert(home, state(wanted.prompt_ids, outputs=[first]))
    assert [first, *(step(target)[home] for _ in range(5))] == generate(source, wanted, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_hold_elements_as_pages_do(rig: Rig, dtype: str) -> None:
    engine = rig.engine(kv_dtype=dtype)
    origin, home = engine.reserve("a/1", 32), engine.reserve("b/1", 32)
    prefill(engine, origin, state(rig.prompt(32)))
    payloads = engine.read_blocks(origin, 0, 2)
    assert [len(payload) for payload in payloads] == [engine.spec.kv_format.block_bytes] * 2
    engine.write_blocks(home, 0, payloads)
    assert whole_kv(engine, home, 32) == whole_kv(engine, origin, 32)
    assert payload_of(engine, home, [range(16), range(16, 32)]) == b"".join(payloads)


@pytest.mark.parametrize(("token", "count"), [(0, 3), (17, 1), (32, 1), (-16, 1), (0, 0)])
def test_blocks_that_are_not_there_are_refused(rig: Rig, token: int, count: int) -> None:
    engine = rig.engine(page_size=16)
    handle = engine.reserve("a/1", 20)
    with pytest.raises(InvalidRequest, match="tokens"):
        engine.read_blocks(handle, token, count)


@pytest.mark.parametrize(
    ("spoil", "token"),
    [
        (lambda blocks: [], 0),
        (lambda blocks: [blocks[0], blocks[1][:-1]], 0),
        (lambda blocks: [blocks[0], blocks[1] + b"\0"], 0),
        (lambda blocks: [memoryview(blocks[0] + blocks[1])], 0),
        (lambda blocks: [*blocks, blocks[0]], 0),
        (lambda blocks: blocks, 1),
        (lambda blocks: blocks, -1),
    ],
)
def test_blocks_that_do_not_fit_are_corrupt(rig: Rig, spoil: Callable[[list[bytes]], list[bytes]], token: int) -> None:
    engine = rig.engine(page_size=16)
    handle = engine.reserve("a/1", 20)
    good = engine.read_blocks(handle, 0, 2)
    with pytest.raises(CorruptFrame):
        engine.write_blocks(handle, token, spoil(good))
    engine.write_blocks(handle, 0, good)


@pytest.mark.parametrize(("there", "here"), [(16, 16), (16, 32), (12, 20), (256, 16)])
@pytest.mark.parametrize(("token", "count", "size"), [(16, 1, 7), (32, 1, 15), (48, 2, 5), (0, 1, 1), (13, 3, 3)])
def test_blocks_of_fewer_tokens_move_alike(rig: Rig, there: int, here: int, token: int, count: int, size: int) -> None:
    source, target = (rig.engine(page_size=page, pages=64, max_model_len=256) for page in (there, here))
    origin, home = source.reserve("a/1", 70), target.reserve("a/1", 70)
    prefill(source, origin, state(rig.prompt(70)))
    tokens = range(token, token + count * size)
    around = [payload_of(target, home, [range(token)])] if token else []
    around.append(payload_of(target, home, [range(tokens.stop, 70)]))
    payloads = source.read_blocks(origin, token, count, size)
    assert [len(payload) for payload in payloads] == [size * source.spec.kv_format.token_bytes] * count
    ranges = [range(begin, begin + size) for begin in range(token, tokens.stop, size)]
    assert b"".join(payloads) == payload_of(source, origin, ranges)
    target.write_blocks(home, token, [payloads[0], *(memoryview(b"\0" + each)[1:] for each in payloads[1:])], size)
    assert target.read_blocks(home, token, count, size) == payloads
    assert payload_of(target, home, ranges) == b"".join(payloads)
    untouched = [payload_of(target, home, [range(token)])] if token else []
    assert [*untouched, payload_of(target, home, [range(tokens.stop, 70)])] == around


def test_blocks_of_another_size_are_refused(rig: Rig) -> None:
    engine = rig.engine(page_size=16)
    handle = engine.reserve("a/1", 20)
    (good,) = engine.read_blocks(handle, 16, 1, 5)
    for wrong in (good[:-1], good + b"\0", b"", engine.read_blocks(handle, 0, 1)[0]):
        with pytest.raises(CorruptFrame, match="block 0"):
            engine.write_blocks(handle, 16, [wrong], 5)
    with pytest.raises(CorruptFrame):
        engine.write_blocks(handle, 16, [good])
    with pytest.raises(CorruptFrame, match="block 1"):
        engine.write_blocks(handle, 0, [good, good[:-1]], 5)
    with pytest.raises(CorruptFrame):
        engine.write_blocks(handle, 28, [good], 5)
    with pytest.raises(InvalidRequest, match="tokens"):
        engine.read_blocks(handle, 28, 1, 5)
    engine.write_blocks(handle, 27, [good], 5)
