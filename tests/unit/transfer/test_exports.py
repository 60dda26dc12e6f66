"""One export: the order of its frames, its wake-ups, and its one end."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from baton.errors import EngineError, IncompleteTransfer, InvalidRequest
from baton.transfer import wire
from baton.transfer.export import ExportRegistry
from baton.transfer.wire import KvSlice
from tests.engine_calls import prefill_chunk
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    WHOLE,
    Engine,
    Gate,
    collect,
    contents,
    decoded,
    handoff,
    mark_all_final,
    prefilled,
    prompt,
    ready,
    whole,
)

TOKENS = 12


def parse(frames: list[bytes]) -> list[Any]:
    return [decoded(frame) for frame in frames]


def places(frames: list[Any]) -> list[tuple[int, int, int]]:
    return [(f.layer, f.tokens.start, f.tokens.stop) for f in frames if isinstance(f, wire.KvData)]


async def test_frames_follow_production(exports: ExportRegistry, engine: Engine) -> None:
    handle = prefilled(engine, TOKENS)
    export = exports.open("t", handle, TOKENS, on_closed=lambda: None)
    seen = []
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        for chunk_end in (5, 12):
            for layer in range(LAYERS):
                export.mark_final(layer, chunk_end)
                while not seen or seen[-1].layer != layer or seen[-1].tokens.stop != chunk_end:
                    seen.append(decoded(await anext(frames)))
        manifest = decoded(await anext(frames))
        export.commit(handoff(TOKENS))
        commit = decoded(await anext(frames))
        with pytest.raises(StopAsyncIteration):
            await anext(frames)
    chunks = [[(0, 4), (4, 5)], [(5, 9), (9, 12)]]
    assert places(seen) == [(layer, *run) for chunk in chunks for layer in range(LAYERS) for run in chunk]
    assert manifest == wire.Manifest(len(seen), tuple((la, 0, TOKENS) for la in range(LAYERS)), manifest.digest, WHOLE)
    assert isinstance(commit, wire.Commit)
    assert commit.length == TOKENS


async def test_progress_made_while_a_frame_is_being_sent_is_seen(exports: ExportRegistry, engine: Engine) -> None:
    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    export.mark_final(0, 4)
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        await anext(frames)
        export.mark_final(1, 4)
        for _ in range(3):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert places([decoded(await anext(frames))]) == [(1, 0, 4)]


async def test_a_finished_export_is_sent_in_chunks_through_all_layers(exports: ExportRegistry, engine: Engine) -> None:
    export, _ = ready(exports, engine, "t", TOKENS)
    found = places(parse(await collect(export, whole(TOKENS))))
    assert found == [(layer, start, start + 4) for start in (0, 4, 8) for layer in range(LAYERS)]


async def test_a_slice_is_sent_and_nothing_else(exports: ExportRegistry, engine: Engine) -> None:
    export, _ = ready(exports, engine, "t", TOKENS)
    kv_slice = KvSlice(range(3, 9), range(1, 3), range(1, HEADS))
    frames = parse(await collect(export, kv_slice))
    assert places(frames) == [(1, 3, 9), (2, 3, 9)]
    got = [[bytes(part.data) for part in frame.parts] for frame in frames[:2]]
    assert got == contents(engine, prefilled(engine, TOKENS), kv_slice)


async def test_a_frame_has_at_least_one_token(engine: Engine) -> None:
    exports = ExportRegistry(engine, INCARNATION, frame_bytes=1)
    export, _ = ready(exports, engine, "t", 2)
    assert len(await collect(export, whole(2))) == 2 * LAYERS + 2
    exports.close()


async def test_marking_from_a_thread_wakes_the_loop_once_at_a_time(
    exports: ExportRegistry, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes = []
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: object, **kw: Any) -> object:
        wakes.append(getattr(callback, "__name__", ""))
        return original(callback, *args, **kw)

    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

    def mark() -> None:
        for token in range(1, TOKENS + 1):
            mark_all_final(export, token)

    stream = asyncio.create_task(collect(export, whole(TOKENS)))
    await asyncio.sleep(0)
    mark()
    assert wakes == ["_wake"]
    await asyncio.to_thread(mark)
    export.commit(handoff(TOKENS))
    assert len(await stream) == 3 * LAYERS + 2


async def test_progress_outside_the_export_is_refused(exports: ExportRegistry, engine: Engine) -> None:
    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    with pytest.raises(InvalidRequest, match="layer"):
        export.mark_final(LAYERS, 1)
    with pytest.raises(InvalidRequest, match="token_end"):
        export.mark_final(0, TOKENS + 1)


async def test_a_commit_needs_every_layer_and_happens_once(exports: ExportRegistry, engine: Engine) -> None:
    export = exports.open("t", prefilled(engine, TOKENS), TOKENS, on_closed=lambda: None)
    mark_all_final(export, TOKENS - 1)
    with pytest.raises(IncompleteTransfer, match="11 of 12 tokens of layer 0"):
        export.commit(handoff(TOKENS))
    mark_all_final(export, TOKENS)
    export.commit(handoff(TOKENS))
    with pytest.raises(InvalidRequest, match="committed already"):
        export.commit(handoff(TOKENS))


async def test_the_end_waits_for_a_read_in_flight_and_no_longer(exports: ExportRegistry, engine: Engine) -> None:
    gate = engine.before_read = Gate()
    export, ends = ready(exports, engine, "t", TOKENS)
    stream = asyncio.create_task(collect(export, whole(TOKENS)))
    await asyncio.to_thread(gate.reached.wait)
    stream.cancel()
    exports.release("t", INCARNATION)
    wait_closed = asyncio.create_task(exports.wait_closed())
    await asyncio.wait({stream})
    assert stream.cancelled()
    assert ends == []
    assert not wait_closed.done()
    gate.open()
    await wait_closed
    assert ends == ["t"]


async def test_an_export_reads_only_one_frame_ahead(exports: ExportRegistry, engine: Engine) -> None:
    begun = threading.Semaphore(0)
    engine.before_read = begun.release
    export, _ = ready(exports, engine, "t", TOKENS)
    async with aclosing(export.frames(whole(TOKENS))) as frames:
        for ahead in (2, 1, 1):
            await anext(frames)
            for _ in range(ahead):
                assert await asyncio.to_thread(begun.acquire, timeout=60)
            await asyncio.to_thread(int)
            assert not begun.acquire(blocking=False)
    assert engine.most_in_flight == 1


async def test_a_read_that_fails_ends_the_stream(exports: ExportRegistry, engine: Engine) -> None:
    handle = engine.reserve("prefill", TOKENS)
    prefill_chunk(engine, handle, prompt(TOKENS), 0, TOKENS, on_layer=lambda _: None)
    export = exports.open("t", handle, TOKENS, on_closed=lambda: None)
    mark_all_final(export, TOKENS)
    engine.free(handle)
    with pytest.raises(EngineError):
        await collect(export, whole(TOKENS))
