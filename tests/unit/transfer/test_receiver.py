"""Streams that lie, and streams that are damaged: caught, fetched again, and never accepted as something else."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from baton.errors import CorruptFrame, IncompleteTransfer, TransferError
from baton.kv.format import Shard
from baton.request import Handoff
from baton.transfer import wire
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import Receiver, fetch_from
from baton.transfer.wire import KvSlice, Manifest, encode_commit, encode_manifest, pack
from tests.unit.transfer.support import (
    HEADS,
    INCARNATION,
    LAYERS,
    SEED,
    WHOLE,
    Engine,
    MemorySource,
    collect,
    contents,
    decoded,
    faults,
    handoff,
    prefilled,
    ready,
    unchanged,
    whole,
)

TOKENS = 10
FRAMES = 2 * LAYERS
Mangle = Callable[[int, list[bytes]], list[bytes]]


class Pair:
    """An exporter of TOKENS tokens and a consumer with another page size."""

    def __init__(self) -> None:
        self.source_engine, self.engine = Engine(page_size=16), Engine(page_size=4)
        token_bytes = self.source_engine.spec.kv_format.token_bytes // LAYERS
        self.exports = ExportRegistry(self.source_engine, INCARNATION, frame_bytes=6 * token_bytes)
        self.export, _ = ready(self.exports, self.source_engine, "t", TOKENS)
        self.handle = self.engine.reserve("decode", TOKENS)
        self.source = MemorySource(self.export, unchanged)
        self.expected = contents(self.source_engine, prefilled(self.source_engine, TOKENS), whole(TOKENS))

    async def pull(self, mangle: Mangle) -> Handoff:
        self.source = MemorySource(self.export, mangle)
        return await fetch_from([self.source], self.engine, self.handle, whole(TOKENS), length=TOKENS, timeout_s=20)

    @property
    def correct(self) -> bool:
        return contents(self.engine, self.handle, whole(TOKENS)) == self.expected


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.exports.close()
    await pair.exports.wait_closed()


def flip(frame: bytes, bit: int = 400) -> bytes:
    changed, bit = bytearray(frame), bit % (8 * len(frame))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def first_stream(change: Callable[[list[bytes]], list[bytes]]) -> Mangle:
    return lambda stream, frames: change(frames) if stream == 0 else frames


async def test_every_flipped_bit_of_every_frame_is_caught(pair: Pair) -> None:
    """It leaves its gap, or what still makes sense contradicts what arrived or was asked for."""
    clean = await collect(pair.export, KvSlice(range(6), range(1), range(HEADS)))
    data, manifest, commit = range(len(clean))
    for number, frame in enumerate(clean):
        for bit in range(8 * len(frame)):
            receiver = Receiver(
                pair.engine, pair.handle, KvSlice(range(6), range(1), range(HEADS)), TOKENS, [WHOLE], SEED
            )
            try:
                for at, sent in enumerate(clean):
                    receiver.add_frame(flip(sent, bit) if at == number else sent)
            except TransferError:
                assert number in (manifest, commit)
                continue
            assert receiver.bad_frames == 1
            missing = {data: [range(6)], manifest: [], commit: [range(TOKENS, TOKENS)]}[number]
            assert [gap.tokens for gap in receiver.gaps()] == missing


async def test_a_bad_frame_is_fetched_again_and_nothing_else(pair: Pair) -> None:
    before = faults("bad_frame")
    assert await pair.pull(first_stream(lambda f: [f[0], flip(f[1]), *f[2:]])) == handoff(TOKENS)
    assert pair.correct
    assert pair.source.slices == [whole(TOKENS), KvSlice(range(6), range(1, 2), range(HEADS))]
    assert faults("bad_frame") == before + 1


async def test_a_bad_commit_is_fetched_again_alone(pair: Pair) -> None:
    assert await pair.pull(first_stream(lambda f: [*f[:-1], flip(f[-1])])) == handoff(TOKENS)
    assert pair.source.slices[1].tokens == range(TOKENS, TOKENS)


async def test_a_frame_that_is_bad_again_ends_the_transfer(pair: Pair) -> None:
    before = faults("corrupt_frame")
    with pytest.raises(CorruptFrame, match="failed its checksum twice"):
        await pair.pull(lambda stream, f: [flip(f[0]), *f[1:]])
    assert len(pair.source.slices) == 2
    assert faults("corrupt_frame") == before + 1


def data(frames: list[bytes], layer: int, tokens: range, heads: range = range(HEADS)) -> bytes:
    """A sound frame with the parts of the first one, placed elsewhere."""
    first = decoded(frames[0])
    assert isinstance(first, wire.KvData)
    count = len(tokens)
    parts = [
        type(part)(
            part.name, part.dtype, (count, len(heads), *part.shape[2:]), bytes(count * len(heads) * part.shape[2] * 4)
        )
        for part in first.parts
    ]
    return wire.encode_data(layer, tokens, heads, parts, SEED)[0]


def renamed(frames: list[bytes]) -> bytes:
    first = decoded(frames[0])
    assert isinstance(first, wire.KvData)
    parts = [type(part)("latent", part.dtype, part.shape, part.data) for part in first.parts]
    return wire.encode_data(first.layer, first.tokens, first.heads, parts, SEED)[0]


LIES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], type[TransferError], str]] = {
    "truncated": (lambda f: f[:3], IncompleteTransfer, "without tokens"),
    "empty": (lambda f: [], IncompleteTransfer, "without tokens"),
    "no tail": (lambda f: f[:FRAMES], IncompleteTransfer, "without manifest"),
    "no commit": (lambda f: f[:-1], IncompleteTransfer, "without commit"),
    "no manifest": (lambda f: [*f[:FRAMES], f[-1]], IncompleteTransfer, "without a manifest"),
    "missing range": (lambda f: f[1:], IncompleteTransfer, "manifest lists"),
    "missing range, manifest agrees": (
        lambda f: [*f[1:-2], _manifest(f[1:-2], {0: 6}), f[-1]],
        IncompleteTransfer,
        r"without tokens \[0, 6\) of layer 0",
    ),
    "sent twice": (lambda f: [f[0], *f], CorruptFrame, "sent twice"),
    "overlapping": (lambda f: [data(f, 0, range(5, 8)), *f], CorruptFrame, "sent twice"),
    "another layer": (lambda f: [data(f, LAYERS, range(2)), *f], CorruptFrame, "outside"),
    "tokens beyond": (lambda f: [data(f, 0, range(8, TOKENS + 1)), *f], CorruptFrame, "outside"),
    "other heads": (lambda f: [data(f, 0, range(2), range(1)), *f], CorruptFrame, "outside"),
    "unknown parts": (lambda f: [renamed(f), *f[1:]], CorruptFrame, "latent"),
    "after the commit": (lambda f: [*f, f[0]], CorruptFrame, "after the commit"),
    "after the manifest": (lambda f: [*f[1:-1], f[0], f[-1]], IncompleteTransfer, "manifest lists"),
    "data after an honest manifest": (lambda f: [*f[:-1], f[0], f[-1]], CorruptFrame, "after the manifest"),
    "second manifest": (lambda f: [*f[:-1], f[-2], f[-1]], CorruptFrame, "second manifest"),
    "swapped": (lambda f: [f[1], f[0], *f[2:]], IncompleteTransfer, "digest"),
    "other content": (lambda f: [data(f, 0, range(6)), *f[1:]], IncompleteTransfer, "digest"),
    "other length": (
        lambda f: [*f[:-1], encode_commit(TOKENS + 1, pack(handoff(TOKENS + 1)), (WHOLE,))],
        IncompleteTransfer,
        "11",
    ),
    "handoff of another length": (
        lambda f: [*f[:-1], encode_commit(TOKENS, pack(handoff(TOKENS + 1)), (WHOLE,))],
        IncompleteTransfer,
        "11",
    ),
    "other version": (
        lambda f: [*f[:-1], encode_commit(TOKENS, pack(handoff(TOKENS)), (WHOLE,), 1)],
        TransferError,
        "version 1",
    ),
    "other shards": (
        lambda f: [*f[:-1], encode_commit(TOKENS, pack(handoff(TOKENS)), (WHOLE, replace(WHOLE, heads=range(1))))],
        IncompleteTransfer,
        "the exporter has the shards",
    ),
    "manifest of another shard": (
        lambda f: [*f[:-2], _manifest(f[:-2], {}, replace(WHOLE, heads=range(1))), f[-1]],
        IncompleteTransfer,
        r"heads \[0, 1\)",
    ),
    "a token id that the model does not have": (
        lambda f: [*f[:-1], encode_commit(TOKENS, pack(replace(handoff(TOKENS), output_ids=(1000,))), (WHOLE,))],
        TransferError,
        "output_token_ids.*1000",
    ),
    "no handoff": (lambda f: [*f[:-1], encode_commit(TOKENS, b"\xff", (WHOLE,))], TransferError, "can't be read"),
    "bad frame that was not lost": (lambda f: [flip(f[0]), *f], IncompleteTransfer, "manifest lists"),
}


def _manifest(frames: list[bytes], first_token: dict[int, int], shard: Shard = WHOLE) -> bytes:
    digest = 0
    for frame in map(decoded, frames):
        assert isinstance(frame, wire.KvData)
        digest = wire.extend_digest(digest, frame.checksum)
    runs = tuple((layer, first_token.get(layer, 0), TOKENS) for layer in range(LAYERS))
    return encode_manifest(Manifest(len(frames), runs, digest, shard))


@pytest.mark.parametrize("lie", LIES)
async def test_frames_that_contradict_the_transfer_end_it(pair: Pair, lie: str) -> None:
    change, error, complaint = LIES[lie]
    with pytest.raises(error, match=complaint) as caught:
        await pair.pull(first_stream(change))
    assert type(caught.value) is error
    assert len(pair.source.slices) == 1


async def test_a_write_that_fails_ends_the_transfer(pair: Pair) -> None:
    pair.engine.free(pair.handle)
    with pytest.raises(TransferError, match="could not be written"):
        await pair.pull(unchanged)
