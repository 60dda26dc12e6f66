"""Prefix blocks in and out of every engine's pages, whatever their sizes; what does not fit is refused."""

from collections.abc import Callable

import pytest

from baton.errors import CorruptFrame, InvalidRequest
from tests.contract.engines import Rig, generate, ignore, payload_of, prefill, state, step, whole_kv
from tests.engine_calls import insert, prefill_chunk


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
    prefill_chunk(target, home, wanted.prompt_ids, 0, 16, on_layer=ignore)
    target.write_blocks(home, 16, [payloads[0], memoryview(b"\0" + payloads[1])[1:]])
    target.write_blocks(home, 48, payloads[2:])
    assert target.read_blocks(home, 16, 3) == payloads
    result = prefill_chunk(target, home, wanted.prompt_ids, 64, 70, on_layer=ignore, sample=[wanted])
    assert result.tokens[0].token_id == first
    insert(target, home, state(wanted.prompt_ids, outputs=[first]))
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
