"""The frames of a stream of KV. Data frames are encoded by hand, compatible with the message `KvFrame`.

A stream is data frames, then one manifest, then one commit (`baton.transfer.closing`):

    data        0A <len> header   12 <len> payload        header: ... 3D <checksum>
    manifest    1A <len> KvManifest
    commit      22 <len> KvCommit

If the consumer would wait long for the next of them, it gets PROGRESS, an empty message, in between.

The generated class writes exactly these bytes, and can read them. The hand-made code copies the payload once when it is
sent, and not at all when it is received. Reading is strict: fields must be in ascending order, with no unknown field
and no bytes left over.

A flipped bit is always noticed. The checksum covers the payload and the header before the checksum. The tags and
lengths outside of these must fit the frame exactly. A valid frame of another export fails the checksum too, because the
checksum begins with the transfer id.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import crc32c

from baton.errors import CorruptFrame, TransferError, preview
from baton.kv.format import DTYPE_BYTES, PartData
from baton.rpc.packed import begin_field, read_varint, varint
from baton.transfer import closing

PROGRESS = b""
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
    """A data frame: each part is `[len(tokens), len(heads), ...]`, its data a view into the frame."""

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
    """A data frame and its checksum: the CRC-32C, starting from `seed`, of the header before it and then the
    payload.
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
    """The manifest's digest after one more frame; it starts as 0."""
    return int(crc32c.crc32c(_FIXED.pack(checksum), digest))


def decode(frame: bytes, seed: int = 0) -> KvData | closing.Manifest | closing.Commit:
    """Decode and check one frame of the export with that seed; the payload is not copied.

    Raises CorruptFrame; TransferError for a valid frame with an unknown element type.
    """
    if not frame.startswith(_DATA):
        return closing.decode(frame)
    fields = list(islice(_fields(memoryview(frame)), _OUTER_FIELDS))
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
                raise CorruptFrame(f"a part is described by fields {list(fields)}")
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
    for number, value in _fields(body):
        if number < last or (number == last and number != repeated):
            raise CorruptFrame(f"field {number} stands after field {last}")
        last = number
        yield number, value


def _fields(body: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) of each field: varint, fixed32 or length-delimited."""
    at = 0
    while at < len(body):
        tag, at = read_varint(body, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = read_varint(body, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, at = read_varint(body, at)
        elif kind == _FIXED32:
            length = _FIXED.size
        else:
            raise CorruptFrame(f"field {tag >> 3} has wire type {kind}")
        data = body[at : at + length]
        if len(data) != length:
            raise CorruptFrame(f"field {tag >> 3} has {len(data)} of {length} bytes")
        at += length
        yield tag >> 3, data if kind == _BYTES else _FIXED.unpack(data)[0]


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
