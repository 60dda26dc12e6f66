"""The frames of a stream of KV, and a record of the part of a slice that they have carried.

A stream is data frames, then one manifest, then one commit with the handoff:

    data        0A <len> header   12 <len> payload        header: ... 3D <checksum>
    manifest    1A <len> KvManifest
    commit      22 <len> KvCommit

While the consumer has to wait for the next frame, it gets KEEPALIVE, an empty message, from time to time.

Data frames are encoded and decoded without the generated class `KvFrame`, but have the bytes that it would write. So
the payload is copied once when it is sent, and not at all when it is received. Decoding is strict: fields must be in
ascending order, without unknown fields and without bytes after them. The handoff in a commit is handled in the same
way, because it has 4 MB for a million tokens.

Any flipped bit is noticed. The checksum covers the payload, and the header up to the checksum. All other tags and
lengths must fit the frame exactly. The checksum begins with the transfer id, so a valid frame of another export fails
it too. A manifest or a commit must be encoded exactly as this module encodes its contents. The manifest is compared
with the frames before it. The commit is compared with the requested length and shards, and with the SHA-256 of its
handoff.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import crc32c
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, CorruptFrame, TransferError, preview
from baton.kv.format import DTYPE_BYTES, PartData, Shard
from baton.pb import kv_pb2
from baton.request import Handoff
from baton.rpc.convert import (
    begin_field,
    handoff_from_wire,
    handoff_to_wire,
    read_fields,
    read_varint,
    shard_from_proto,
    shard_to_proto,
    split,
    varint,
)


@dataclass(frozen=True, slots=True)
class KvSlice:
    """A part of an export: ranges of tokens, layers and heads. Without tokens, only the commit is asked for."""

    tokens: range
    layers: range
    heads: range


class Coverage:
    """Record of the part of a slice that frames have carried. No token of a layer may be carried twice."""

    def __init__(self, kv_slice: KvSlice) -> None:
        self._slice = kv_slice
        self._runs: dict[int, list[list[int]]] = {layer: [] for layer in kv_slice.layers}

    def add(self, layer: int, tokens: range, heads: range) -> None:
        """Add one frame; raises CorruptFrame if it lies outside the slice, or if some of it was carried before."""
        kv_slice = self._slice
        if layer not in kv_slice.layers or heads != kv_slice.heads or not _within(tokens, kv_slice.tokens):
            raise CorruptFrame(
                f"a frame of layer {layer}, tokens {_span(tokens)}, heads {_span(heads)} lies outside of "
                f"layers {_span(kv_slice.layers)}, tokens {_span(kv_slice.tokens)}, heads {_span(kv_slice.heads)}"
            )
        runs = self._runs[layer]
        at = bisect_right(runs, [tokens.start, tokens.stop])
        before = runs[at - 1] if at else None
        after = runs[at] if at < len(runs) else None
        if (before and before[1] > tokens.start) or (after and after[0] < tokens.stop):
            raise CorruptFrame(f"tokens {_span(tokens)} of layer {layer} were sent twice")
        joins_before = before is not None and before[1] == tokens.start
        joins_after = after is not None and after[0] == tokens.stop
        start = before[0] if before and joins_before else tokens.start
        stop = after[1] if after and joins_after else tokens.stop
        runs[at - joins_before : at + joins_after] = [[start, stop]]

    def runs(self) -> tuple[TokenRun, ...]:
        """The longest runs of tokens carried, by layer and token."""
        return tuple((layer, start, stop) for layer, runs in self._runs.items() for start, stop in runs)

    def missing(self) -> list[KvSlice]:
        """The gaps: one slice for each part of a layer that was not carried."""
        gaps = []
        for layer, runs in self._runs.items():
            at = self._slice.tokens.start
            for start, stop in [*runs, [self._slice.tokens.stop, self._slice.tokens.stop]]:
                if at < start:
                    gaps.append(KvSlice(range(at, start), range(layer, layer + 1), self._slice.heads))
                at = stop
        return gaps


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start < inner.stop <= outer.stop


def _span(span: range) -> str:
    return f"[{span.start}, {span.stop})"


HANDOFF_VERSION = 3

_COMMIT, _HANDOFF = kv_pb2.KvFrame.COMMIT_FIELD_NUMBER, kv_pb2.KvCommit.HANDOFF_FIELD_NUMBER

_COMMIT_TAG = begin_field(_COMMIT, 0)[:1]

TokenRun = tuple[int, int, int]
"""(layer, first token, end of tokens): consecutive tokens of one layer."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The frames that a stream has carried, of the layers and heads of `shard`.

    `runs` are their tokens. `digest` is the CRC-32C over the checksums of the frames, in the order in which they were
    sent.
    """

    frames: int
    runs: tuple[TokenRun, ...]
    digest: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Commit:
    """The last frame of a stream. `length` is the number of tokens of the export.

    `handoff` is a serialized Handoff of format `version`, whose SHA-256 was checked; it is None for the export of a
    prefix. `prefix_digest` is the digest of the last full block of a prefix. `shards` are all shards of the exporter.
    """

    length: int
    version: int
    handoff: bytes | memoryview | None
    shards: tuple[Shard, ...]
    prefix_digest: bytes = b""


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as a frame."""
    ranges = [kv_pb2.KvRange(layer=layer, token_start=start, token_end=end) for layer, start, end in manifest.runs]
    return _bytes(
        kv_pb2.KvFrame(
            manifest=kv_pb2.KvManifest(
                frames=manifest.frames, ranges=ranges, digest=manifest.digest, shard=shard_to_proto(manifest.shard)
            )
        )
    )


def encode_commit(
    length: int,
    handoff: bytes | memoryview | None,
    shards: Sequence[Shard],
    version: int = HANDOFF_VERSION,
    prefix_digest: bytes = b"",
) -> bytes:
    """Encode the commit of an export as a frame; arguments as in `Commit`."""
    commit = Commit(length, version, handoff, tuple(shards), prefix_digest)
    before, after = _around_handoff(commit)
    return b"".join((before, handoff or b"", after))


def _around_handoff(commit: Commit) -> tuple[bytes, bytes]:
    """The commit's frame before its handoff, and after it."""
    handoff = commit.handoff
    first = kv_pb2.KvCommit(length=commit.length, version=0 if handoff is None else commit.version)
    last = kv_pb2.KvCommit(
        digest=hashlib.sha256(handoff or b"").digest(),
        prefix_digest=commit.prefix_digest,
        shards=map(shard_to_proto, commit.shards),
    )
    size = len(handoff or b"")
    before, after = _bytes(first) + (begin_field(_HANDOFF, size) if size else b""), _bytes(last)
    return begin_field(_COMMIT, len(before) + size + len(after)) + before, after


def _decode_closing(frame: bytes) -> Manifest | Commit:
    """Decode and check a manifest or a commit; raises CorruptFrame."""
    try:
        if frame.startswith(_COMMIT_TAG):
            return _commit(frame)
        message = kv_pb2.KvFrame.FromString(frame)
    except DecodeError:
        raise CorruptFrame(f"a frame of {len(frame)} bytes can't be read") from None
    if message.HasField("manifest"):
        manifest = _manifest(message.manifest)
        if encode_manifest(manifest) != frame:
            raise CorruptFrame("a manifest's encoding does not match its contents")
        return manifest
    raise CorruptFrame(f"a frame of {len(frame)} bytes is neither data nor manifest nor commit")


def pack(handoff: Handoff) -> bytes:
    """Serialize a handoff; takes milliseconds for prompts of hundreds of thousands of tokens."""
    return b"".join(handoff_to_wire(handoff))


def unpack(data: bytes | memoryview, vocab_size: int) -> Handoff:
    """Deserialize a handoff; raises TransferError if it is invalid, or has a token id outside the vocabulary."""
    try:
        return handoff_from_wire(data, vocab_size)
    except (DecodeError, BatonError) as error:
        raise TransferError(f"the handoff can't be read: {error}") from error


def _manifest(message: kv_pb2.KvManifest) -> Manifest:
    runs = tuple((run.layer, run.token_start, run.token_end) for run in message.ranges)
    return Manifest(message.frames, runs, message.digest, shard_from_proto(message.shard))


def _commit(frame: bytes) -> Commit:
    """Decode a commit; its handoff is a view of the frame. Raises CorruptFrame or DecodeError."""
    body = memoryview(frame)[read_varint(memoryview(frame), len(_COMMIT_TAG))[1] :]
    rest, found = split(body, _HANDOFF)
    message, handoff = kv_pb2.KvCommit.FromString(rest), found.get(_HANDOFF)
    shards = tuple(map(shard_from_proto, message.shards))
    commit = Commit(message.length, message.version, handoff, shards, message.prefix_digest)
    before, after = _around_handoff(commit)
    whole = len(before) + len(handoff or b"") + len(after)
    if not (frame.startswith(before) and frame.endswith(after) and len(frame) == whole):
        raise CorruptFrame("a commit's digest does not match its handoff")
    return commit


def _bytes(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


KEEPALIVE = b""
"""A frame without fields: the export is alive, but has nothing to send yet."""

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_CHECKSUM = struct.Struct("<BI")
_CHECKSUM_TAG = 7 << 3 | _FIXED32
_FIXED = struct.Struct("<I")
_UINT32_MAX = 2**32 - 1
_OUTER_FIELDS = 3
_DATA = bytes((1 << 3 | _BYTES,))
_MAX_SHAPE_BYTES = 64


@dataclass(frozen=True, slots=True)
class KvData:
    """A data frame. Each part is `[len(tokens), len(heads), ...]`; its data is a view of the frame."""

    layer: int
    tokens: range
    heads: range
    parts: tuple[PartData, ...]
    checksum: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part.data) for part in self.parts)


def seed_of(transfer_id: str) -> int:
    """Seed of the checksums of an export's frames: the CRC-32C of its transfer id."""
    return int(crc32c.crc32c(transfer_id.encode()))


def encode_data(layer: int, tokens: range, heads: range, parts: Sequence[PartData], seed: int = 0) -> tuple[bytes, int]:
    """Encode a data frame; returns it with its checksum.

    The checksum is the CRC-32C, starting from `seed`, of the header up to the checksum and of the payload.
    """
    views = [memoryview(part.data).cast("B") for part in parts]
    described = b"".join(_bytes_field(6, _part(part, view.nbytes)) for part, view in zip(parts, views, strict=True))
    head = (
        _number_field(1, layer)
        + _number_field(2, tokens.start)
        + _number_field(3, len(tokens))
        + _number_field(4, heads.start)
        + _number_field(5, len(heads))
        + described
    )
    checksum = crc32c.crc32c(head, seed)
    for view in views:
        checksum = crc32c.crc32c(view, checksum)
    header = head + _CHECKSUM.pack(_CHECKSUM_TAG, checksum)
    payload_length = sum(view.nbytes for view in views)
    prefix = _bytes_field(1, header) + bytes((2 << 3 | _BYTES,)) + varint(payload_length)
    return b"".join((prefix, *views)), checksum


def extend_digest(digest: int, checksum: int) -> int:
    """Add the checksum of a frame to the digest of a manifest, which starts as 0; returns the new digest."""
    return int(crc32c.crc32c(_FIXED.pack(checksum), digest))


def decode(frame: bytes, seed: int = 0) -> KvData | Manifest | Commit:
    """Decode and check one frame; `seed` is the seed of the export's checksums. The payload is not copied.

    Raises CorruptFrame; TransferError for a valid frame with an unknown element type.
    """
    if not frame.startswith(_DATA):
        return _decode_closing(frame)
    fields = [(field.number, field.value) for field in islice(read_fields(memoryview(frame)), _OUTER_FIELDS)]
    match fields:
        case [(1, memoryview() as header), (2, memoryview() as payload)]:
            return _data(header, payload, seed)
    raise CorruptFrame(f"a frame of {len(frame)} bytes has fields {[number for number, _ in fields]}")


def _data(header: memoryview, payload: memoryview, seed: int) -> KvData:
    head, tail = header[: -_CHECKSUM.size], header[-_CHECKSUM.size :]
    if len(tail) != _CHECKSUM.size or tail[0] != _CHECKSUM_TAG:
        raise CorruptFrame(f"a header of {len(header)} bytes does not end with a checksum")
    checksum = _CHECKSUM.unpack(tail)[1]
    computed = crc32c.crc32c(payload, crc32c.crc32c(head, seed))
    if computed != checksum:
        raise CorruptFrame(f"a frame's checksum is {checksum:#010x}, its bytes give {computed:#010x}")
    numbers, described = _collect(head, repeated=6)
    token_start, head_start = numbers.get(2, 0), numbers.get(4, 0)
    tokens = range(token_start, token_start + numbers.get(3, 0))
    heads = range(head_start, head_start + numbers.get(5, 0))
    if not tokens or not heads or not described or not numbers.keys() <= {1, 2, 3, 4, 5}:
        raise CorruptFrame(f"a header names {len(tokens)} tokens, {len(heads)} heads, {len(described)} parts")
    parts = tuple(_parts(described, payload, (len(tokens), len(heads))))
    return KvData(numbers.get(1, 0), tokens, heads, parts, checksum)


def _parts(described: Iterable[memoryview], payload: memoryview, outer: tuple[int, int]) -> Iterator[PartData]:
    offset = 0
    for body in described:
        fields = dict(_ascending(body))
        match fields:
            case {
                1: memoryview() as name,
                2: memoryview() as dtype,
                3: memoryview() as dims,
                4: int(length),
                **more,
            } if len(dims) <= _MAX_SHAPE_BYTES:
                data = payload[offset : offset + length]
                part = PartData(_text(name), _text(dtype), tuple(_varints(dims)), data)
            case _:
                raise CorruptFrame(f"the description of a part has wrong fields or types: {list(fields)}")
        if more or part.shape[:2] != outer:
            raise CorruptFrame(f"part {preview(part.name)} has shape {part.shape}, the header says {outer}")
        if part.dtype not in DTYPE_BYTES:
            raise TransferError(f"part {preview(part.name)} has the unknown dtype {preview(part.dtype)}")
        if DTYPE_BYTES[part.dtype] * math.prod(part.shape) != length or len(part.data) != length:
            raise CorruptFrame(f"part {preview(part.name)}: {length} bytes for {part.shape} {preview(part.dtype)}")
        offset += length
        yield part
    if offset != len(payload):
        raise CorruptFrame(f"the parts have {offset} bytes, the payload {len(payload)}")


def _part(part: PartData, length: int) -> bytes:
    return (
        _bytes_field(1, part.name.encode())
        + _bytes_field(2, part.dtype.encode())
        + _bytes_field(3, b"".join(map(varint, part.shape)))
        + _number_field(4, length)
    )


def _number_field(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return begin_field(number, len(value)) + value


def _collect(body: memoryview, repeated: int = 0) -> tuple[dict[int, int], list[memoryview]]:
    """Number fields by field number, and the values of the one repeated field of messages."""
    numbers: dict[int, int] = {}
    messages: list[memoryview] = []
    for number, value in _ascending(body, repeated):
        if number == repeated and isinstance(value, memoryview):
            messages.append(value)
        elif number != repeated and isinstance(value, int) and value <= _UINT32_MAX:
            numbers[number] = value
        else:
            raise CorruptFrame(f"field {number} of a header has the wrong type or value")
    return numbers, messages


def _ascending(body: memoryview, repeated: int = 0) -> Iterator[tuple[int, int | memoryview]]:
    last = 0
    for number, value, *_ in read_fields(body):
        if number < last or (number == last and number != repeated):
            raise CorruptFrame(f"field {number} stands after field {last}")
        last = number
        yield number, value


def _varints(body: memoryview) -> Iterator[int]:
    at = 0
    while at < len(body):
        value, at = read_varint(body, at)
        yield value


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise CorruptFrame(f"a name in the frame's header is not UTF-8: {preview(bytes(data))}") from None
