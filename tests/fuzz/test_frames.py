"""FetchKv's consumer against frames and streams that are damaged, mixed up or invented.

Nothing but TransferError comes out, and what is accepted is the KV that was sent, every element of it.
"""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import crc32c
import pytest

from baton.errors import TransferError
from baton.kv.format import DTYPE_BYTES, PartData, Shard
from baton.pb import kv_pb2
from baton.request import Handoff
from baton.transfer import wire
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import Receiver, fetch_from
from baton.transfer.wire import KvSlice, pack, unpack
from tests.effort import fuzz
from tests.engine_calls import prefill_chunk
from tests.fuzz.mutation import arbitrary, damaged_stream, mutated, spliced
from tests.property.virtual import VirtualLoop
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    SEED,
    WHOLE,
    Engine,
    collect,
    contents,
    handoff,
    whole,
)
from tests.unit.transfer.support import prompt as first_prompt

TOKENS = 10
SLICE = whole(TOKENS)


class Streams:
    """The frames of two exports of the same shape, and a consumer's engine."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.engine = Engine(page_size=4)
        self.of: dict[KvSlice, list[bytes]] = {}
        self.frames, self.truth = self._export(first_prompt(TOKENS), handoff(TOKENS), "t")
        self.theirs, _ = self._export([7 * i + 3 for i in range(TOKENS)], handoff(TOKENS), "u")

    def _export(self, ids: list[int], of: Handoff, transfer_id: str) -> tuple[list[bytes], list[list[bytes]]]:
        engine = Engine(page_size=16)

        async def read() -> tuple[list[bytes], list[list[bytes]]]:
            token_bytes = engine.spec.kv_format.token_bytes // LAYERS
            exports = ExportRegistry(engine, INCARNATION, frame_bytes=6 * token_bytes)
            handle = engine.reserve("prefill", TOKENS)
            prefill_chunk(engine, handle, ids, 0, TOKENS, on_layer=lambda layer: None)
            export = exports.open(transfer_id, handle, TOKENS, on_closed=lambda: None)
            for layer in range(LAYERS):
                export.mark_final(layer, TOKENS)
            export.commit(of)
            frames, truth = await collect(export, SLICE), contents(engine, handle, SLICE)
            if transfer_id == "t":
                for layer in range(LAYERS):
                    for start in range(TOKENS + 1):
                        for stop in range(start, TOKENS + 1):
                            kv_slice = KvSlice(range(start, stop), range(layer, layer + 1), range(HEADS))
                            self.of[kv_slice] = await collect(export, kv_slice)
                self.of[SLICE] = frames
                rest = KvSlice(range(TOKENS, TOKENS), range(LAYERS), range(HEADS))
                self.of[rest] = await collect(export, rest)
            exports.close()
            return frames, truth

        return self.loop.run_until_complete(read())

    def pulled(self, mangle: Callable[[list[bytes]], list[bytes]]) -> tuple[Handoff, list[list[bytes]]] | None:
        """The handoff and the pages' content after a pull of mangled streams; None if it was refused."""
        handle = self.engine.reserve("decode", TOKENS)
        for page in handle.pages:
            memory = self.engine.memory._pages[page]
            memory[:] = b"\xee" * len(memory)
        try:
            work = fetch_from([_Source(self.of, mangle)], self.engine, handle, SLICE, length=TOKENS, timeout_s=20)
            found = self.loop.run_until_complete(work)
            return found, contents(self.engine, handle, SLICE)
        except TransferError:
            return None
        finally:
            self.engine.free(handle)
            assert self.engine.audit() == {}


class _Source:
    shard = WHOLE
    checksum_seed = SEED

    def __init__(self, of: dict[KvSlice, list[bytes]], mangle: Callable[[list[bytes]], list[bytes]]) -> None:
        self._of, self._mangle = of, mangle

    async def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        for frame in self._mangle(self._of[kv_slice]):
            yield frame

    async def release(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.loop.close()


def decoded(frame: bytes) -> wire.KvData | wire.Manifest | wire.Commit | None:
    try:
        return wire.decode(frame, SEED)
    except TransferError:
        return None


@fuzz("frames: arbitrary bytes", 2000)
def test_arbitrary_bytes_are_no_frame(rng: random.Random) -> None:
    assert decoded(arbitrary(rng)) is None


@fuzz("frames: damaged", 3000)
def test_a_damaged_frame_is_noticed(rng: random.Random, streams: Streams) -> None:
    frame = rng.choice(streams.frames)
    damaged = mutated(rng, frame)
    found = decoded(damaged)
    if isinstance(found, wire.KvData):
        assert damaged == frame
    elif isinstance(found, wire.Manifest):
        assert wire.encode_manifest(found) == damaged
    elif isinstance(found, wire.Commit):
        assert (
            wire.encode_commit(found.length, found.handoff, found.shards, found.version, found.prefix_digest) == damaged
        )


@fuzz("frames: damaged header, checksum made anew", 2000)
def test_a_header_that_lies_is_consistent_or_refused(rng: random.Random, streams: Streams) -> None:
    sent = kv_pb2.KvFrame.FromString(rng.choice(streams.frames[:-2]))
    header = sent.header.SerializeToString()[:-5]
    for _ in range(rng.randrange(1, 4)):
        header = mutated(rng, header)
    payload = mutated(rng, sent.payload) if rng.random() < 0.3 else sent.payload
    checksum = crc32c.crc32c(payload, crc32c.crc32c(header, SEED))
    whole_header = header + b"\x3d" + checksum.to_bytes(4, "little")
    found = decoded(wire._bytes_field(1, whole_header) + wire._bytes_field(2, payload))
    if found is not None:
        assert isinstance(found, wire.KvData)
        assert found.payload_bytes == len(payload)
        for part in found.parts:
            assert part.shape[:2] == (len(found.tokens), len(found.heads))
            assert len(part.data) == DTYPE_BYTES[part.dtype] * math.prod(part.shape)


@fuzz("streams: damaged", 600)
def test_a_damaged_stream_is_the_truth_or_refused(rng: random.Random, streams: Streams) -> None:
    found = streams.pulled(lambda frames: damaged_stream(rng, frames))
    assert found is None or found == (handoff(TOKENS), streams.truth)


@fuzz("streams: damaged once", 600)
def test_one_damaged_stream_is_mended_or_refused(rng: random.Random, streams: Streams) -> None:
    times = iter((True,))

    def once(frames: list[bytes]) -> list[bytes]:
        return damaged_stream(rng, frames) if next(times, False) else frames

    found = streams.pulled(once)
    assert found is None or found == (handoff(TOKENS), streams.truth)


@fuzz("streams: two spliced and damaged", 800)
def test_two_streams_in_one_are_the_right_one_or_refused(rng: random.Random, streams: Streams) -> None:
    def mangle(frames: list[bytes]) -> list[bytes]:
        both = spliced(rng, frames, streams.theirs)
        return [mutated(rng, frame) if rng.random() < 0.2 else frame for frame in both]

    found = streams.pulled(mangle)
    assert found is None or found == (handoff(TOKENS), streams.truth)


@fuzz("streams: invented frames", 400)
def test_sound_frames_without_sense_are_refused(rng: random.Random, streams: Streams) -> None:
    handle = streams.engine.reserve("decode", TOKENS)
    receiver = Receiver(streams.engine, handle, SLICE, TOKENS, [WHOLE], SEED)
    sent = [_invented(rng, streams, rng.randrange(6)) for _ in range(rng.randrange(12))]
    if rng.random() < 0.5:
        kind, place = rng.choice(((1, len(streams.frames) - 2), (2, len(streams.frames) - 1), (3, rng.randrange(4))))
        sent = [*streams.frames[:place], _invented(rng, streams, kind), *streams.frames[place + rng.randrange(2) :]]
    try:
        for frame in sent:
            receiver.add_frame(frame)
        if not receiver.gaps():
            _check_complete([decoded(frame) for frame in sent if frame != wire.KEEPALIVE])
    except TransferError:
        pass
    finally:
        streams.engine.free(handle)


def _check_complete(frames: list[wire.KvData | wire.Manifest | wire.Commit | None]) -> None:
    """Every element was sent once, then the manifest, and the commit last. Bad frames (None) may hide the manifest."""
    sound = [frame for frame in frames if frame is not None]
    data = [frame for frame in sound if isinstance(frame, wire.KvData)]
    *manifest, commit = sound[len(data) :]
    assert sound[: len(data)] == data
    assert isinstance(commit, wire.Commit)
    assert commit.shards == (WHOLE,)
    assert [(each.shard.layers, each.shard.heads) for each in manifest] == [
        (SLICE.layers, SLICE.heads)
    ] or None in frames
    sent = sorted((each.layer, token, head) for each in data for token in each.tokens for head in each.heads)
    assert sent == [*itertools.product(SLICE.layers, SLICE.tokens, SLICE.heads)]


def _shard(number: Callable[[int], int]) -> Shard:
    spans = (range(LAYERS), range(HEADS)), (range(number(LAYERS), number(LAYERS)), range(number(HEADS), number(HEADS)))
    return Shard("", *spans[min(number(1), 1)])


def _invented(rng: random.Random, streams: Streams, kind: int) -> bytes:
    def number(most: int) -> int:
        return rng.choice((0, 1, rng.randrange(most + 2), 2**31, 2**32 - 1))

    if kind == 0:
        return rng.choice((*streams.frames, wire.KEEPALIVE))
    if kind == 1:
        runs = tuple((number(LAYERS), number(TOKENS), number(TOKENS)) for _ in range(rng.randrange(5)))
        return wire.encode_manifest(wire.Manifest(number(8), runs, number(99), _shard(number)))
    if kind == 2:
        body = rng.choice((mutated(rng, pack(handoff(TOKENS))), pack(handoff(TOKENS)), arbitrary(rng), None))
        shards = [_shard(number) for _ in range(rng.choice((1, 1, 0, 2)))]
        return wire.encode_commit(rng.choice((TOKENS, number(20))), body, shards, rng.choice((2, 2, 2, number(3))))
    tokens, heads = rng.randrange(1, 4), rng.choice((HEADS, HEADS, 1, 3))
    start = rng.choice((rng.randrange(TOKENS), number(TOKENS)))
    names, dtypes = ("k", "v", "latent", "k" * 200, ""), ("float32", "float16", "bfloat16")
    parts = []
    for name in rng.choice((("k", "v"), ("k", "v"), ("k",), ("v", "k"), ("k", "k"), (rng.choice(names),))):
        dtype, tail = rng.choice(dtypes), rng.choice(((2,), (2,), (1,), (2, 2), ()))
        size = DTYPE_BYTES[dtype] * tokens * heads * math.prod(tail)
        parts.append(PartData(name, dtype, (tokens, heads, *tail), rng.randbytes(size)))
    first_head = rng.choice((0, 0, 1))
    return wire.encode_data(
        rng.choice((0, 1, 2, number(4))),
        range(start, start + tokens),
        range(first_head, first_head + heads),
        parts,
        SEED,
    )[0]


@fuzz("handoffs", 1500)
def test_a_handoff_is_sound_or_refused(rng: random.Random) -> None:
    data = mutated(rng, pack(handoff(TOKENS))) if rng.random() < 0.8 else arbitrary(rng)
    try:
        found: Any = unpack(data, 1000)
    except TransferError:
        return
    assert unpack(pack(found), 1000) == found
