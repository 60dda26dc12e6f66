"""Long lists of token ids in messages, as the bytes that they are on the wire.

A packed field of fixed32 is its tag, its length, and its numbers as little-endian uint32: the memory of an array. A
generated class takes and gives each number alone, and copies all of them several times, each time in one call that
keeps the interpreter's lock: where the memory is new, page faults make that 20 ms for a million. Here the bytes are
copied in pieces.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from baton.errors import CorruptFrame

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_ID_BYTES = 4
_PIECE = 16_384


def varint(value: int) -> bytes:
    """A number as in a message."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends; raises CorruptFrame."""
    value = shift = 0
    for at in range(at, min(at + _MAX_VARINT_BYTES, len(data))):  # noqa: B020
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise CorruptFrame("a number does not end")


def begin_field(number: int, size: int) -> bytes:
    """Tag and length that stand before the `size` bytes of a field."""
    return varint(number << 3 | _BYTES) + varint(size)


def pack_ids(number: int, ids: Sequence[int]) -> Iterator[bytes]:
    """A field of fixed32 in parts, which follow each other on the wire; nothing without ids."""
    if ids:
        yield begin_field(number, _ID_BYTES * len(ids))
    for start in range(0, len(ids), _PIECE):
        yield _swapped(array("I", ids[start : start + _PIECE])).tobytes()


def unpack_ids(data: memoryview) -> Iterator[array[int]]:
    """The ids of a field in pieces; raises CorruptFrame for bytes of no whole number of them."""
    if len(data) % _ID_BYTES:
        raise CorruptFrame(f"{len(data)} bytes of token ids")
    for start in range(0, len(data), _ID_BYTES * _PIECE):
        yield _swapped(array("I", data[start : start + _ID_BYTES * _PIECE].tobytes()))


def split(data: memoryview, *numbers: int) -> tuple[bytes, dict[int, memoryview]]:
    """A message without the fields of some numbers, and what these hold.

    Raises CorruptFrame where one of them comes twice or is no field of bytes, and for what is no message.
    """
    rest, found, at, kept = [], dict[int, memoryview](), 0, 0
    while at < len(data):
        begin = at
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            size = read_varint(data, at)[1] - at
        elif kind == _BYTES:
            size, at = read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise CorruptFrame(f"field {number} has wire type {kind}")
        if size > len(data) - at:
            raise CorruptFrame(f"field {number} has {len(data) - at} of {size} bytes")
        if number in numbers:
            if kind != _BYTES or number in found:
                raise CorruptFrame(f"field {number} comes twice, or with wire type {kind}")
            found[number] = data[at : at + size]
            rest.append(data[kept:begin])
            kept = at + size
        at += size
    return b"".join((*rest, data[kept:])), found


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
